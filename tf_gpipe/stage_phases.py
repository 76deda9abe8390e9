"""The phases of a stage as functions, traced once for all micro-batches."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe

from tf_gpipe.function_call import tensors
from tf_gpipe.gradients import GradientSum
from tf_gpipe.stage import Activations
from tf_gpipe.stage_cuts import Cut
from tf_gpipe.stage_function import Result
from tf_gpipe.stage_function import StageFunction


class StagePhases:
    """The phases of a stage as functions, traced once for all micro-batches.

    They are cut from a trace of the stage with its gradient:

        inputs ------> forward ------> result
                          | stored
                          v
        gradients <--- backward <----- gradients
        of inputs         | kept       of the result
                          v
                       weights ------> gradients of weights

    No two of them compute the same, unless remat asks for it: then the
    forward phase stores nothing, and a phase of its own recomputes what it
    would have stored. Where the gradients of weights need not be apart, the
    backward phase computes them.

    Args:
        function: `StageFunction`.
        splits: Boolean, whether the gradients of weights are apart.
        jit_compile: Boolean, whether XLA compiles the phases.
    """

    def __init__(
        self,
        function: StageFunction,
        splits: bool,
        jit_compile: bool,
    ):
        self.function = function
        self._splits = splits
        self._jit_compile = jit_compile
        self._plain = tf.function(
            function,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes={"_noinline": True},
        )
        self._differentiated = tf.function(self._differentiate, autograph=False)
        # Both by the graph of a trace. Of the first, how many operations are
        # forward, and placeholders of the gradients that arrive.
        self._passes: dict[Any, tuple[int, list]] = {}
        self._cuts: dict[Any, Any] = {}

    def __call__(self, inputs: Activations, carried: list) -> Result:
        """Runs the stage, for no backward pass of the pipeline."""
        with self.function.on_device():
            return self._plain(inputs, carried)

    def start(
        self, inputs: Activations, carried: list, remat: bool
    ) -> "PhasedCall":
        """Runs the stage forward.

        Args:
            inputs: `Activations`.
            carried: List with the values of what the function carries.
            remat: Boolean, whether `PhasedCall.recompute` will run it again.
        """
        given = inputs, carried
        with self.function.on_device():
            concrete = self._differentiated.get_concrete_function(*given)
            graph = concrete.graph
            if graph not in self._cuts:
                self._cuts[graph] = Cut(
                    self.function,
                    concrete,
                    *self._passes[graph],
                    self._splits,
                    self._jit_compile,
                )
            return PhasedCall(self._cuts[graph], tensors(given), remat)

    def _differentiate(self, inputs: Activations, carried: list) -> tuple:
        with self.function.on_device(), _recording():
            result, gradient = self.function.differentiable(inputs, carried)
            graph = tf.compat.v1.get_default_graph()
            num_forward = len(graph.get_operations())
            # Of what arrives later: they are fed to parts of the trace.
            upstream = [
                tf.compat.v1.placeholder(x.dtype, x.shape)
                if x.dtype.is_floating
                else None
                for x in result.targets
            ]
            self._passes[graph] = num_forward, upstream
            by_input, gradients = gradient(upstream)
            return result, by_input, *gradients


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """A scope in which tapes record even if TensorFlow has stopped them.

    As `tf.recompute_grad` has when it runs a function forward. The trace is
    kept, and the function will be called with tapes that do record.
    """
    stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


class PhasedCall:
    """A micro-batch on its way through the phases of a stage.

    Attributes:
        result: `Result`.
        kept: Nested structure of what is left after `backward` for `weights`.
    """

    def __init__(self, cut: Cut, inputs: list[tf.Tensor], remat: bool):
        self._cut = cut
        self._inputs = inputs
        # Known once the backward phase has run.
        self._backward: Any = None
        self.kept: Any = None
        self.result, self._drawn = cut.forward(inputs, not remat)
        self._stored = self._drawn

    def recompute(self) -> list[tf.Tensor]:
        """Runs the stage again. Returns what the backward phase needs."""
        self._stored = self._cut.recompute(self._inputs, self._drawn)
        return self._stored

    def backward(self, upstream: list, sums: GradientSum) -> list:
        """Runs the backward phase.

        Args:
            upstream: List with a tensor or `None` for each of the result's
                targets.
            sums: `GradientSum` of the stage.

        Returns:
            List with a gradient or `None` for each flat input.
        """
        targets = self.result.targets
        floats = [i for i, x in enumerate(targets) if x.dtype.is_floating]
        arrived = tuple(upstream[i] is not None for i in floats)
        self._backward = self._cut.backward(arrived)
        values = [
            tf.zeros_like(targets[i])
            if upstream[i] is None
            else tf.cast(upstream[i], targets[i].dtype)
            for i in floats
        ]
        backward = self._backward
        place = [] if backward.splits else sums.place(backward.dense)
        by_input, self.kept = backward.run(self._stored, values, place)
        return by_input

    def weights(self, sums: GradientSum) -> None:
        """Adds the gradients of weights, after the backward phase."""
        backward, gradients = self._backward, self.kept
        if backward.splits:
            place = sums.place(backward.dense)
            gradients = backward.weights(self.kept, place)
        sums.add(gradients, backward.dense, backward.sparse)
