"""Forward, recompute, backward and weights phases of a stage as functions."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices.functions import NotInlinedFunction
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.gradients import GradientSum
from tf_gpipe.stage.pack import unpack
from tf_gpipe.stage.stage import Activations
from tf_gpipe.stage.stage import LayerRunner
from tf_gpipe.stage.stage import share_nothing
from tf_gpipe.stage.structures import tensors
from tf_gpipe.stage.traced_phases import Phases
from tf_gpipe.stage.traced_phases import Trace


class StagePhases:
    """The phases of a stage as functions, traced once for all micro-batches.

    The phases are cut from a trace of the stage with its gradient:

        inputs ------> forward ------> result
                          | stored
                          v
        gradients <--- backward <----- gradients
        of inputs         | kept       of the result
                          v
                       weights ------> gradients of weights

    No two phases compute the same, except with rematerialisation. Then the
    forward phase does not store the inner activations of recomputed layers. If
    all of them are one range, a recompute phase runs it before the backward
    phase. If they are several ranges, the backward phase recomputes each when
    the gradient arrives there. Unless `splits`, the backward phase also
    computes the gradients of weights, and there is no weights phase. Unless
    `differentiated`, there is only a forward phase.

    Args:
        function: `StageFunction`.
        splits: Whether the gradients of weights have a phase of their own.
        recomputed: Ranges of indices in `Stage.nodes`: the calls that are
            recomputed. Calls of one range are recomputed together.
        jit_compile: Whether XLA compiles the phases.
        instead: Function that returns the `LayerRunner` for layers that share
            phases; see `run_stage`. It is called when the stage is traced.
        differentiated: Whether the phases may be differentiated.
    """

    def __init__(
        self,
        function: StageFunction,
        splits: bool,
        recomputed: Sequence[range],
        jit_compile: bool,
        instead: Callable[[], LayerRunner] = lambda: share_nothing,
        differentiated: bool = True,
    ):
        self.function = function
        self._differentiated = differentiated
        self._instead = instead
        self._splits = splits
        self._recomputed = recomputed
        self._jit_compile = jit_compile
        self._plain = NotInlinedFunction(function, jit_compile)
        self._traced = tf.function(self._trace, autograph=False)
        # Keys are the graphs of traces.
        self._traces: dict[Any, Trace] = {}
        self._by_graph: dict[Any, Phases] = {}

    def __call__(self, inputs: Activations, carried: list) -> Result:
        """Runs the stage without a backward phase; a tape may record it."""
        if not self._differentiated:
            return self.start(inputs, carried, remat=False).result
        # Not by phases, which a tape cannot record.
        with self.function.on_device():
            return self._plain(inputs, carried)

    def start(
        self, inputs: Activations, carried: list, remat: bool
    ) -> "PhasedCall":
        """Runs the forward phase.

        Args:
            inputs: The inputs of the stage.
            carried: The values of `StageFunction.carried`.
            remat: Whether this micro-batch is recomputed. Then
                `PhasedCall.recompute` must be called before the backward phase.
        """
        with self.function.on_device():
            phases = self.traced(inputs, carried)
            given = tensors((inputs, carried))
            return PhasedCall(phases, phases.weights, given, remat)

    def read_weights_again(self) -> None:
        """Makes later phases of the graph read the weights anew.

        After weights have been assigned within the graph.
        """
        for phases in self._by_graph.values():
            phases.read_weights_again()

    def captured(self) -> list[tf.Tensor]:
        """Returns the tensors that the traces capture from outside."""
        concretes = self._plain.traced()
        found = [x for each in concretes for x in each.captured_inputs]
        for phases in self._by_graph.values():
            found += phases.traced.captured()
        return found

    def traced(self, inputs: Activations, carried: list) -> Phases:
        """Returns the phases for arguments of these dtypes and shapes."""
        # Outside of device functions, for the reason in `FunctionCall`.
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
        # Called before the scope of the stage is entered, in which variables
        # are replaced by tensors.
        instead = self._instead()
        # With tapes on, even if they are stopped here: the trace is kept, and
        # is used later where tapes record.
        with self.function.on_device(), upstream.tapes_restarted():
            graph = tf.compat.v1.get_default_graph()
            arriving: list = []
            input_gradients: list = []
            variable_gradients: list = []
            if self._differentiated:
                result, gradient = self.function.with_gradient(
                    inputs, carried, instead=instead
                )
            else:
                result = self.function(inputs, carried, instead)
            num_forward = len(graph.get_operations())
            if self._differentiated:
                # For the gradients that arrive in the backward phase: the
                # placeholders are feeds of parts of the trace.
                arriving = [
                    tf.compat.v1.placeholder(x.dtype, x.shape)
                    if x.dtype.is_floating
                    else None
                    for x in result.targets
                ]
                # The name by which an error in the backward phase is placed.
                with tf.name_scope(f"{self.function.stage.scope}/backward"):
                    input_gradients, variable_gradients = gradient(arriving)
            self._traces[graph] = Trace(
                len(tensors(inputs)),
                num_forward,
                self.function.ends,
                result,
                arriving,
                input_gradients,
                variable_gradients,
            )


class PhasedCall:
    """A micro-batch on its way through the phases of a stage.

    Args:
        phases: The `Phases` of the stage.
        packed: Function that returns the pack of weights for a phase.
        inputs: The tensors of the stage's inputs and carried values.
        remat: Whether this micro-batch is recomputed; see `StagePhases.start`.

    Attributes:
        result: `Result`.
        kept: Tensors that `backward` has kept for `weights`: they are ready
            once the backward phase is done.
    """

    def __init__(
        self,
        phases: Phases,
        packed: Callable[[], list[tf.Tensor]],
        inputs: list[tf.Tensor],
        remat: bool,
    ):
        self._phases = phases
        self._packed = packed
        self._inputs = inputs
        self._remat = remat
        # Known once the backward phase has run.
        self._backward: Any = None
        self.kept: Any = None
        self.result, self._made = phases.forward(packed(), inputs, not remat)
        self._stored = self._made

    def recompute(self) -> list[tf.Tensor]:
        """Runs the recompute phase, if the stage has one.

        Returns the pack of tensors that the backward phase reads.
        """
        phases = self._phases
        if phases.recomputes_before:
            # From `_made`, which stays: a tape may ask for it more than once.
            self._stored = phases.recompute(
                self._packed(), self._inputs, self._made
            )
        return self._stored

    def backward(self, output_gradients: list, sums: GradientSum) -> list:
        """Runs the backward phase.

        Args:
            output_gradients: A gradient or `None` for each of `Result.targets`.
            sums: The `GradientSum` of the stage.

        Returns:
            List with a gradient or `None` for each part of the inputs.
        """
        pairs = [
            (x, arrived)
            for x, arrived in zip(
                self.result.targets, output_gradients, strict=True
            )
            if x.dtype.is_floating
        ]
        self._backward = self._phases.backward(
            tuple(arrived is not None for _, arrived in pairs), self._remat
        )
        values = [
            tf.zeros_like(x) if arrived is None else tf.cast(arrived, x.dtype)
            for x, arrived in pairs
        ]
        input_gradients, self.kept = self._backward.run(
            self._packed(),
            self._stored,
            values,
            [] if self._phases.splits else sums.place(self._backward.dense),
        )
        return input_gradients

    def weights(self, sums: GradientSum) -> list[tf.Tensor]:
        """Adds the gradients of weights to `sums`, after the backward phase.

        Returns tensors that are ready once all gradients have been added.
        """
        variables = self._backward.dense
        place = sums.place(variables)
        made = self.kept
        if self._phases.splits:
            made = self._backward.weights(self._packed(), made, place)
        dense, sparse = made
        if place:
            sums.added(variables, dense)
        else:
            # Not `v.value`: a layer may ask for the gradient in a scope that
            # gives its weights other values.
            like = list(map(upstream.tensorflow_variable, variables))
            values = unpack(dense, like)
            sums.add(zip(variables, values, strict=True))
        sums.add_lookups(self._backward.sparse, sparse)
        return tensors(made)
