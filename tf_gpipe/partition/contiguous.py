"""The contiguous split of a sequence that balances costs best.

This module imports no TensorFlow.
"""

from collections.abc import Sequence

import numpy as np


def split(
    costs: Sequence[float],
    num_parts: int,
    cuts: Sequence[float] | None = None,
    factors: Sequence[float] | None = None,
) -> list[int]:
    """Cuts a sequence into contiguous parts of nearly equal cost.

    Of all cuts into non-empty parts, one whose largest part is smallest and,
    among those, whose parts vary least (the sum of squares is smallest, which
    is the paper's smallest variance, since the mean is fixed); and of those
    that are equal in both, one whose cuts cost least. Bisection finds the
    largest part, a dynamic programme over prefixes the rest.

    Args:
        costs: Sequence of n non-negative numbers.
        num_parts: Integer K, at most n.
        cuts: Sequence of n - 1 numbers, what it costs to cut between two
            items. Defaults to nothing.
        factors: Sequence of K positive numbers: in part k, items cost so many
            times as much. Defaults to ones.

    Returns:
        List of K positive integers, the number of items in each part.

    Example:

    >>> split([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    """
    factors = [1.0] * num_parts if factors is None else factors
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    n = len(costs)
    # Rounding in the sums must not forbid the very split that attains it.
    limit = _smallest_limit(prefix, factors) * (1 + 1e-9)
    ends = np.arange(n + 1)
    # Of parts of each factor that end before item i: where they may start,
    # and their squares.
    choosable = {}
    for factor in set(factors):
        first = np.searchsorted(prefix, prefix - limit / factor)
        width = int(np.max(ends - first))
        starts = ends[:, None] - np.arange(width, 0, -1)
        allowed = starts >= first[:, None]
        starts = np.maximum(starts, 0)
        parts = factor * (prefix[:, None] - prefix[starts])
        choosable[factor] = starts, np.where(allowed, parts**2, np.inf)
    cut = np.zeros(n + 1)
    if cuts is not None:
        cut[1:n] = cuts
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    sent = np.zeros(n + 1)
    choices = []
    for factor in factors:
        starts, squares = choosable[factor]
        values = best[starts] + squares
        least = np.min(values, axis=1)
        ties = np.where(values == least[:, None], (sent + cut)[starts], np.inf)
        column = np.argmin(ties, axis=1)
        best, sent = least, ties[ends, column]
        choices.append(starts[ends, column])
    sizes: list[int] = []
    end = n
    for choice in reversed(choices):
        sizes.insert(0, end - int(choice[end]))
        end = int(choice[end])
    return sizes


def _smallest_limit(prefix: np.ndarray, factors: Sequence[float]) -> float:
    """Returns the smallest largest part of any split."""
    n = len(prefix) - 1

    def largest(limit: float) -> float | None:
        """Returns the largest part where each is as full as `limit` lets."""
        start, most = 0, 0.0
        for k, factor in enumerate(factors, start=1):
            last = prefix[start] + limit / factor
            end = int(np.searchsorted(prefix, last, "right")) - 1
            # The parts that follow need an item each.
            end = min(end, n - (len(factors) - k))
            if end == start:
                return None
            most = max(most, factor * float(prefix[end] - prefix[start]))
            start = end
        return most if start == n else None

    # The largest item in the cheapest part, and all shared out evenly.
    low = max(
        float(np.max(np.diff(prefix))) * min(factors),
        float(prefix[-1]) / sum(1 / factor for factor in factors),
    )
    low, high = low * (1 - 1e-12), float(prefix[-1]) * max(factors)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        found = largest(middle)
        if found is None:
            low = middle
        else:
            high = min(found, middle)
    return high
