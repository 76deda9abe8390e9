"""The phases of a stage as functions, traced once for all micro-batches."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices.errors import TellingFunction
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.function_call import tensors
from tf_gpipe.stage.gradients import GradientSum
from tf_gpipe.stage.pack import unpack
from tf_gpipe.stage.stage import Activations
from tf_gpipe.stage.stage import Instead
from tf_gpipe.stage.stage import in_line
from tf_gpipe.stage.traced_phases import Phases
from tf_gpipe.stage.traced_phases import Trace


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

    No two of them compute the same, unless remat asks for it. Then the
    forward phase stores nothing that the recomputed layers make within them.
    Where these are recomputed together, a phase of its own does so, before the
    backward phase. Where they are several parts, the backward phase recomputes
    each when the gradient has come there. Where the gradients of weights need
    not be apart, the backward phase computes them. Where no gradients follow
    there is a forward phase alone.

    Args:
        function: `StageFunction`.
        splits: Whether the gradients of weights are apart.
        recomputed: The calls of the stage that are recomputed, places in
            `Stage.nodes`: those in a range together.
        jit_compile: Whether XLA compiles the phases.
        instead: Function that returns what runs layers that have phases of
            their own; see `run_stage`. It is called where there are phases.
        differentiated: Whether gradients may follow.
    """

    def __init__(
        self,
        function: StageFunction,
        splits: bool,
        recomputed: Sequence[range],
        jit_compile: bool,
        instead: Callable[[], Instead] = lambda: in_line,
        differentiated: bool = True,
    ):
        self.function = function
        self._differentiated = differentiated
        self._instead = instead
        self._splits = splits
        self._recomputed = recomputed
        self._jit_compile = jit_compile
        self._plain = TellingFunction(function, jit_compile)
        self._traced = tf.function(self._trace, autograph=False)
        # Both by the graph of a trace.
        self._traces: dict[Any, Trace] = {}
        self._by_graph: dict[Any, Phases] = {}

    def __call__(self, inputs: Activations, carried: list) -> Result:
        """Runs the stage, for no backward pass of the pipeline."""
        if not self._differentiated:
            return self.start(inputs, carried, remat=False).result
        # A tape may record it.
        with self.function.on_device():
            return self._plain(inputs, carried)

    def start(
        self, inputs: Activations, carried: list, remat: bool
    ) -> "PhasedCall":
        """Runs the stage forward.

        Args:
            inputs: What the stage takes.
            carried: The values of what the function carries.
            remat: Whether what is recomputed will be; `PhasedCall.recompute`
                must be called then.
        """
        with self.function.on_device():
            phases = self.traced(inputs, carried)
            return PhasedCall(phases, tensors((inputs, carried)), remat)

    def read_weights_again(self) -> None:
        """Makes phases read weights that have been assigned in the graph."""
        for phases in self._by_graph.values():
            phases.read_weights_again()

    def captured(self) -> list[tf.Tensor]:
        """Returns what traces take from outside, beside their arguments."""
        concretes = self._plain.traced()
        found = [x for each in concretes for x in each.captured_inputs]
        for phases in self._by_graph.values():
            found += phases.traced.captured()
        return found

    def traced(self, inputs: Activations, carried: list) -> Phases:
        """Returns the phases, cut from a trace for such arguments."""
        # As `FunctionCall`, of which its parts become functions.
        with tf.device(None):
            concrete = self._traced.get_concrete_function(inputs, carried)
        graph = concrete.graph
        if graph not in self._by_graph:
            self._by_graph[graph] = Phases(
                f"stage {self.function.stage.index}",
                concrete,
                self._traces[graph],
                self._splits,
                self._jit_compile,
                self._recomputed,
            )
        return self._by_graph[graph]

    def _trace(self, inputs: Activations, carried: list) -> None:
        # Not in the scope of the stage, where variables are tensors.
        instead = self._instead()
        # The trace is kept: the function will be called where tapes do record.
        with self.function.on_device(), upstream.tapes_restarted():
            graph = tf.compat.v1.get_default_graph()
            arriving: list = []
            by_input: list = []
            by_variable: list = []
            if self._differentiated:
                result, gradient = self.function.differentiable(
                    inputs, carried, instead=instead
                )
            else:
                result = self.function(inputs, carried, instead)
            num_forward = len(graph.get_operations())
            if self._differentiated:
                # Of what arrives later: they are fed to parts of the trace.
                arriving = [
                    tf.compat.v1.placeholder(x.dtype, x.shape)
                    if x.dtype.is_floating
                    else None
                    for x in result.targets
                ]
                # By which an error in it is found.
                with tf.name_scope(f"{self.function.stage.scope}/backward"):
                    by_input, by_variable = gradient(arriving)
            self._traces[graph] = Trace(
                len(tensors(inputs)),
                num_forward,
                self.function.ends,
                result,
                arriving,
                by_input,
                by_variable,
            )


class PhasedCall:
    """A micro-batch on its way through the phases of a stage.

    Attributes:
        result: `Result`.
        kept: What is left after `backward` for `weights`, to be waited for.
    """

    def __init__(self, phases: Phases, inputs: list[tf.Tensor], remat: bool):
        self._phases = phases
        self._inputs = inputs
        self._remat = remat
        # Known once the backward phase has run.
        self._backward: Any = None
        self.kept: Any = None
        self.result, self._made = phases.forward(
            phases.weights(), inputs, not remat
        )
        self._stored = self._made

    def recompute(self) -> list[tf.Tensor]:
        """Runs layers again, if they are recomputed before the backward phase.

        Returns what that needs.
        """
        phases = self._phases
        if phases.recomputes_before:
            # A tape may ask for it more than once.
            self._stored = phases.recompute(
                phases.weights(), self._inputs, self._made
            )
        return self._stored

    def backward(self, upstream: list, sums: GradientSum) -> list:
        """Runs the backward phase.

        Args:
            upstream: A tensor or `None` for each of the result's targets.
            sums: Those of the stage.

        Returns:
            List with a gradient or `None` for each flat input.
        """
        pairs = [
            (x, arrived)
            for x, arrived in zip(self.result.targets, upstream, strict=True)
            if x.dtype.is_floating
        ]
        self._backward = self._phases.backward(
            tuple(arrived is not None for _, arrived in pairs), self._remat
        )
        values = [
            tf.zeros_like(x) if arrived is None else tf.cast(arrived, x.dtype)
            for x, arrived in pairs
        ]
        by_input, self.kept = self._backward.run(
            self._phases.weights(),
            self._stored,
            values,
            [] if self._phases.splits else sums.place(self._backward.dense),
        )
        return by_input

    def weights(self, sums: GradientSum) -> list[tf.Tensor]:
        """Adds the gradients of weights, after the backward phase.

        Returns tensors that are ready once all gradients have been added.
        """
        variables = self._backward.dense
        place = sums.place(variables)
        made = self.kept
        if self._phases.splits:
            weights = self._phases.weights()
            made = self._backward.weights(weights, made, place)
        dense, sparse = made
        if place:
            sums.added(variables, dense)
        else:
            values = unpack(dense, [v.value for v in variables])
            sums.add(zip(variables, values, strict=True))
        sums.add_lookups(self._backward.sparse, sparse)
        return tensors(made)
