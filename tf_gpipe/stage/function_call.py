"""A function that a graph calls many times."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices.functions import NotInlinedFunction
from tf_gpipe.stage.structures import filled
from tf_gpipe.stage.structures import tensors

NO_SECOND_DERIVATIVES = (
    "A pipeline has no second derivatives in training mode, as a gradient "
    "penalty takes them. Call it with `training=False` for those."
)
_GRADIENT = "PipelineFunctionCall"


class FunctionCall:
    """A function that a graph calls many times: traced once, never inlined.

    It does what a `tf.function` does, but each call is faster to trace:
    TensorFlow infers the shapes of a function's body again at each call of it,
    and this call is marked so that it does not.

    While TensorFlow optimises a graph, it also goes through the body of each
    function that the graph calls several times. A long body should therefore
    be in a function that this one calls.

    A gradient tape does not record such a call, and the gradient of a graph
    that has one fails.

    TensorFlow runs calls with side effects in program order: calls that take
    the same variable, and all that take no variable, one after another, even
    on different devices. So that stages do not wait for each other, a call
    that takes no variable is ordered by its inputs alone.

    Args:
        function: Maps nested structures of tensors to another one.
        stateless: Whether to mark the call as free of side effects, even if it
            has some: then it runs only if its result is used.
        optimized: Whether TensorFlow optimises the function's body.
        jit_compile: Whether XLA compiles it.
    """

    def __init__(
        self,
        function: Callable,
        stateless: bool = False,
        optimized: bool = False,
        jit_compile: bool = False,
    ):
        self._stateless = stateless
        self._optimized = optimized
        self._jit_compile = jit_compile
        self._function = NotInlinedFunction(function, jit_compile)
        # By trace: whether it has side effects.
        self._stateful: dict[Any, bool] = {}

    def __call__(self, *args: Any) -> Any:
        # Outside of device functions, such as that of `evaluate`, which would
        # place the traced operations on the devices of the first call's
        # inputs. Calls on other devices would then send tensors between
        # devices, and TensorFlow would mix up the tensors of different calls.
        with tf.device(None):
            concrete = self._function.get_concrete_function(*args)
        graph = tf.compat.v1.get_default_graph()
        concrete.add_to_graph(graph)
        inputs = tensors(args) + concrete.captured_inputs
        if concrete not in self._stateful:
            self._stateful[concrete] = not self._stateless and any(
                op.op_def.is_stateful for op in concrete.graph.get_operations()
            )
        stateful = self._stateful[concrete]
        call = upstream.call_operation(
            graph,
            concrete,
            inputs,
            stateful,
            self._optimized,
            self._jit_compile,
            _GRADIENT,
        )
        if stateful and all(x.dtype != tf.resource for x in inputs):
            upstream.run_in_no_order(call)
        for x, inferred in zip(call.outputs, concrete.outputs, strict=True):
            x.set_shape(inferred.shape)
        return filled(concrete.structured_outputs, call.outputs)


@tf.RegisterGradient(_GRADIENT)
def _fail(op: tf.Operation | None, *args: tf.Tensor) -> list:
    """A gradient that fails where it runs.

    TensorFlow traces it for persistent tapes, even if it never runs. It also
    traces it when it saves the function: then it passes no operation, but the
    inputs.
    """
    inputs = args if op is None else op.inputs
    check = tf.debugging.Assert(False, [NO_SECOND_DERIVATIVES])
    with tf.control_dependencies([check]):
        return [
            tf.zeros_like(x) if x.dtype.is_floating else None for x in inputs
        ]
