"""Cuts the phases of a stage from a trace of it and its gradient."""

import itertools
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe import accumulator
from tf_gpipe.function_call import FunctionCall
from tf_gpipe.function_call import filled
from tf_gpipe.function_call import flatten
from tf_gpipe.gradients import Gradients
from tf_gpipe.pack import pack
from tf_gpipe.pack import unpack
from tf_gpipe.stage_function import Result
from tf_gpipe.stage_function import StageFunction
from tf_gpipe.traced_function import TracedFunction


class Made(NamedTuple):
    """Some of what a traced function returns."""

    structure: Any
    tensors: list[tf.Tensor]  # the leaves of `structure` that are not None


class Weights(NamedTuple):
    """Gradients of weights in a traced function, and whose they are."""

    variables: list[keras.Variable]
    made: Made  # a list with one a variable

    def of(self, operations: Collection[tf.Operation]) -> "Weights":
        """Returns those that operations make."""
        variables, structure, tensors = [], [], []
        rest = list(self.made.tensors)
        for variable, like in zip(
            self.variables, self.made.structure, strict=True
        ):
            size = len(flatten(like))
            own, rest = rest[:size], rest[size:]
            if any(x.op in operations for x in own):
                variables.append(variable)
                structure.append(like)
                tensors += own
        return Weights(variables, Made(structure, tensors))


class Cut:
    """The phases of a stage, cut from a trace.

    Args:
        function: `StageFunction`.
        concrete: The trace: a concrete function that returns the result, the
            gradients of inputs, and `Gradients`.
        num_forward: Integer, how many of its operations are forward.
        upstream: List of the placeholders in it of gradients of the result,
            `None` where there are none.
        splits: Boolean, whether the gradients of weights are apart.
        jit_compile: Boolean, whether XLA compiles the phases.

    Attributes:
        forward: `FunctionCall` from the stage's inputs, and whether to store
            what the backward phase needs, to the `Result` and a pack of that;
            or, if not, of what `recompute` needs.
        recompute: `FunctionCall` from the stage's inputs and that pack to the
            pack of what the backward phase needs.

    Raises:
        ValueError: If XLA cannot compile the phases.
    """

    def __init__(
        self,
        function: StageFunction,
        concrete: Any,
        num_forward: int,
        upstream: list,
        splits: bool,
        jit_compile: bool,
    ):
        self._splits = splits
        self._jit_compile = jit_compile
        size = len(concrete.inputs) - len(concrete.captured_inputs)
        self._inputs = concrete.inputs[:size]
        self._result, self._by_input, dense, sparse = _outputs(concrete)
        self._dense = Weights(function.dense, dense)
        self._sparse = Weights(function.sparse, sparse)
        self._upstream = [x for x in upstream if x is not None]
        self._traced = TracedFunction(
            concrete, [*self._inputs, *self._upstream], jit_compile
        )
        # All of the gradient, also what follows from the forward pass alone:
        # it would only have to be stored.
        operations = concrete.graph.get_operations()
        late = set(operations[num_forward:])
        effects = self._traced.effects()
        self._early_effects = effects - late
        self._late_effects = effects & late
        fetches = self._by_input.tensors + dense.tensors + sparse.tensors
        early = self._traced.makers(fetches, self._late_effects) - late
        # What is there once the stage has run.
        self._stored = self._traced.handed(fetches, early, self._late_effects)
        if jit_compile and any(x.dtype == tf.variant for x in self._stored):
            raise ValueError(
                f"XLA cannot compile stage {function.stage.index}: it keeps "
                "lists of tensors for the backward pass, as recurrent layers "
                "do. Received: compile(jit_compile=True). Use False."
            )
        # Random numbers that a recomputation would draw anew.
        self._drawn = [
            x
            for op in self._traced.makers(self._stored)
            if "seed2" in op.node_def.attr
            for x in op.outputs
        ]
        self._early = early
        self._backward: dict[tuple, Backward] = {}
        self.forward = FunctionCall(self._forward)
        self.recompute = FunctionCall(self._recompute)

    def _forward(
        self, inputs: list[tf.Tensor], stores: bool
    ) -> tuple[Result, list[tf.Tensor]]:
        part = self._traced.part(
            self._inputs,
            self._result.tensors + (self._stored if stores else self._drawn),
            self._early_effects,
        )
        found = part(inputs)
        size = len(self._result.tensors)
        return filled(self._result.structure, found[:size]), pack(found[size:])

    def _recompute(
        self, inputs: list[tf.Tensor], packed: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        part = self._traced.part(self._inputs + self._drawn, self._stored)
        return pack(part([*inputs, *unpack(packed, self._drawn)]))

    def backward(self, arrived: tuple[bool, ...]) -> "Backward":
        """Returns the backward phase.

        Args:
            arrived: For each placeholder of a gradient, whether there is one.
                What depends on none that is there is `None`, as by a tape.
        """
        if arrived not in self._backward:
            there = itertools.compress(self._upstream, arrived)
            alive = self._traced.users(there)
            by_input = [
                x if x is not None and x.op in alive else None
                for x in filled(
                    self._by_input.structure, self._by_input.tensors
                )
            ]
            self._backward[arrived] = Backward(
                self._traced,
                self._early,
                self._stored,
                self._upstream,
                Made(by_input, [x for x in by_input if x is not None]),
                self._dense.of(alive),
                self._sparse.of(alive),
                self._late_effects,
                self._splits,
                self._jit_compile,
            )
        return self._backward[arrived]


class Backward:
    """The backward phase of a stage, and after it the phase of weights.

    Args:
        traced: `TracedFunction`.
        early: Set of the operations that have run before.
        stored: List of the tensors of the graph that the stage has stored.
        upstream: List of the placeholders of the gradients that arrive.
        by_input: `Made`, the gradients of inputs.
        dense: `Weights`.
        sparse: `Weights`.
        effects: Operations with side effects that it runs.
        splits: Boolean, whether the gradients of weights are apart.
        jit_compile: Boolean, whether XLA compiles the phases.

    Attributes:
        dense: List of the variables whose gradients are dense.
        sparse: List of those whose gradients are sparse.
        splits: As above.
        run: `FunctionCall` from the pack of `stored`, the list of the values
            of `upstream`, and where to add gradients (a list with the handle
            of an accumulator of the dense ones, or an empty one), to the
            gradients of inputs and the `Gradients`, in place of which there
            is what `weights` takes if those are apart.
        weights: `FunctionCall` from that, and from where to add gradients, to
            the `Gradients`.
    """

    def __init__(
        self,
        traced: TracedFunction,
        early: Collection[tf.Operation],
        stored: list[tf.Tensor],
        upstream: list[tf.Tensor],
        by_input: Made,
        dense: Weights,
        sparse: Weights,
        effects: Collection[tf.Operation],
        splits: bool,
        jit_compile: bool,
    ):
        self.dense = dense.variables
        self.sparse = sparse.variables
        self._traced = traced
        self._stored = stored
        self._upstream = upstream
        self._by_input = by_input
        self._slices = sparse.made.structure
        self._effects = effects
        self._gradients = dense.made.tensors + sparse.made.tensors
        self.splits = splits
        self._jit_compile = jit_compile
        # What the phase of weights is fed.
        self._kept: list[tf.Tensor] = []
        if splits:
            done = {*early, *(x.op for x in upstream)}
            done |= traced.makers(by_input.tensors, effects)
            self._kept = traced.handed(self._gradients, done)
        self.run = FunctionCall(self._run)
        self.weights = FunctionCall(self._weights)

    def _run(
        self,
        packed: list[tf.Tensor],
        values: list[tf.Tensor],
        place: list[tf.Tensor],
    ) -> tuple:
        by_input = self._by_input.tensors
        size = len(by_input)

        def then(found: Sequence[tf.Tensor], place: list[tf.Tensor]) -> tuple:
            rest = found[size:]
            kept = pack(rest) if self.splits else self._placed(rest, place)
            return found[:size], kept

        part = self._ending(
            self._stored + self._upstream,
            by_input + (self._kept if self.splits else self._gradients),
            then,
            self._effects,
        )
        made, kept = part([*unpack(packed, self._stored), *values], place)
        return filled(self._by_input.structure, made), kept

    def _weights(
        self, packed: list[tf.Tensor], place: list[tf.Tensor]
    ) -> Gradients:
        part = self._ending(self._kept, self._gradients, self._placed)
        return part(unpack(packed, self._kept), place)

    def _ending(
        self,
        feeds: list[tf.Tensor],
        fetches: list[tf.Tensor],
        then: Callable,
        effects: Collection[tf.Operation] = (),
    ) -> Callable:
        """Returns a part that ends with `then`, in it if that is possible."""
        if not self._jit_compile:
            return self._traced.part(feeds, fetches, effects, then)
        # XLA knows no packs. All gradients are there before any is added.
        part = self._traced.part(feeds, fetches, effects)
        return lambda values, place: then(part(values), place)

    def _placed(
        self, found: Sequence[tf.Tensor], place: list[tf.Tensor]
    ) -> Gradients:
        """Adds gradients of weights where there is a place, or packs them."""
        size = len(self.dense)
        dense, sparse = list(found[:size]), filled(self._slices, found[size:])
        if not place:
            return Gradients(pack(dense), sparse)
        return Gradients([accumulator.add(place[0], dense)], sparse)


def _outputs(concrete: Any) -> list[Made]:
    """Returns what a trace returns, a tuple, one by one."""
    found, rest = [], list(concrete.outputs)
    for structure in concrete.structured_outputs:
        size = sum(x is not None for x in flatten(structure))
        found.append(Made(structure, rest[:size]))
        rest = rest[size:]
    return found
