"""Cuts the phases of a stage from a trace of it and its gradient."""

import itertools
from collections.abc import Collection
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe.function_call import FunctionCall
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

    def filled(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Returns the structure with other tensors."""
        found = iter(tensors)
        return tf.nest.pack_sequence_as(
            self.structure,
            [None if x is None else next(found) for x in _flat(self.structure)],
            expand_composites=True,
        )


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
            size = len(_flat(like))
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
    """

    def __init__(
        self,
        function: StageFunction,
        concrete: Any,
        num_forward: int,
        upstream: list,
        splits: bool,
    ):
        self._splits = splits
        self._inputs = _inputs(concrete)
        self._result, self._by_input, dense, sparse = _outputs(concrete)
        self._dense = Weights(function.dense, dense)
        self._sparse = Weights(function.sparse, sparse)
        self._upstream = [x for x in upstream if x is not None]
        self._traced = TracedFunction(
            concrete, [*self._inputs, *self._upstream]
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
        self._backward: dict[tuple, Backward] = {}
        self.forward = FunctionCall(self._forward)
        self.storing = FunctionCall(self._forward_storing)
        self.store = FunctionCall(self._store)

    def _forward(self, inputs: list[tf.Tensor]) -> Result:
        part = self._traced.part(
            self._inputs, self._result.tensors, self._early_effects
        )
        return self._result.filled(part(inputs))

    def _forward_storing(self, inputs: list[tf.Tensor]) -> tuple:
        part = self._traced.part(
            self._inputs,
            self._result.tensors + self._stored,
            self._early_effects,
        )
        found = part(inputs)
        size = len(self._result.tensors)
        return self._result.filled(found[:size]), pack(found[size:])

    def _store(self, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return pack(self._traced.part(self._inputs, self._stored)(inputs))

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
                for x in self._by_input.filled(self._by_input.tensors)
            ]
            self._backward[arrived] = Backward(
                self._traced,
                self._stored + self._upstream,
                Made(by_input, [x for x in by_input if x is not None]),
                self._dense.of(alive),
                self._sparse.of(alive),
                self._late_effects,
                self._splits,
                stored=self._stored,
            )
        return self._backward[arrived]


class Backward:
    """The backward phase of a stage, or both passes at once, and after that
    the phase of weights.

    Args:
        traced: `TracedFunction`.
        feeds: List of tensors of the graph that the phase is fed.
        made: `Made`, what it returns besides gradients of weights.
        dense: `Weights`.
        sparse: `Weights`.
        effects: Operations with side effects that it runs.
        splits: Boolean, whether the gradients of weights are apart.
        stored: List of the first ones of `feeds`, which come in a pack.
    """

    def __init__(
        self,
        traced: TracedFunction,
        feeds: list[tf.Tensor],
        made: Made,
        dense: Weights,
        sparse: Weights,
        effects: Collection[tf.Operation],
        splits: bool,
        stored: Sequence[tf.Tensor] = (),
    ):
        self._traced = traced
        self._feeds = feeds
        self._stored = stored
        self._made = made
        self._dense = dense
        self._sparse = sparse
        self._effects = effects
        self._gradients = dense.made.tensors + sparse.made.tensors
        self._splits = splits
        # What the phase of weights is fed.
        self._kept: list[tf.Tensor] = []
        if splits:
            done = {x.op for x in feeds}
            done |= traced.makers(made.tensors, effects)
            self._kept = traced.handed(self._gradients, done)
        self._run = FunctionCall(self._phase)
        self._run_weights = FunctionCall(self._phase_of_weights)

    def __call__(
        self, packed: list[tf.Tensor], values: list[tf.Tensor]
    ) -> tuple[Any, Any]:
        """Runs the phase.

        Args:
            packed: The pack of the values of `stored`.
            values: List of the values of the other feeds.

        Returns:
            Tuple of the values of `made`, and what `weights` takes.
        """
        return self._run(packed, values)

    def weights(self, rest: Any) -> tuple[Gradients, list, list]:
        """Returns the gradients of weights, and whose they are."""
        gradients = self._run_weights(rest) if self._splits else rest
        return gradients, self._dense.variables, self._sparse.variables

    def _phase(self, packed: list[tf.Tensor], values: list[tf.Tensor]) -> tuple:
        rest = self._kept if self._splits else self._gradients
        part = self._traced.part(
            self._feeds, self._made.tensors + rest, self._effects
        )
        found = part([*unpack(packed, self._stored), *values])
        size = len(self._made.tensors)
        made, found = self._made.filled(found[:size]), found[size:]
        return made, pack(found) if self._splits else self._packed(found)

    def _phase_of_weights(self, packed: list[tf.Tensor]) -> Gradients:
        part = self._traced.part(self._kept, self._gradients)
        return self._packed(part(unpack(packed, self._kept)))

    def _packed(self, found: list[tf.Tensor]) -> Gradients:
        size = len(self._dense.variables)
        return Gradients(
            self._dense.made.filled(found[:size]),
            self._sparse.made.filled(found[size:]),
        ).packed()


def _inputs(concrete: Any) -> list[tf.Tensor]:
    """Returns the inputs of a trace, without those that it has captured."""
    size = len(concrete.inputs) - len(concrete.captured_inputs)
    return concrete.inputs[:size]


def _outputs(concrete: Any) -> list[Made]:
    """Returns what a trace returns, a tuple, one by one."""
    found, rest = [], list(concrete.outputs)
    for structure in concrete.structured_outputs:
        size = sum(x is not None for x in _flat(structure))
        found.append(Made(structure, rest[:size]))
        rest = rest[size:]
    return found


def _flat(structure: Any) -> list:
    return tf.nest.flatten(structure, expand_composites=True)
