"""The phases of a stage, cut from one trace of the stage and its gradient."""

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
from tf_gpipe.stage import lookups
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function_call import FunctionCall
from tf_gpipe.stage.lookups import Lookup
from tf_gpipe.stage.pack import pack
from tf_gpipe.stage.pack import unpack
from tf_gpipe.stage.recomputed_parts import RecomputedParts
from tf_gpipe.stage.structures import filled
from tf_gpipe.stage.structures import tensors
from tf_gpipe.stage.traced_backward import Backward
from tf_gpipe.stage.traced_function import TracedFunction


class Trace(NamedTuple):
    """Tensors of a traced stage and, if it has one, of its gradient."""

    num_inputs: int  # tensors among the stage's inputs, without `carried`
    num_forward: int  # operations of the graph in the forward pass
    ends: list[int]  # operations before the first and after each layer call
    result: Result
    # A placeholder for the gradient, or None, for each of `result.targets`.
    # This and the next two lists are empty if the trace has no gradient.
    output_gradients: list
    input_gradients: list  # a gradient or None for each flat input
    variable_gradients: list  # pairs of a variable and its gradient


class Phases:
    """The phases of a stage, cut from a trace.

    Each phase takes the weights that the stage reads as one tensor, a pack
    that is made once per step. If each call had the weights' handles as
    inputs, they would be most of the edges of a step's graph, and TensorFlow
    optimises, places and partitions a graph edge by edge.

        weights ---> pack ---+----------+----------+----> ...
                             v          v          v
                            F0.0       F0.1       B0.0

    Args:
        name: Name of the stage, for errors.
        concrete: The concrete function of the trace.
        trace: The `Trace`.
        splits: Whether the gradients of weights have a phase of their own.
        jit_compile: Whether XLA compiles the phases.
        recomputed: As in `StagePhases`.

    Attributes:
        recomputes_before: Whether layers are recomputed by a phase before the
            backward phase, and not within it.
        forward: `FunctionCall` of the forward phase. It takes the pack of
            weights, the stage's inputs, and whether to store the tensors
            `stored`, that is, not to recompute. It returns the `Result` and a
            pack of the tensors `stored`, or else of `kept`.
        recompute: `FunctionCall` of the recompute phase. It takes the pack of
            weights, the stage's inputs and the pack of `kept`, and returns the
            pack of `stored`.
        parts: `RecomputedParts`.
        stored: Tensors of the forward pass that the backward phase reads.
        kept: Tensors that the forward phase stores if layers are recomputed.

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
        recomputed: Sequence[range] = (),
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
        self.parts = RecomputedParts(
            self.traced, self._of_calls(recomputed), self.early
        )
        self.kept = self.parts.kept(self.stored)
        self.recomputes_before = len(recomputed) == 1
        if self.recomputes_before:
            # The recompute phase is given the stage's inputs as well.
            given = {id(x) for x in self.inputs}
            self.kept = [x for x in self.kept if id(x) not in given]
        # XLA does not support packs: compiled phases read variables themselves.
        self._reads = [] if jit_compile else self.traced.reads()
        self._packs: dict[Any, list[tf.Tensor]] = {}
        self._pack = FunctionCall(pack)
        self._backward: dict[tuple, Backward] = {}
        self.forward = FunctionCall(self._forward)
        self.recompute = FunctionCall(self._recompute)

    def weights(self) -> list[tf.Tensor]:
        """Returns the pack of the weights that the stage reads.

        As `pack` returns it. It is made once per graph, and again after
        `read_weights_again`.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph not in self._packs:
            self._packs[graph] = self._packed(x for x, _ in self._reads)
            for x in self._packs[graph]:
                upstream.skip_reference_search(x.op)
        return self._packs[graph]

    def read_weights_again(self) -> None:
        """Makes the next call of `weights` read the weights anew."""
        self._packs.clear()

    def weights_of(self, others: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
        """Returns the pack of other variables in place of the stage's weights.

        Args:
            others: Mapping from the id of each handle that the stage reads to
                the handle that is read in its place.
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
        # In a function of its own. If TensorFlow saw the operation that makes
        # the pack, it would note the pack's contents with each operation that
        # takes it.
        return self._pack(read)

    def is_pure(self, handles: Collection[int]) -> bool:
        """Returns whether other blocks can call these phases.

        That is so if there is one differentiable result, it depends on the
        inputs and on weights with the ids `handles` alone, gradients of weights
        are dense, and nothing has side effects, draws random numbers or calls
        Python.
        """
        read = {id(x) for x, _ in self._reads}
        gradients = [x for _, x in self.trace.variable_gradients]
        return (
            len(self.output_gradients)
            == min(len(self.trace.output_gradients), 1)
            and {*map(id, self.traced.captured())} <= read <= set(handles)
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
        after: Mapping[tf.Operation, Collection[tf.Operation]] | None = None,
    ) -> Callable:
        """As `TracedFunction.part`, fed the pack of weights first."""
        like = [reads[0] for _, reads in self._reads]
        read = [x for _, reads in self._reads for x in reads]
        part = self.traced.part([*feeds, *read], fetches, effects, then, after)

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
            result + (self.stored if stores else self.kept),
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
        part = self.part(self.inputs + self.kept, self.stored)
        values = [*inputs, *unpack(packed, self.kept)]
        return pack(part(weights, values))

    def lookups(self, gradients: Iterable[tuple]) -> list[Lookup]:
        """Returns the lookups among pairs of a variable and a gradient."""
        size = self.trace.num_inputs
        return lookups.find(
            self.traced, self.inputs[:size], self.inputs[size:], gradients
        )

    def _of_calls(self, recomputed: Sequence[range]) -> list[set[tf.Operation]]:
        """Returns the forward operations of each range of the stage's calls.

        Operations before the first call count as its own, and those after the
        last call likewise.
        """
        ends = [0, *self.trace.ends[1:-1], self.trace.num_forward]
        inputs = {x.op for x in self.inputs}
        return [
            self.early.intersection(
                self.traced.operations[ends[part.start] : ends[part.stop]]
            )
            - inputs
            for part in recomputed
        ]

    def backward(self, arrived: tuple[bool, ...], remat: bool) -> Backward:
        """Returns the backward phase for a set of incoming gradients.

        Args:
            arrived: For each placeholder of a gradient, whether a gradient
                arrives. Gradients that depend on none of these are `None`, as
                from a tape.
            remat: Whether this micro-batch is recomputed: the forward phase
                has stored `kept`, not `stored`.
        """
        again = remat and not self.recomputes_before
        key = arrived, again
        if key not in self._backward:
            there = itertools.compress(self.output_gradients, arrived)
            self._backward[key] = Backward(
                self, self.traced.users(there), again
            )
        return self._backward[key]
