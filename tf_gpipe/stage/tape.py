"""A stage run under a gradient tape: eagerly, or if XLA compiles the step."""

from typing import Any

import tensorflow as tf

from tf_gpipe.stage import lookups
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.gradients import GradientSum
from tf_gpipe.stage.lookups import Lookup
from tf_gpipe.stage.phases import StagePhases
from tf_gpipe.stage.stage import Activations
from tf_gpipe.stage.structures import tensors
from tf_gpipe.stage.traced_phases import Phases


class TapedStage:
    """A stage whose activations a tape keeps, with `StagePhases`'s interface.

    Args:
        function: `StageFunction`.
        repeatable: Whether backward passes may run more than once.
    """

    def __init__(self, function: StageFunction, repeatable: bool):
        self.function = function
        self.repeatable = repeatable
        self._phases = StagePhases(
            function, splits=False, recomputed=(), jit_compile=False
        )
        self._lookups: dict[Phases, list[Lookup]] = {}

    def __call__(self, inputs: Activations, carried: list) -> Result:
        """Runs the stage without a backward pass of the pipeline."""
        return self.function(inputs, carried)

    def start(
        self, inputs: Activations, carried: list, remat: bool
    ) -> "TapedCall":
        """Runs the forward pass."""
        with self.function.on_device():
            return TapedCall(self, inputs, carried, remat)

    def lookups(self, inputs: Activations, carried: list) -> list[Lookup]:
        """Returns the lookups of a call of the stage, found in a trace."""
        phases = self._phases.traced(inputs, carried)
        if phases not in self._lookups:
            self._lookups[phases] = phases.lookups(
                phases.trace.variable_gradients
            )
        return self._lookups[phases]


class TapedCall:
    """One micro-batch in a stage under a tape, with `PhasedCall`'s interface.

    Eagerly, recomputation runs the stage a second time, under a tape. When XLA
    compiles the whole step it might merge the two runs: there
    `tf.recompute_grad` makes the second one wait for the gradient. The
    gradients of weights are computed with those of inputs.
    """

    def __init__(
        self,
        stage: TapedStage,
        inputs: Activations,
        carried: list,
        remat: bool,
    ):
        self._stage = stage
        self._given = inputs, carried
        self._gradient: Any = None
        self._variable_gradients: list = []
        self.kept: list[tf.Tensor] = []
        # A Jacobian traces the backward pass of what ran eagerly.
        self._runs_again = remat and tf.executing_eagerly()
        if self._runs_again:
            self.result = stage.function(inputs, carried)
        else:
            self.result, self._gradient = stage.function.with_gradient(
                inputs, carried, remat, stage.repeatable
            )

    def recompute(self) -> list[tf.Tensor]:
        """Runs the stage again, unless the gradient does so itself.

        Returns an empty list, as there are no tensors to wait for.
        """
        if self._runs_again:
            function = self._stage.function
            with function.on_device():
                _, self._gradient = function.with_gradient(
                    *self._given, repeatable=self._stage.repeatable
                )
        return []

    def backward(self, output_gradients: list, sums: GradientSum) -> list:
        """Runs the backward pass. Returns the gradients of the inputs."""
        del sums
        input_gradients, self._variable_gradients = self._gradient(
            output_gradients
        )
        self.kept = tensors([x for _, x in self._variable_gradients])
        return input_gradients

    def weights(self, sums: GradientSum) -> list[tf.Tensor]:
        """Adds the gradients of weights to `sums`."""
        dense = []
        for variable, x in self._variable_gradients:
            if not isinstance(x, tf.IndexedSlices):
                dense.append((variable, x))
                continue
            found = [
                each
                for each in self._stage.lookups(*self._given)
                if each.variable is variable
            ]
            sums.add_lookups(found, lookups.divided(x, found))
        sums.add(dense)
        return self.kept
