"""A stage that a gradient tape follows: eagerly, or where XLA compiles all."""

from typing import Any

import tensorflow as tf

from tf_gpipe.stage import lookups
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.function_call import tensors
from tf_gpipe.stage.gradients import GradientSum
from tf_gpipe.stage.lookups import Lookup
from tf_gpipe.stage.phases import StagePhases
from tf_gpipe.stage.stage import Activations
from tf_gpipe.stage.traced_phases import Phases


class TapedStage:
    """A stage whose activations a tape keeps. As `StagePhases`.

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
        """Runs the stage, for no backward pass of the pipeline."""
        return self.function(inputs, carried)

    def start(
        self, inputs: Activations, carried: list, remat: bool
    ) -> "TapedCall":
        """Runs the stage forward."""
        with self.function.on_device():
            return TapedCall(self, inputs, carried, remat)

    def lookups(self, inputs: Activations, carried: list) -> list[Lookup]:
        """Returns the lookups of a call of the stage, which a trace tells."""
        phases = self._phases.traced(inputs, carried)
        if phases not in self._lookups:
            self._lookups[phases] = phases.lookups(phases.trace.by_variable)
        return self._lookups[phases]


class TapedCall:
    """One pass of a micro-batch through a stage. As `PhasedCall`.

    Eagerly, a recomputation runs the stage a second time, under a tape. What
    XLA compiles as a whole might merge the two runs: there
    `tf.recompute_grad` makes the second one wait for the gradient. The
    gradients of weights come with those of inputs.
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
        self._by_variable: list = []
        self.kept: list[tf.Tensor] = []
        # A Jacobian traces the backward pass of what ran eagerly.
        self._runs_again = remat and tf.executing_eagerly()
        if self._runs_again:
            self.result = stage.function(inputs, carried)
        else:
            self.result, self._gradient = stage.function.differentiable(
                inputs, carried, remat, stage.repeatable
            )

    def recompute(self) -> list[tf.Tensor]:
        """Runs the stage again where the gradient does not do so itself."""
        if self._runs_again:
            function = self._stage.function
            with function.on_device():
                _, self._gradient = function.differentiable(
                    *self._given, repeatable=self._stage.repeatable
                )
        return []

    def backward(self, upstream: list, sums: GradientSum) -> list:
        """Runs the backward pass. Returns the gradients of the inputs."""
        del sums
        by_input, self._by_variable = self._gradient(upstream)
        self.kept = tensors([x for _, x in self._by_variable])
        return by_input

    def weights(self, sums: GradientSum) -> list[tf.Tensor]:
        """Adds the gradients of weights."""
        dense = []
        for variable, x in self._by_variable:
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
