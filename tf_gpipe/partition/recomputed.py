"""Bytes and time of each choice of layers that a stage recomputes.

A knapsack problem for each stage, with layers as items, as in AdaPipe (Sun et
al., ASPLOS 2024). A part, consecutive layers that are recomputed together,
keeps only its inputs from the forward pass; when it is recomputed, all its
activations are in memory at once. So few long parts keep little from pass to
pass, and many short ones need little at a time.
"""

import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_gpipe.partition.call_costs import LayerCosts
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Value

# The memory that a stage keeps is rounded to multiples of a `_BINS`th of it.
_BINS = 192
# How many limits on a part's bytes are tried, from those of the largest layer
# to those of the whole stage.
_SIZES = 5
# The most calls in a part, unless it is the whole stage.
_LONGEST = 32
# A call's activations are kept, or the call is in a part that is recomputed.
_KEPT, _PART = 0, 1


class Recomputation(NamedTuple):
    """A choice of calls that a stage recomputes, with its memory and time.

    Attributes:
        parts: Ranges of indices of calls in the stage; the calls of a range are
            recomputed together.
        work: Float, the time that recomputing them takes.
        kept: Integer, bytes that a micro-batch keeps from its forward to its
            backward pass, without the stage's inputs.
        adds_at_a_time: Integer, bytes that recomputing adds to `kept` at a
            time: those of the part that needs most.
        adds_in_all: Integer, bytes that all parts add together.
    """

    parts: tuple[range, ...]
    work: float
    kept: int
    adds_at_a_time: int
    adds_in_all: int

    @property
    def before(self) -> bool:
        """Whether recomputation comes before the backward pass, not within.

        A single part does; several are each recomputed when the backward pass
        reaches them.
        """
        return len(self.parts) == 1


class _Made(NamedTuple):
    """A value that a call of the stage returns."""

    maker: int  # index of the call that returns it
    needed: bool  # whether that call's backward pass reads it
    size: int  # bytes
    # From the indices of the calls that take it to whether their backward
    # passes read it.
    takers: dict[int, bool]

    @property
    def used(self) -> bool:
        """Whether the backward pass of any call reads it."""
        return self.needed or any(self.takers.values())

    @property
    def first(self) -> int | None:
        """The first call that takes it and reads it in its backward pass."""
        return min(
            (i for i, needs in self.takers.items() if needs), default=None
        )


class StageCalls:
    """The calls of a stage, and the choices of those that it recomputes.

    Args:
        part: Graph of the stage.
        traces: The `LayerCosts` of its calls.
        size: Function that returns the bytes of a `Value`.
        work: The time of recomputing each call, in any unit.
    """

    def __init__(
        self,
        part: Graph,
        traces: Sequence[LayerCosts],
        size: Callable[[Value], int],
        work: Sequence[float],
    ):
        self._work = list(work)
        self._stored = [x.stored_bytes for x in traces]
        self._values: list[_Made] = []
        taken: dict[Value, dict[int, bool]] = {}
        for i, (node, trace) in enumerate(zip(part.nodes, traces, strict=True)):
            for value, keeps in zip(
                node.inputs, trace.kept_inputs, strict=True
            ):
                taken.setdefault(value, {})[i] = keeps
        given = set(part.inputs)
        for i, (node, trace) in enumerate(zip(part.nodes, traces, strict=True)):
            self._values += [
                _Made(i, trace.keeps_outputs, size(x), taken.get(x, {}))
                for x in node.made
                if x not in given
            ]

    def choice(self, parts: Sequence[range]) -> Recomputation:
        """Returns the `Recomputation` of the given ranges of calls."""
        count = len(self._work)
        part_of = [-1] * count
        for number, part in enumerate(parts):
            part_of[part.start : part.stop] = [number] * len(part)
        kept = 0
        again = [0] * len(parts)
        for own, stored in zip(part_of, self._stored, strict=True):
            if own < 0:
                kept += stored
            else:
                again[own] += stored
        for x in self._values:
            own = part_of[x.maker]
            # An input of another part must be kept for recomputing that.
            starts = any(part_of[i] not in (-1, own) for i in x.takers)
            if starts or (own < 0 and x.used):
                kept += x.size
            # Counted even if the value is also kept for another part:
            # recomputing the layer makes it a second time.
            if own >= 0 and (x.needed or (x.used and not starts)):
                again[own] += x.size
        return Recomputation(
            tuple(parts),
            sum(x for x, k in zip(self._work, part_of, strict=True) if k >= 0),
            kept,
            max(again, default=0),
            sum(again),
        )

    def choices(self) -> list[Recomputation]:
        """Returns the Pareto-optimal choices found, those of least work first.

        No other choice found is at least as good in `work`, `kept`,
        `adds_at_a_time` and `adds_in_all`.
        """
        count = len(self._work)
        whole = self.choice([range(count)])
        single = self.choice([range(i, i + 1) for i in range(count)])
        found = [self.choice([]), whole, single]
        for size in np.geomspace(
            max(1, single.adds_at_a_time),
            max(1, single.adds_at_a_time, whole.adds_at_a_time),
            _SIZES,
        ):
            for parts in self._cheapest(size * (1 + 1e-9)):
                found.append(self.choice(parts))
        best: list[Recomputation] = []
        for x in sorted(found, key=lambda x: x[1:]):
            if not any(
                y.kept <= x.kept
                and y.adds_at_a_time <= x.adds_at_a_time
                and y.adds_in_all <= x.adds_in_all
                for y in best
            ):
                best.append(x)
        return best

    def _cheapest(self, most: float) -> Iterator[list[range]]:
        """Yields the parts of least work, for increasing amounts of memory.

        By dynamic programming over the calls. A part of several calls adds at
        most `most` bytes. An upper bound: a value that several parts take from
        an earlier call is counted for each of them.
        """
        table = _Table(len(self._work), max(1, self.choice([]).kept))
        makers, takes = self._by_call()
        for start in range(len(self._work)):
            for before in (_KEPT, _PART):
                near = start - 1 if before == _PART else -1
                # Bytes that the call keeps and no earlier call keeps already.
                kept = self._stored[start]
                kept += sum(x.size for x in makers[start] if x.needed)
                kept += sum(
                    x.size
                    for x in takes[start]
                    if x.first == start and not x.needed and x.maker != near
                )
                table.offer((start, before), (start + 1, _KEPT), kept, 0.0)
                given: dict[int, int] = {}
                again, work = 0, 0.0
                for end in range(start, min(len(takes), start + _LONGEST)):
                    again += self._stored[end]
                    again += sum(x.size for x in makers[end] if x.used)
                    if again > most and end > start:
                        break
                    work += self._work[end]
                    for x in takes[end]:
                        # An input that the preceding call keeps for its own
                        # backward pass costs nothing.
                        there = x.needed and x.maker == start - 1 != near
                        if x.maker < start and not there:
                            given[id(x)] = x.size
                    table.offer(
                        (start, before),
                        (end + 1, _PART),
                        sum(given.values()),
                        work,
                    )
        yield from table.best()

    def _by_call(self) -> tuple[list[list[_Made]], list[list[_Made]]]:
        """Returns, for each call, the values that it returns and takes."""
        makers: list[list[_Made]] = [[] for _ in self._work]
        takes: list[list[_Made]] = [[] for _ in self._work]
        for value in self._values:
            makers[value.maker].append(value)
            for i in value.takers:
                takes[i].append(value)
        return makers, takes


class _Table:
    """The table of the dynamic programme: least work, and the state before.

    Its axes: the number of calls decided so far, whether the last of them is
    kept or ends a part, and the memory kept, in bins.
    """

    def __init__(self, count: int, memory: int):
        self._count = count
        self._unit = memory / _BINS
        shape = count + 1, 2, _BINS + 1
        self._least = np.full(shape, math.inf)
        self._least[0, _KEPT] = 0.0
        # The state before, as the first two axes, and the bins added since.
        self._from = np.zeros((*shape, 3), np.int32)

    def offer(
        self,
        start: tuple[int, int],
        end: tuple[int, int],
        size: int,
        work: float,
    ) -> None:
        """Updates the states of `end` with those of `start` plus one step.

        Args:
            start: Number of calls, and the kind of the last one.
            end: Likewise, of a later state.
            size: Bytes that the calls between keep.
            work: Time of recomputing them.
        """
        taken = round(size / self._unit)
        if taken > _BINS:
            return
        row = self._least[start][: _BINS + 1 - taken] + work
        better = row < self._least[end][taken:]
        self._least[end][taken:][better] = row[better]
        self._from[end][taken:][better] = *start, taken

    def best(self) -> Iterator[list[range]]:
        """Yields the parts of each solution that more memory makes faster."""
        before = math.inf
        for room in range(_BINS + 1):
            kind = int(np.argmin(self._least[self._count, :, room]))
            work = self._least[self._count, kind, room]
            if work < before:
                before = work
                yield self._parts(kind, room)

    def _parts(self, kind: int, room: int) -> list[range]:
        parts, end = [], self._count
        while end:
            start, earlier, taken = map(int, self._from[end, kind, room])
            if kind == _PART:
                parts.append(range(start, end))
            end, kind, room = start, earlier, room - taken
        return parts[::-1]
