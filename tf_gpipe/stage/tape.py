"""A stage run under a gradient tape: eagerly, or if XLA compiles the step."""

import functools
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage import lookups
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.gradients import GradientSum
from tf_gpipe.stage.lookups import Lookup
from tf_gpipe.stage.phases import Phases
from tf_gpipe.stage.phases import StagePhases
from tf_gpipe.stage.structures import tensors


class TapedStage:
    """A stage whose activations a tape keeps, with `StagePhases`'s interface.

    Args:
        function: `StageFunction`.
        repeatable: Whether backward passes may run more than once.
    """

    def __init__(self, function: StageFunction, repeatable: bool):
        self.function = function
        self.repeatable = repeatable
        self._phases = StagePhases(function)
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
        phases = self._phases.phases_for(inputs, carried)
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
        self.for_weights: list[tf.Tensor] = []
        # A Jacobian traces the backward pass of what ran eagerly.
        self._runs_again = remat and tf.executing_eagerly()
        function = stage.function
        if self._runs_again:
            self.result = function(inputs, carried)
        else:
            again = functools.partial(_rematerialized, function)
            self.result, self._gradient = function.with_gradient(
                inputs, carried, again if remat else function, stage.repeatable
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
        self.for_weights = tensors([x for _, x in self._variable_gradients])
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
        return self.for_weights


def _rematerialized(
    function: StageFunction, inputs: Activations, carried: list
) -> Result:
    """Runs the stage so that its gradient recomputes the activations.

    `tf.recompute_grad` makes the arguments of the recomputation depend on the
    incoming gradient by arithmetic, so they must be floating-point. If all
    inputs of a stage are integers, a zero of type float is added to them, which
    carries the dependency.
    """
    floats = inputs.floats()
    structure: Any = None

    def run(*args):
        nonlocal structure
        again, values = inputs.with_floats(args), list(carried)
        if not floats:
            again = inputs.with_parts(
                x + tf.cast(args[0], x.dtype) if x.dtype.is_integer else x
                for x in inputs.parts()
            )
        weights = args[len(args) - len(function.borrowed_indices) :]
        for i, x in zip(function.borrowed_indices, weights, strict=True):
            values[i] = x
            # The gradients by these variables are asked for too: a layer's
            # own `keras.remat` reads the variables themselves, but under
            # `tf.recompute_grad` not before the gradient runs.
            upstream.watch_as_read(function.carried[i].value)
        structure = function(again, values)
        leaves = keras.tree.flatten(structure)
        return [leaves[i] for i in _differentiable_first(leaves)]

    results = tf.recompute_grad(run)(
        *(floats or [tf.zeros(())]),
        *(carried[i] for i in function.borrowed_indices),
    )
    leaves = keras.tree.flatten(structure)
    for i, x in zip(_differentiable_first(leaves), results, strict=True):
        leaves[i] = x
    return keras.tree.pack_sequence_as(structure, leaves)


def _differentiable_first(leaves: list) -> list[int]:
    """Returns the indices of tensors in `leaves`, floating-point ones first.

    Strings are left out, which `tf.custom_gradient` cannot return.
    """
    return sorted(
        (
            i
            for i, x in enumerate(leaves)
            if x is not None and x.dtype != tf.string
        ),
        key=lambda i: not leaves[i].dtype.is_floating,
    )
