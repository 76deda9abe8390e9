"""Cuts the phases of a stage from a trace of it and its gradient."""

import itertools
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage import accumulator
from tf_gpipe.stage import lookups
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function_call import FunctionCall
from tf_gpipe.stage.function_call import filled
from tf_gpipe.stage.function_call import tensors
from tf_gpipe.stage.lookups import Lookup
from tf_gpipe.stage.pack import pack
from tf_gpipe.stage.pack import unpack
from tf_gpipe.stage.traced_function import TracedFunction


class Trace(NamedTuple):
    """A stage and its gradient, as tensors of one graph."""

    num_inputs: int  # how many tensors the stage takes, without what it carries
    num_forward: int  # how many of the graph's operations are forward
    result: Result
    upstream: list  # a placeholder, or None, for each of `result.targets`
    by_input: list  # a gradient or None for each flat input
    by_variable: list  # pairs of a variable and its gradient


class Phases:
    """The phases of a stage, cut from a trace.

    They take the weights that the stage reads as one tensor, a pack that is
    made once a step. As inputs of each call their handles would be most of a
    step's graph, which TensorFlow optimises, places and cuts up edge by edge.

        weights ---> pack ---+----------+----------+----> ...
                             v          v          v
                            F0.0       F0.1       B0.0

    Args:
        name: Of the stage, for errors.
        concrete: The concrete function that the trace is in.
        trace: The `Trace`.
        splits: Whether the gradients of weights are apart.
        jit_compile: Whether XLA compiles the phases.

    Attributes:
        forward: `FunctionCall` from the pack of weights, the stage's inputs,
            and whether to store what the backward phase needs, to the `Result`
            and a pack of that; or, if not, of what `recompute` needs.
        recompute: `FunctionCall` from the pack of weights, the stage's inputs
            and that pack to the pack of what the backward phase needs.

    Raises:
        ValueError: If XLA cannot compile the phases.
    """

    def __init__(
        self,
        name: str,
        concrete: Any,
        trace: Trace,
        splits: bool,
        jit_compile: bool,
    ):
        self.trace = trace
        self.splits = splits
        self.jit_compile = jit_compile
        size = len(concrete.inputs) - len(concrete.captured_inputs)
        self.inputs = concrete.inputs[:size]
        self.upstream = [x for x in trace.upstream if x is not None]
        self.traced = TracedFunction(
            concrete, [*self.inputs, *self.upstream], jit_compile
        )
        # All of the gradient, also what follows from the forward pass alone:
        # it would only have to be stored.
        late = set(concrete.graph.get_operations()[trace.num_forward :])
        effects = self.traced.effects()
        self._early_effects = effects - late
        self.late_effects = effects & late
        fetches = tensors((trace.by_input, [x for _, x in trace.by_variable]))
        self.early = self.traced.makers(fetches, self.late_effects) - late
        # What the gradient needs of the forward pass.
        self.stored = self.traced.live(fetches, self.early, self.late_effects)
        if jit_compile and any(x.dtype == tf.variant for x in self.stored):
            raise ValueError(
                f"XLA cannot compile {name}: it keeps lists of tensors for "
                "the backward pass, as recurrent layers do. Received: "
                "compile(jit_compile=True). Use False."
            )
        # What a recomputation would draw anew, or find changed.
        self._drawn = [
            x
            for op in self.traced.draws(self.traced.makers(self.stored))
            for x in op.outputs
        ]
        # XLA knows no packs: what it compiles reads variables itself.
        self._reads = [] if jit_compile else self.traced.reads()
        self._packs: dict[Any, list[tf.Tensor]] = {}
        self._pack = FunctionCall(pack)
        self._backward: dict[tuple, Backward] = {}
        self.forward = FunctionCall(self._forward)
        self.recompute = FunctionCall(self._recompute)

    def weights(self) -> list[tf.Tensor]:
        """Returns the pack of the weights that the stage reads.

        A list of a tensor, or an empty one, the same in all of a graph, until
        `read_weights_again`.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph not in self._packs:
            self._packs[graph] = self._packed(x for x, _ in self._reads)
            for x in self._packs[graph]:
                upstream.search_no_callees(x.op)
        return self._packs[graph]

    def read_weights_again(self) -> None:
        """Makes `weights` return a pack of what the weights hold then."""
        self._packs.clear()

    def weights_of(self, others: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
        """Returns such a pack of other variables.

        `others` has their handles, by the ids of the handles that are read.
        """
        return self._packed(others[id(x)] for x, _ in self._reads)

    def _packed(self, handles: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        read = [
            tf.raw_ops.ReadVariableOp(
                resource=graph.capture(handle), dtype=reads[0].dtype
            )
            for handle, (_, reads) in zip(handles, self._reads, strict=True)
        ]
        # By a call. Of a pack that it sees being made TensorFlow would note
        # what it holds, with each operation that takes it.
        return self._pack(read)

    def is_pure(self, handles: Collection[int]) -> bool:
        """Returns whether a call has one result, of what it is given alone.

        And of weights that it reads, with the ids of `handles`, by which it
        has dense gradients.
        """
        read = {id(x) for x, _ in self._reads}
        gradients = [x for _, x in self.trace.by_variable]
        return (
            len(self.upstream) == 1
            and self.traced.captured() <= read <= set(handles)
            and not self.traced.effects()
            and not self.traced.draws(self.traced.operations)
            and not self.traced.calls_python()
            and not any(isinstance(x, tf.IndexedSlices) for x in gradients)
        )

    def part(
        self,
        feeds: list[tf.Tensor],
        fetches: list[tf.Tensor],
        effects: Iterable[tf.Operation] = (),
        then: Callable | None = None,
    ) -> Callable:
        """As `TracedFunction.part`, fed the pack of weights first."""
        like = [reads[0] for _, reads in self._reads]
        read = [x for _, reads in self._reads for x in reads]
        part = self.traced.part([*feeds, *read], fetches, effects, then)

        def run(
            weights: list[tf.Tensor], values: Sequence[tf.Tensor], *args: Any
        ) -> Any:
            found = zip(self._reads, unpack(weights, like), strict=True)
            known = [value for (_, reads), value in found for _ in reads]
            return part([*values, *known], *args)

        return run

    def _forward(
        self, weights: list[tf.Tensor], inputs: list[tf.Tensor], stores: bool
    ) -> tuple[Result, list[tf.Tensor]]:
        result = tensors(self.trace.result)
        part = self.part(
            self.inputs,
            result + (self.stored if stores else self._drawn),
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
        part = self.part(self.inputs + self._drawn, self.stored)
        values = [*inputs, *unpack(packed, self._drawn)]
        return pack(part(weights, values))

    def lookups(self, gradients: Iterable[tuple]) -> list[Lookup]:
        """Returns the lookups among pairs of a variable and a gradient."""
        size = self.trace.num_inputs
        return lookups.find(
            self.traced, self.inputs[:size], self.inputs[size:], gradients
        )

    def backward(self, arrived: tuple[bool, ...]) -> "Backward":
        """Returns the backward phase.

        Args:
            arrived: For each placeholder of a gradient, whether there is one.
                What depends on none that is there is `None`, as by a tape.
        """
        if arrived not in self._backward:
            there = itertools.compress(self.upstream, arrived)
            self._backward[arrived] = Backward(self, self.traced.users(there))
        return self._backward[arrived]


class Backward:
    """The backward phase of a stage, and after it the phase of weights.

    Args:
        phases: The `Phases` that it is of.
        alive: The operations that follow from the gradients that arrive.

    Attributes:
        dense: List of the variables whose gradients are dense.
        sparse: List of the `Lookup`s, of gradients that are sparse.
        run: `FunctionCall` from the pack of weights, that of what the stage
            has stored, the values of the gradients that arrive, and where to
            add gradients (a list with the handle of an accumulator of the
            dense ones, or an empty one). To the gradients of inputs, and what
            `weights` takes if that is apart, or else returns.
        weights: `FunctionCall` from the pack of weights, that, and where to
            add gradients, to a list of a tensor that is ready once dense ones
            are added, or of a pack of them, and the list of the sparse ones.
    """

    def __init__(self, phases: Phases, alive: set[tf.Operation]):
        def lives(gradient: Any) -> bool:
            return any(x.op in alive for x in tensors(gradient))

        self._phases = phases
        self._by_input = [
            x if lives(x) else None for x in phases.trace.by_input
        ]
        pairs = [p for p in phases.trace.by_variable if lives(p[1])]
        dense = [p for p in pairs if not isinstance(p[1], tf.IndexedSlices)]
        self.dense = [v for v, _ in dense]
        self.sparse = phases.lookups(pairs)
        self._slices = [x.slices for x in self.sparse]
        self._gradients = [x for _, x in dense] + tensors(self._slices)
        # What the phase of weights is fed.
        self._kept: list[tf.Tensor] = []
        if phases.splits:
            done = {*phases.early, *(x.op for x in phases.upstream)}
            made = tensors(self._by_input)
            done |= phases.traced.makers(made, phases.late_effects)
            self._kept = phases.traced.live(self._gradients, done)
        self.run = FunctionCall(self._run)
        self.weights = FunctionCall(self._weights)

    def _run(
        self,
        weights: list[tf.Tensor],
        packed: list[tf.Tensor],
        values: list[tf.Tensor],
        place: list[tf.Tensor],
    ) -> tuple:
        phases, by_input = self._phases, tensors(self._by_input)
        size = len(by_input)

        def then(found: Sequence[tf.Tensor], place: list[tf.Tensor]) -> tuple:
            rest = found[size:]
            kept = pack(rest) if phases.splits else self._placed(rest, place)
            return found[:size], kept

        part = self._ending(
            phases.stored + phases.upstream,
            by_input + (self._kept if phases.splits else self._gradients),
            then,
            phases.late_effects,
        )
        made, kept = part(
            weights, [*unpack(packed, phases.stored), *values], place
        )
        return filled(self._by_input, made), kept

    def _weights(
        self,
        weights: list[tf.Tensor],
        packed: list[tf.Tensor],
        place: list[tf.Tensor],
    ) -> tuple[list, list]:
        part = self._ending(self._kept, self._gradients, self._placed)
        return part(weights, unpack(packed, self._kept), place)

    def _ending(
        self,
        feeds: list[tf.Tensor],
        fetches: list[tf.Tensor],
        then: Callable,
        effects: Iterable[tf.Operation] = (),
    ) -> Callable:
        """Returns a part that ends with `then`, in it if that is possible."""
        phases = self._phases
        if not phases.jit_compile:
            return phases.part(feeds, fetches, effects, then)
        # XLA knows no packs. All gradients are there before any is added.
        part = phases.part(feeds, fetches, effects)
        return lambda weights, values, place: then(part(weights, values), place)

    def _placed(
        self, found: Sequence[tf.Tensor], place: list[tf.Tensor]
    ) -> tuple[list, list]:
        """Adds gradients of weights where there is a place, or packs them."""
        size = len(self.dense)
        dense, sparse = list(found[:size]), filled(self._slices, found[size:])
        if place:
            return [accumulator.add(place[0], dense)], sparse
        return pack(dense), sparse
