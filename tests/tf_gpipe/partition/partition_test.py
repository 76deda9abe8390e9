"""The contiguous split, compared with a search of every split."""

import itertools
import time

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.partition import contiguous


def brute_force(costs, num_parts, factors=None):
    """Returns the least `(largest part, sum of squares)` of all splits."""
    best = None
    factors = factors or [1] * num_parts
    for cuts in itertools.combinations(range(1, len(costs)), num_parts - 1):
        bounds = [0, *cuts, len(costs)]
        parts = [
            factor * sum(costs[a:b])
            for factor, (a, b) in zip(
                factors, itertools.pairwise(bounds), strict=True
            )
        ]
        value = (max(parts), sum(part * part for part in parts))
        best = value if best is None else min(best, value)
    return best


def parts_of(costs, sizes):
    bounds = np.cumsum([0, *sizes])
    return [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def histogram_split(costs, num_parts):
    """Cuts as Lingvo does: where the running total passes k / K."""
    totals = np.cumsum(costs)
    cuts = [
        int(np.argmax(totals >= totals[-1] * k / num_parts)) + 1
        for k in range(1, num_parts)
    ]
    return np.diff([0, *cuts, len(costs)]).tolist()


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
        parts = parts_of(costs, sizes)
        self.assertEqual(
            (max(parts), sum(part * part for part in parts)),
            brute_force(costs, num_parts),
        )

    @parameterized.parameters(
        (size, num_parts) for size in range(1, 10) for num_parts in range(1, 5)
    )
    def test_is_optimal_for_any_size(self, size, num_parts):
        num_parts = min(num_parts, size)
        random = np.random.default_rng([size, num_parts])
        for costs in (random.uniform(0, 1, size), random.pareto(1, size)):
            parts = parts_of(costs, contiguous.split(costs, num_parts))
            np.testing.assert_allclose(
                (max(parts), sum(part * part for part in parts)),
                brute_force(costs, num_parts),
                rtol=1e-9,
            )

    @parameterized.product(seed=tuple(range(8)), num_parts=(1, 2, 3, 4))
    def test_factors(self, seed, num_parts):
        random = np.random.default_rng([seed, num_parts])
        costs = random.integers(0, 20, 8).tolist()
        factors = random.integers(1, 5, num_parts).tolist()
        sizes = contiguous.split(costs, num_parts, factors=factors)
        self.assertGreater(min(sizes), 0)
        parts = np.multiply(factors, parts_of(costs, sizes))
        self.assertEqual(
            (max(parts), sum(parts**2)), brute_force(costs, num_parts, factors)
        )

    def test_beats_the_histogram(self):
        costs = [2, 2, 5, 1]
        self.assertEqual(parts_of(costs, histogram_split(costs, 2)), [9, 1])
        self.assertEqual(parts_of(costs, contiguous.split(costs, 2)), [4, 6])

    def test_is_fast(self):
        costs = np.random.default_rng(0).uniform(0, 1, 2000).tolist()
        start = time.perf_counter()
        sizes = contiguous.split(costs, 128)
        # Far above what it takes: a search of all splits would not end.
        self.assertLess(time.perf_counter() - start, 60)
        self.assertEqual((len(sizes), sum(sizes)), (128, 2000))


if __name__ == "__main__":
    absltest.main()
