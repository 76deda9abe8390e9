"""Forward, recompute, backward and weights phases of a stage as functions."""

import functools
import itertools
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe.devices.functions import NotInlinedFunction
from tf_gpipe.stage import lookups
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.function_call import FunctionCall
from tf_gpipe.stage.lookups import Lookup
from tf_gpipe.stage.loops import retraced
from tf_gpipe.stage.pack import pack
from tf_gpipe.stage.pack import unpack
from tf_gpipe.stage.phased_call import Backward
from tf_gpipe.stage.phased_call import PhasedCall
from tf_gpipe.stage.read_weights import ReadWeights
from tf_gpipe.stage.recomputed_parts import RecomputedParts
from tf_gpipe.stage.stage import LayerRunner
from tf_gpipe.stage.structures import filled
from tf_gpipe.stage.structures import tensors
from tf_gpipe.stage.trace import Trace
from tf_gpipe.stage.trace import TracedStage
from tf_gpipe.stage.traced_function import TracedFunction


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
        make_runner: As in `TracedStage`.
        differentiated: Whether the phases may be differentiated.
    """

    def __init__(
        self,
        function: StageFunction,
        splits: bool = False,
        recomputed: Sequence[range] = (),
        jit_compile: bool = False,
        make_runner: Callable[[], LayerRunner | None] = lambda: None,
        differentiated: bool = True,
    ):
        self.function = function
        self._differentiated = differentiated
        self._traced = TracedStage(function, differentiated, make_runner)
        self._cut = functools.partial(
            Phases,
            name=f"stage {function.stage.index}",
            splits=splits,
            recomputed=recomputed,
            jit_compile=jit_compile,
        )
        # XLA has no variables such as those of `loops`.
        self._retraced = (lambda f: f()) if jit_compile else retraced
        self._plain = NotInlinedFunction(function, jit_compile)
        # Keys are the graphs of traces.
        self._by_graph: dict[Any, Phases] = {}

    def __call__(self, inputs: Activations, carried: list) -> Result:
        """Runs the stage without a backward phase; a tape may record it."""
        if not self._differentiated:
            return self.start(inputs, carried, remat=False).result
        # Not by phases, which a tape cannot record.
        with self.function.on_device():
            return self._retraced(lambda: self._plain(inputs, carried))

    def start(
        self, inputs: Activations, carried: list, remat: bool
    ) -> PhasedCall:
        """Runs the forward phase.

        Args:
            inputs: The inputs of the stage.
            carried: The values of `StageFunction.carried`.
            remat: Whether this micro-batch is recomputed. Then
                `PhasedCall.recompute` must be called before the backward phase.
        """
        with self.function.on_device():
            phases = self.phases_for(inputs, carried)
            given = tensors((inputs, carried))
            return PhasedCall(phases, phases.read_weights.packed, given, remat)

    def read_weights_again(self) -> None:
        """Makes later phases of the graph read the weights anew.

        After weights have been assigned within the graph.
        """
        for phases in self._by_graph.values():
            phases.read_weights.read_again()

    def captured(self) -> list[tf.Tensor]:
        """Returns the tensors that the traces capture from outside."""
        concretes = self._plain.traced()
        found = [x for each in concretes for x in each.captured_inputs]
        for phases in self._by_graph.values():
            found += phases.traced.captured()
        return found

    def phases_for(self, inputs: Activations, carried: list) -> "Phases":
        """Returns the phases for arguments of these dtypes and shapes."""
        concrete, trace = self._retraced(
            lambda: self._traced.trace(inputs, carried)
        )
        graph = concrete.graph
        if graph not in self._by_graph:
            self._by_graph[graph] = self._cut(concrete, trace)
        return self._by_graph[graph]


class Phases:
    """The phases of a stage, cut from a trace.

    Each phase takes the weights that the stage reads as one tensor: see
    `ReadWeights`.

    Args:
        concrete: The concrete function of the trace.
        trace: The `Trace`.
        name: Name of the stage, for errors.
        splits, recomputed, jit_compile: As in `StagePhases`.

    Attributes:
        read_weights: `ReadWeights`.
        early: The operations of the forward phase.
        late_effects: Operations with side effects of the backward phase.
        forward: `FunctionCall` of the forward phase. It takes the pack of
            weights, the stage's inputs, and whether to store the tensors
            `stored`, that is, not to recompute. It returns the `Result` and a
            pack of the tensors `stored`, or else of `recomputed.kept`.
        recompute: `FunctionCall` of the recompute phase. It takes the pack of
            weights, the stage's inputs and the pack of `recomputed.kept`, and
            returns the pack of `stored`.
        stored: Tensors of the forward pass that the backward phase reads.
        recomputed: `RecomputedParts`.

    Raises:
        ValueError: If XLA cannot compile the phases.
    """

    def __init__(
        self,
        concrete: Any,
        trace: Trace,
        name: str,
        splits: bool,
        recomputed: Sequence[range],
        jit_compile: bool,
    ):
        self.trace = trace
        # The first stage has no gradients of inputs to send first.
        self.splits = splits and bool(tensors(trace.input_gradients))
        self.jit_compile = jit_compile
        size = len(concrete.inputs) - len(concrete.captured_inputs)
        self.inputs = concrete.inputs[:size]
        self.output_gradients = [
            x for x in trace.output_gradients if x is not None
        ]
        self.traced = TracedFunction(
            concrete, [*self.inputs, *self.output_gradients], jit_compile
        )
        # All operations of the gradient, even those that depend on the forward
        # pass alone: computed early, their results would have to be stored.
        late = set(concrete.graph.get_operations()[trace.num_forward :])
        effects = self.traced.effects()
        self._early_effects = effects - late
        self.late_effects = effects & late
        fetches = tensors(
            (trace.input_gradients, [x for _, x in trace.variable_gradients])
        )
        self.early = self.traced.makers(fetches, self.late_effects) - late
        self.stored = self.traced.live(fetches, self.early, self.late_effects)
        if jit_compile and any(x.dtype == tf.variant for x in self.stored):
            raise ValueError(
                f"XLA cannot compile {name}: it keeps lists of tensors for "
                "the backward pass, as recurrent layers do. Received: "
                "compile(jit_compile=True). Use False."
            )
        self.recomputed = RecomputedParts(
            self.traced,
            list(map(trace.operations_of, recomputed)),
            self.early,
            self.inputs,
            self.stored,
        )
        # XLA does not support packs: compiled phases read variables themselves.
        reads = [] if jit_compile else self.traced.reads()
        self.read_weights = ReadWeights(reads)
        self._backward: dict[tuple, Backward] = {}
        self.forward = FunctionCall(self._forward)
        self.recompute = FunctionCall(self._recompute)

    def extract(
        self,
        feeds: list[tf.Tensor],
        fetches: list[tf.Tensor],
        effects: Iterable[tf.Operation] = (),
        then: Callable | None = None,
        after: Mapping[tf.Operation, Collection[tf.Operation]] | None = None,
    ) -> Callable:
        """As `TracedFunction.extract`, fed the pack of weights first."""
        read = self.read_weights.read
        part = self.traced.extract(
            [*feeds, *read], fetches, effects, then, after
        )

        def run(
            weights: list[tf.Tensor], values: Sequence[tf.Tensor], *args: Any
        ) -> Any:
            known = self.read_weights.unpack(weights)
            return part([*values, *known], *args)

        return run

    def _forward(
        self, weights: list[tf.Tensor], inputs: list[tf.Tensor], stores: bool
    ) -> tuple[Result, list[tf.Tensor]]:
        result = tensors(self.trace.result)
        part = self.extract(
            self.inputs,
            result + (self.stored if stores else self.recomputed.kept),
            self._early_effects,
        )
        found = part(weights, inputs)
        size = len(result)
        return filled(self.trace.result, found[:size]), pack(found[size:])

    def _recompute(
        self,
        weights: list[tf.Tensor],
        inputs: list[tf.Tensor],
        packed: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        kept = self.recomputed.kept
        part = self.extract(self.inputs + kept, self.stored)
        values = [*inputs, *unpack(packed, kept)]
        return pack(part(weights, values))

    def lookups(self, gradients: Iterable[tuple]) -> list[Lookup]:
        """Returns the lookups among pairs of a variable and a gradient."""
        size = self.trace.num_inputs
        return lookups.find(
            self.traced, self.inputs[:size], self.inputs[size:], gradients
        )

    def backward(self, arrived: tuple[bool, ...], remat: bool) -> Backward:
        """Returns the backward phase for a set of incoming gradients.

        Args:
            arrived: For each placeholder of a gradient, whether a gradient
                arrives. Gradients that depend on none of these are `None`, as
                from a tape.
            remat: Whether this micro-batch is recomputed: the forward phase
                has stored `recomputed.kept`, not `stored`.
        """
        recomputes = remat and not self.recomputed.before
        key = arrived, recomputes
        if key not in self._backward:
            there = itertools.compress(self.output_gradients, arrived)
            self._backward[key] = Backward(
                self, self.traced.users(there), recomputes
            )
        return self._backward[key]
