"""A stage that a gradient tape follows: eagerly, or where XLA compiles all."""

from collections.abc import Callable

import tensorflow as tf

from tf_gpipe.function_call import tensors
from tf_gpipe.gradients import GradientSum
from tf_gpipe.stage import Activations
from tf_gpipe.stage_function import Result
from tf_gpipe.stage_function import StageFunction


class TapedStage:
    """A stage whose activations a tape keeps. As `StagePhases`.

    Args:
        function: `StageFunction`.
        repeatable: Whether backward passes may run more than once.
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
                *self.function.differentiable(
                    inputs, carried, remat, self._repeatable
                )
            )


class TapedCall:
    """One pass of a micro-batch through a stage. As `PhasedCall`.

    `tf.recompute_grad` recomputes in the backward pass, and the gradients of
    weights come with those of inputs.
    """

    def __init__(self, result: Result, gradient: Callable):
        self.result = result
        self._gradient = gradient
        self._by_variable: list = []
        self.kept: list[tf.Tensor] = []

    def recompute(self) -> list[tf.Tensor]:
        """Does nothing."""
        return []

    def backward(self, upstream: list, sums: GradientSum) -> list:
        """Runs the backward pass. Returns the gradients of the inputs."""
        del sums
        by_input, self._by_variable = self._gradient(upstream)
        self.kept = tensors([x for _, x in self._by_variable])
        return by_input

    def weights(self, sums: GradientSum) -> list[tf.Tensor]:
        """Adds the gradients of weights."""
        return sums.add(self._by_variable)
