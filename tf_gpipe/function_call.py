"""Calls of one function, many times in a graph."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class FunctionCall:
    """A function that a graph calls many times: traced once, never inlined.

    It does what a `tf.function` does, for less time at each call: TensorFlow
    infers the shapes of all that is in a function again at each call of it.
    Here the call says that it need not.

    TensorFlow also goes through the body of each function that a graph calls
    several times, while it optimises the graph. A long body should be one
    call more away.

    A gradient tape does not see such a call.

    TensorFlow runs calls that have side effects one after another, those of
    different devices too. One that has none says so.

    Args:
        function: Function from nested structures of tensors to another one.
        stateless: Boolean, whether to say so even if it has some.
    """

    def __init__(self, function: Callable, stateless: bool = False):
        self._stateless = stateless
        self._function = tf.function(
            function,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )

    def __call__(self, *args: Any) -> Any:
        concrete = self._function.get_concrete_function(*args)
        concrete.add_to_graph(tf.compat.v1.get_default_graph())
        inputs = [x for x in _flatten(args) if isinstance(x, tf.Tensor)]
        found = iter(
            emit_call(
                concrete.name,
                [*inputs, *concrete.captured_inputs],
                concrete.outputs,
                stateless=self._stateless
                or not has_side_effects(concrete.graph.get_operations()),
            )
        )
        return tf.nest.pack_sequence_as(
            concrete.structured_outputs,
            [
                None if x is None else next(found)
                for x in _flatten(concrete.structured_outputs)
            ],
            expand_composites=True,
        )


def has_side_effects(operations: Iterable[tf.Operation]) -> bool:
    """Returns whether TensorFlow takes operations to have side effects.

    Among them is to read a variable, which must come before it changes.
    """
    return any(op.op_def.is_stateful for op in operations)


def emit_call(
    name: str | bytes,
    inputs: Sequence[tf.Tensor],
    like: Sequence[tf.Tensor],
    stateless: bool = False,
    xla: bool = False,
) -> list[tf.Tensor]:
    """Adds a call of a function to the graph.

    Args:
        name: String, the function's name.
        inputs: List of tensors, all that it is given.
        like: List of tensors of the dtypes and shapes that it returns.
        stateless: Boolean, whether the call has no side effects.
        xla: Boolean, whether XLA compiles the function.

    Returns:
        List of tensors.
    """
    value = tf.compat.v1.AttrValue
    call = tf.compat.v1.get_default_graph().create_op(
        "PartitionedCall" if stateless else "StatefulPartitionedCall",
        inputs,
        [x.dtype for x in like],
        attrs={
            "Tin": _types(inputs),
            "Tout": _types(like),
            "f": value(func=tf.compat.v1.NameAttrList(name=name)),
            "_disable_call_shape_inference": value(b=True),
            **({"_XlaMustCompile": value(b=True)} if xla else {}),
        },
    )
    for x, inferred in zip(call.outputs, like, strict=True):
        x.set_shape(inferred.shape)
    return list(call.outputs)


def _flatten(structure: Any) -> list:
    return tf.nest.flatten(structure, expand_composites=True)


def _types(tensors: Sequence[tf.Tensor]) -> Any:
    types = [x.dtype.as_datatype_enum for x in tensors]
    value = tf.compat.v1.AttrValue
    return value(list=value.ListValue(type=types))
