"""The parts of a traced stage that the backward pass recomputes."""

from collections.abc import Collection
from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.stage.reached import reached
from tf_gpipe.stage.traced_function import TracedFunction


class RecomputedParts:
    """The parts of a traced stage that the backward pass recomputes.

    A part is a set of operations of the forward pass. Their results are not
    stored for the backward pass, but their inputs from outside the part are,
    and the random numbers that they draw. From these the part is run again
    when the gradient arrives there:

        forward      a --> [b --> c] --> [d --> e] --> f        a, c stored
        backward     f' --> [d, e] --> e', d' --> [b, c] --> c', b' --> a'

    A single part is recomputed by a phase of its own, before the backward
    phase; several parts are recomputed within that.

    Args:
        traced: The `TracedFunction`.
        parts: For each part, the range of its operations in the trace.
        early: All operations that run before the backward pass.
        inputs: The tensors of the trace for the stage's inputs.
        stored: Tensors of the forward pass that the backward pass reads.

    Attributes:
        before: Whether a phase recomputes before the backward phase.
        kept: The tensors that the forward phase stores in place of `stored`.
    """

    def __init__(
        self,
        traced: TracedFunction,
        parts: Sequence[range],
        early: set[tf.Operation],
        inputs: Sequence[tf.Tensor],
        stored: Sequence[tf.Tensor],
    ):
        self._early = early
        self._places = {op: i for i, op in enumerate(traced.operations)}
        # Operations that would draw other numbers, or read variables that have
        # been written since, are not run again: their results are stored.
        repeatable = early.difference(
            traced.unrepeatable(early), (x.op for x in inputs)
        )
        self._parts = [
            repeatable.intersection(traced.operations[x.start : x.stop])
            for x in parts
        ]
        again = set().union(*self._parts)
        kept = {id(x): x for x in stored if x.op not in again}
        for part in self._parts:
            made = [x for x in stored if x.op in part]
            kept.update((id(x), x) for x in traced.live(made, early - part))
        self.before = len(parts) == 1
        if self.before:
            # The recompute phase is given the stage's inputs as well.
            for x in inputs:
                kept.pop(id(x), None)
        # In a fixed order, so that the same step gives the same graph.
        self.kept = sorted(
            kept.values(), key=lambda x: (self._places[x.op], x.value_index)
        )

    def waits(
        self, alive: Collection[tf.Operation]
    ) -> dict[tf.Operation, list[tf.Operation]]:
        """Returns the control dependencies of parts in the backward pass.

        A part is run when the gradients that its first user takes are ready.
        The first user is the operation, first in the order of tracing, that
        depends both on the part, not through other layers, and on incoming
        gradients. It also waits for the users of the part before, so that the
        tensors of only one part are in memory at a time: nothing else would
        wait for gradients of weights. In the order of tracing all of these come
        before the first user, and all that waits for a part comes after it, so
        no two parts wait for each other.

        Args:
            alive: The operations that depend on incoming gradients.

        Returns:
            Dict from the first operations of each part to the operations that
            they wait for.
        """
        stored = set(map(id, self.kept))
        of_parts = [(part, self._users(part, alive)) for part in self._parts]
        ordered = sorted(
            (
                (min(users, key=self._places.__getitem__), part, users)
                for part, users in of_parts
                if users
            ),
            key=lambda x: self._places[x[0]],
        )
        found = {}
        before: set[tf.Operation] = set()
        for first, part, users in ordered:
            place = self._places[first]
            awaited = {x.op for x in first.inputs if x.op in alive}
            awaited |= {x for x in before if self._places[x] < place}
            for op in part:
                # The other operations of the part wait for these anyway.
                if not any(
                    x.op in part and id(x) not in stored for x in op.inputs
                ):
                    found[op] = sorted(awaited, key=self._places.__getitem__)
            before = users
        return found

    def _users(
        self, part: set[tf.Operation], alive: Collection[tf.Operation]
    ) -> set[tf.Operation]:
        """Returns the operations of `alive` that read tensors of a part.

        Directly, or through operations that no gradient reaches.
        """
        found = reached(
            part,
            lambda op: (
                []
                if op in alive
                else [
                    user
                    for x in op.outputs
                    for user in x.consumers()
                    if user not in self._early
                ]
            ),
        )
        return found.intersection(alive)
