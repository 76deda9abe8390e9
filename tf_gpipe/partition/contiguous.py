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

    Of all cuts into non-empty parts, it minimises the cost of the largest part;
    ties are broken by the smallest sum of squares of the parts' costs (the
    paper's smallest variance, since the mean is fixed), then by the smallest
    cost of the cuts. Bisection finds the cost of the largest part, dynamic
    programming over prefixes finds the cuts.

    Args:
        costs: n non-negative numbers.
        num_parts: Integer K, at most n.
        cuts: n - 1 numbers, the costs of a cut between two items. Defaults to
            zeros.
        factors: K positive numbers, by which the costs of the items of part k
            are multiplied. Defaults to ones.

    Returns:
        List of K positive integers, the number of items in each part.

    Example:

    >>> split([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    """
    factors = [1.0] * num_parts if factors is None else factors
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    n = len(costs)
    # Rounding in the sums must not forbid the split that attains the limit.
    limit = _smallest_limit(prefix, factors) * (1 + 1e-9)
    cut = np.zeros(n + 1)
    if cuts is not None:
        cut[1:n] = cuts
    ends = np.arange(n + 1)
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    sent = np.zeros(n + 1)
    choices = []
    for factor in factors:
        # Where a part that ends before item i may start within the limit; its
        # squared cost is added to the best sum of squares up to there.
        first = np.searchsorted(prefix, prefix - limit / factor)
        starts = ends[:, None] - np.arange(np.max(ends - first), 0, -1)
        allowed = starts >= first[:, None]
        starts = np.maximum(starts, 0)
        parts = factor * (prefix[:, None] - prefix[starts])
        values = best[starts] + np.where(allowed, parts**2, np.inf)
        least = np.min(values, axis=1)
        ties = np.where(values == least[:, None], (sent + cut)[starts], np.inf)
        column = np.argmin(ties, axis=1)
        best, sent = least, ties[ends, column]
        choices.append(starts[ends, column])
    bounds = [n]
    for choice in reversed(choices):
        bounds.insert(0, int(choice[bounds[0]]))
    return np.diff(bounds).tolist()


def _smallest_limit(prefix: np.ndarray, factors: Sequence[float]) -> float:
    """Returns the smallest cost that the largest part of a split can have."""
    last = len(prefix) - len(factors)

    def suffices(limit: float) -> bool:
        """Returns whether a split exists with no part above `limit`.

        Greedily: each part takes as many items as fit, but leaves one item to
        each later part.
        """
        start = 0
        for end, factor in enumerate(factors, start=last):
            full = np.searchsorted(
                prefix, prefix[start] + limit / factor, "right"
            )
            start, before = min(int(full) - 1, end), start
            if start == before:
                return False
        return start == len(prefix) - 1

    low, high = 0.0, float(prefix[-1]) * max(factors)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high
