"""A trace of a stage with its gradient."""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.stage import LayerRunner
from tf_gpipe.stage.structures import tensors


class Trace(NamedTuple):
    """Tensors of a traced stage and, if it has one, of its gradient."""

    num_inputs: int  # tensors among the stage's inputs, without `carried`
    num_forward: int  # operations of the graph in the forward pass
    ends: list[int]  # operations before the first and after each layer call
    result: Result
    # A placeholder for the gradient, or None, for each of `result.targets`.
    # This and the next two are empty if the trace has no gradient.
    output_gradients: Sequence = ()
    input_gradients: Sequence = ()  # a gradient or None for each flat input
    variable_gradients: Sequence = ()  # pairs of a variable and its gradient

    def operations_of(self, calls: range) -> range:
        """Returns the places in the graph of the operations of layer calls.

        Operations before the first call of the stage count as its own, and
        those after the last call likewise.
        """
        ends = [0, *self.ends[1:-1], self.num_forward]
        return range(ends[calls.start], ends[calls.stop])


class TracedStage:
    """A stage that is traced once for all arguments of equal shapes.

    Args:
        function: `StageFunction` of the stage.
        differentiated: Whether the trace has the gradient.
        make_runner: Function that makes the `LayerRunner` for layers that share
            phases, if any. It is called when the stage is traced.
    """

    def __init__(
        self,
        function: StageFunction,
        differentiated: bool = True,
        make_runner: Callable[[], LayerRunner | None] = lambda: None,
    ):
        self._function = function
        self._differentiated = differentiated
        self._make_runner = make_runner
        self._traced = tf.function(self._trace, autograph=False)
        # Keys are the graphs of traces.
        self._traces: dict[Any, Trace] = {}

    def trace(self, inputs: Activations, carried: list) -> tuple[Any, Trace]:
        """Returns the concrete function, which is never run, and its `Trace`.

        Args:
            inputs: The inputs of the stage.
            carried: The values of `StageFunction.carried`.
        """
        # Outside of device functions, for the reason in `FunctionCall`.
        with tf.device(None):
            found = self._traced.get_concrete_function(inputs, carried)
        return found, self._traces[found.graph]

    def _trace(self, inputs: Activations, carried: list) -> None:
        # Called before the scope of the stage is entered, in which variables
        # are replaced by tensors.
        run = functools.partial(self._function, runner=self._make_runner())
        # With tapes on, even if they are stopped here: the trace is kept, and
        # is used later where tapes record.
        with self._function.on_device(), upstream.tapes_restarted():
            graph = tf.compat.v1.get_default_graph()
            gradient = None
            if self._differentiated:
                result, gradient = self._function.with_gradient(
                    inputs, carried, run
                )
            else:
                result = run(inputs, carried)
            num_forward = len(graph.get_operations())
            gradients: tuple = ()
            if gradient is not None:
                # For the gradients that arrive in the backward phase: the
                # placeholders are feeds of parts of the trace.
                arriving = [
                    tf.compat.v1.placeholder(x.dtype, x.shape)
                    if x.dtype.is_floating
                    else None
                    for x in result.targets
                ]
                # The name by which an error in the backward phase is placed.
                with tf.name_scope(f"{self._function.stage.scope}/backward"):
                    gradients = arriving, *gradient(arriving)
            self._traces[graph] = Trace(
                len(tensors(inputs)),
                num_forward,
                self._function.ends,
                result,
                *gradients,
            )
