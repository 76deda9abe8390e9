"""A stage that a gradient tape follows: eagerly, or where XLA compiles all."""

from collections.abc import Callable

import tensorflow as tf

from tf_gpipe.gradients import Gradients
from tf_gpipe.gradients import GradientSum
from tf_gpipe.stage import Activations
from tf_gpipe.stage_function import Result
from tf_gpipe.stage_function import StageFunction


class TapedStage:
    """A stage whose activations a tape keeps. As `StagePhases`.

    Args:
        function: `StageFunction`.
        repeatable: Boolean, whether backward passes may run more than once.
    """

    def __init__(self, function: StageFunction, repeatable: bool):
        self.function = function
        self._repeatable = repeatable

    def __call__(self, inputs: Activations, carried: list) -> Result:
        """Runs the stage, for no backward pass of the pipeline."""
        return self.function(inputs, carried)

    def start(
        self, inputs: Activations, carried: list, remat: bool
    ) -> "TapedCall":
        """Runs the stage forward."""
        with self.function.on_device():
            return TapedCall(
                self.function,
                *self.function.differentiable(
                    inputs, carried, remat, self._repeatable
                ),
            )


class TapedCall:
    """One pass of a micro-batch through a stage. As `PhasedCall`.

    `tf.recompute_grad` recomputes in the backward pass, and the gradients of
    weights come with those of inputs.
    """

    def __init__(
        self,
        function: StageFunction,
        result: Result,
        gradient: Callable[[list], tuple[list, Gradients]],
    ):
        self.result = result
        self._function = function
        self._gradient = gradient
        self.kept = Gradients([], [])

    def recompute(self) -> list[tf.Tensor]:
        """Does nothing."""
        return []

    def backward(self, upstream: list, sums: GradientSum) -> list:
        """Runs the backward pass. Returns the gradients of the inputs."""
        del sums
        by_input, self.kept = self._gradient(upstream)
        return by_input

    def weights(self, sums: GradientSum) -> None:
        """Adds the gradients of weights."""
        sums.add(self.kept, self._function.dense, self._function.sparse)
