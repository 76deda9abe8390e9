"""`remat="auto"`: the cut whose slowest stage is fastest, if it recomputes.

What the stages of a cut recompute is in `fitted_remat`.
"""

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from tf_gpipe.partition.contiguous import split
from tf_gpipe.partition.fitted_remat import AutoRemat
from tf_gpipe.partition.fitted_remat import FittedRemat
from tf_gpipe.partition.memory_limit import TooLittleMemoryError

# How many times the model is cut for the recomputation that the cut before had.
_NUM_CUTS = 12


def cuts(balance: Any) -> bool:
    """Returns whether `balance` lets the memory limit decide the cut."""
    return balance is None or (isinstance(balance, str) and balance == "flops")


def decided(
    fitted: FittedRemat, balance: Any, counts: Callable[[], Sequence[int]]
) -> AutoRemat:
    """Decides the cut that `balance` asks for, and what it recomputes.

    Args:
        fitted: `FittedRemat`.
        balance: As of `PipelineConfig`. With `None` or `"flops"`, the cut is
            searched together with the recomputation.
        counts: Function that returns the number of calls in each stage for
            other balances, or where no layer has FLOPs.

    Raises:
        TooLittleMemoryError: If a device has too little memory.
    """
    known = balance is not None or any(again for _, again in fitted.work)
    if cuts(balance) and known:
        return with_best_cut(fitted)
    return fitted.with_counts(counts())


def with_best_cut(fitted: FittedRemat) -> AutoRemat:
    """Searches the cut whose slowest stage is fastest.

    A heuristic: the model is cut again with each stage's slowdown by
    recomputation as its factor; the best cut is then improved call by call.

    Raises:
        TooLittleMemoryError: If no cut that was tried fits.
    """
    cut = functools.partial(
        split,
        [x for x, _ in fitted.work],
        fitted.num_stages,
        fitted.graph.crossing(fitted.size),
    )
    factors = [1.0] * fitted.num_stages
    counts = cut(factors=factors)
    tries = _Tries(fitted, fitted.limit_in_bytes(counts))
    for _ in range(_NUM_CUTS):
        if tuple(counts) not in tries.seen:
            found = tries.add(counts)
        elif isinstance(tries.best, AutoRemat):
            break
        if isinstance(found, AutoRemat):
            factors = [
                t / alone if alone else 1.0
                for t, alone in zip(
                    fitted.seconds(counts, found),
                    fitted.seconds(counts),
                    strict=True,
                )
            ]
        elif isinstance(tries.best, AutoRemat):
            break
        else:
            # Move calls away from the fullest device, and from the first
            # stages, which hold the most micro-batches. By how much does not
            # depend on the limit, so that a lower one than the error asks for
            # is refused, too.
            factors = [
                x
                * (1 + 0.1 * (fitted.num_stages - 1 - k) / fitted.num_stages)
                * (1.5 if k in found.stages else 1.0)
                for k, x in enumerate(factors)
            ]
        counts = cut(factors=factors)
    while True:
        # Hill climbing: move one call from a stage to the next or back.
        before = tries.score
        for counts in _neighbours(tries.nearest):
            if tuple(counts) not in tries.seen:
                tries.add(counts)
        if not tries.score < before:
            break
    if isinstance(tries.best, TooLittleMemoryError):
        raise tries.best
    return tries.best


class _Tries:
    """The cuts that have been tried, and the best of them.

    Attributes:
        seen: Set of the cuts.
        best: What the best cut leads to: that of least time, or as long as
            none fits, the one that needs least memory.
        nearest: List of the number of calls in each stage of the best cut.
        score: How good it is: its time, and the memory that it would need.
    """

    best: AutoRemat | TooLittleMemoryError
    nearest: list[int]

    def __init__(self, fitted: FittedRemat, limit: float):
        self._fitted = fitted
        self._limit = limit
        self.seen: set[tuple[int, ...]] = set()
        self.score = math.inf, math.inf

    def add(self, counts: list[int]) -> AutoRemat | TooLittleMemoryError:
        """Tries a cut, and returns what it leads to."""
        self.seen.add(tuple(counts))
        found: AutoRemat | TooLittleMemoryError
        try:
            found = self._fitted.within(counts, self._limit)
            score = max(self._fitted.seconds(counts, found)), 0.0
            better = score[0] < self.score[0] * (1 - 1e-9)
        except TooLittleMemoryError as error:
            found, score = error, (math.inf, error.least)
            better = score < self.score
        if better:
            self.best, self.nearest, self.score = found, counts, score
        return found


def _neighbours(counts: list[int]) -> list[list[int]]:
    """Returns the cuts with one call moved between neighbouring stages."""
    found = []
    for k in range(len(counts) - 1):
        for step in (-1, 1):
            changed = list(counts)
            changed[k] += step
            changed[k + 1] -= step
            if min(changed) > 0:
                found.append(changed)
    return found
