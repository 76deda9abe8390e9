"""The parts of a traced stage that are computed again."""

from collections.abc import Collection
from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.stage.reached import reached
from tf_gpipe.stage.traced_function import TracedFunction


class RecomputedParts:
    """The parts of a traced stage that are computed again.

    Each is some operations of the forward pass. What they make is not stored
    for the backward pass, but what they take from elsewhere is, and random
    numbers that they draw. From that each is run again, when the gradient has
    come to it:

        forward      a --> [b --> c] --> [d --> e] --> f        a, c stored
        backward     f' --> [d, e] --> e', d' --> [b, c] --> c', b' --> a'

    Args:
        traced: The `TracedFunction`.
        parts: List with the operations of each part.
        early: All operations that run before the backward pass.
    """

    def __init__(
        self,
        traced: TracedFunction,
        parts: Sequence[set[tf.Operation]],
        early: set[tf.Operation],
    ):
        self._traced = traced
        self._early = early
        # What they would draw anew, or find changed, is not run again.
        drawn = set(traced.draws(early))
        self._parts = [part - drawn for part in parts]
        self._places = {op: i for i, op in enumerate(traced.operations)}

    def kept(
        self, stored: list[tf.Tensor], early: set[tf.Operation]
    ) -> list[tf.Tensor]:
        """Returns what of the forward pass is stored.

        Args:
            stored: What the backward pass needs.
            early: All operations that run before it.
        """
        again = set().union(*self._parts)
        found = {id(x): x for x in stored if x.op not in again}
        for part in self._parts:
            made = [x for x in stored if x.op in part]
            found.update(
                (id(x), x) for x in self._traced.live(made, early - part)
            )
        return self._in_order(found.values())

    def waits(
        self,
        alive: Collection[tf.Operation],
        kept: Collection[tf.Tensor],
    ) -> dict[tf.Operation, list[tf.Operation]]:
        """Returns what operations of the parts wait for, in the backward pass.

        A part waits for the gradients that the first operation takes that
        follows both from the part, not by way of other layers, and from
        gradients. And for what takes tensors of the part before, so that only
        one of them is there at a time: gradients of weights, which nothing
        else would wait for. In the order in which operations were traced all
        of these come before that first operation, and all that waits for a
        part after it: so no two parts wait for each other.

        Args:
            alive: The operations that follow from the gradients that arrive.
            kept: What is stored.
        """
        stored = set(map(id, kept))
        of_parts = [(part, self._users(part, alive)) for part in self._parts]
        ordered = sorted(
            (
                (self._first(users), part, users)
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
                # Others wait for these.
                if not any(
                    x.op in part and id(x) not in stored for x in op.inputs
                ):
                    found[op] = sorted(awaited, key=self._places.__getitem__)
            before = users
        return found

    def _first(self, operations: Collection[tf.Operation]) -> tf.Operation:
        return min(operations, key=self._places.__getitem__)

    def _users(
        self, part: set[tf.Operation], alive: Collection[tf.Operation]
    ) -> set[tf.Operation]:
        """Returns what takes tensors of a part and of gradients.

        Directly, or by operations that no gradient comes to.
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

    def _in_order(self, tensors: Collection[tf.Tensor]) -> list[tf.Tensor]:
        # The same step the same graph.
        return sorted(
            tensors, key=lambda x: (self._places[x.op], x.value_index)
        )
