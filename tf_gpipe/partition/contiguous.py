"""The contiguous split of a sequence that balances costs best.

This module imports no TensorFlow.
"""

from collections.abc import Sequence

import numpy as np


def split(costs: Sequence[float], num_parts: int) -> list[int]:
    """Cuts a sequence into contiguous parts of nearly equal cost.

    Of all cuts into non-empty parts, one whose largest part is smallest and,
    among those, whose parts vary least (the sum of squares is smallest, which
    is the paper's smallest variance, since the mean is fixed). Two dynamic
    programmes over prefixes, O(n^2 K) in NumPy.

    Args:
        costs: Sequence of n non-negative numbers.
        num_parts: Integer K, at most n.

    Returns:
        List of K positive integers, the number of items in each part.

    Example:

    >>> split([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    """
    largest = _programme(costs, num_parts, np.maximum, lambda cost: cost)
    # Rounding in the sums must not forbid the very split that attains it.
    limit = largest.value * (1 + 1e-9)
    squares = _programme(
        costs,
        num_parts,
        np.add,
        lambda cost: np.where(cost <= limit, cost * cost, np.inf),
    )
    return squares.sizes


class _programme:
    """Minimises `combine` of `measure(part cost)` over contiguous parts."""

    def __init__(self, costs, num_parts, combine, measure):
        prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
        n = len(costs)
        # best[i]: the best value for the first i items in the parts so far.
        best = np.full(n + 1, np.inf)
        best[0] = 0.0
        choices = []
        for _ in range(num_parts):
            following = np.full(n + 1, np.inf)
            choice = np.zeros(n + 1, int)
            for i in range(1, n + 1):
                value = combine(best[:i], measure(prefix[i] - prefix[:i]))
                choice[i] = int(np.argmin(value))
                following[i] = value[choice[i]]
            best = following
            choices.append(choice)
        self.value = best[n]
        self.sizes: list[int] = []
        end = n
        for choice in reversed(choices):
            self.sizes.insert(0, end - int(choice[end]))
            end = int(choice[end])
