"""The contiguous split, compared with trying every split."""

import itertools

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.partition import contiguous


def brute_force(costs, num_parts):
    """Returns the smallest (largest part, sum of squares) of all splits."""
    best = None
    for cuts in itertools.combinations(range(1, len(costs)), num_parts - 1):
        bounds = [0, *cuts, len(costs)]
        parts = [
            sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        value = (max(parts), sum(part * part for part in parts))
        best = value if best is None else min(best, value)
    return best


class ContiguousTest(parameterized.TestCase):
    def test_examples(self):
        self.assertEqual(contiguous.split([1, 2, 3, 4, 5, 6], 2), [4, 2])
        self.assertEqual(contiguous.split([0, 0, 0, 0], 2), [1, 3])
        self.assertEqual(contiguous.split([5], 1), [1])

    @parameterized.product(seed=tuple(range(8)), num_parts=(1, 2, 3, 5))
    def test_is_optimal(self, seed, num_parts):
        costs = np.random.default_rng(seed).integers(0, 20, 9).tolist()
        sizes = contiguous.split(costs, num_parts)
        self.assertLen(sizes, num_parts)
        self.assertEqual(sum(sizes), len(costs))
        self.assertGreater(min(sizes), 0)
        bounds = np.cumsum([0, *sizes])
        parts = [
            sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        self.assertEqual(
            (max(parts), sum(part * part for part in parts)),
            brute_force(costs, num_parts),
        )


if __name__ == "__main__":
    absltest.main()
