"""Searched schedules, compared with those that have names."""

import random
import statistics

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import pairwise
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import device_peaks
from tf_gpipe.schedule.search import search
from tf_gpipe.schedule.search import step_seconds
from tf_gpipe.schedule.simulate import Times


def uneven(draw, num_stages, remat="never", transfer=0.0, update=0.0):
    def costs():
        return [draw.uniform(0.5, 1.5) for _ in range(num_stages)]

    forward, inputs, weights = costs(), costs(), costs()
    return Times.of(
        num_stages,
        forward,
        [x + y for x, y in zip(inputs, weights, strict=True)],
        0.0 if remat == "never" else forward,
        transfer,
        weights,
        update=[draw.uniform(0.0, update) for _ in range(num_stages)],
    )


def named(num_stages, num_micro_batches, num_devices):
    found = []
    for name in schedules.NAMES:
        try:
            found.append(
                schedules.get(name, num_stages, num_micro_batches, num_devices)
            )
        except ValueError:
            continue
    return [x for x in found if len(x.tasks) == num_devices]


def memory_of_1f1b(num_stages, num_micro_batches, num_devices):
    """Returns 1F1B's peak on a device, if each stage keeps 1 a micro-batch."""
    each = num_stages // num_devices
    return each * min(num_devices, num_micro_batches)


class SearchTest(parameterized.TestCase):
    def relative(self, times, num_micro_batches, num_devices, remat="never"):
        """Returns the found schedule's time, relative to the best named one."""
        numbers = len(times.forward), num_micro_batches, num_devices
        memory = memory_of_1f1b(*numbers)

        def kept(plan):
            return max(device_peaks(plan, remat, [Sizes()] * numbers[0]))

        found = search(times, *numbers[1:], remat)
        self.assertLessEqual(kept(found), memory)
        self.assertEqual(found.name, "auto")
        self.assertLen(found.tasks, num_devices)
        # All devices have equally many stages.
        self.assertLen({found.devices.count(i) for i in range(num_devices)}, 1)
        others = [
            step_seconds(x, times, remat)
            for x in named(*numbers)
            if kept(x) <= memory
        ]
        return step_seconds(found, times, remat) / min(others)

    @parameterized.parameters(
        (8, 5, 4, "never", 0.0),
        (8, 8, 4, "always", 0.3),
        (4, 6, 4, "except_last", 0.1),
        (4, 7, 4, "never", 0.0),
        (6, 3, 6, "always", 0.0),
        (4, 2, 2, "never", 0.5),
        (2, 1, 1, "always", 0.0),
        (2, 9, 1, "never", 0.0),
    )
    def test_never_worse(self, num_stages, num_micro_batches, num_devices, *a):
        draw = random.Random(num_micro_batches)
        times = uneven(draw, num_stages, *a, update=1.0)
        relative = self.relative(times, num_micro_batches, num_devices, a[0])
        self.assertLessEqual(relative, 1.0 + 1e-9)

    @pytest.mark.slow
    def test_shorter(self):
        draw = random.Random(0)
        found = [self.relative(uneven(draw, 8), 8, 4) for _ in range(6)]
        self.assertLess(statistics.mean(found), 0.97)

    @parameterized.parameters((4, 8, 0.0), (4, 16, 0.1))
    @pytest.mark.slow
    def test_over_many(self, num_devices, num_micro_batches, transfer):
        """Random sets of times, as the 200 sets in docs/how_it_works.md."""
        draw = random.Random(1)
        found = [
            self.relative(
                uneven(draw, 2 * num_devices, transfer=transfer),
                num_micro_batches,
                num_devices,
            )
            for _ in pairwise.some(range(100), 20)
        ]
        self.assertLessEqual(max(found), 1.0 + 1e-9)
        self.assertLess(statistics.mean(found), 0.95)

    def test_equal_stages(self):
        found = search(Times.of(8), 8, 4)
        self.assertIn("that of 'zb_v', than which none", found.description)
        self.assertEqual(found.tasks, schedules.zb_v(8, 8).tasks)

    def test_deterministic(self):
        times = uneven(random.Random(3), 6)
        found = [search(times, 5, 3) for _ in range(2)]
        self.assertEqual(found[0].tasks, found[1].tasks)
        self.assertRegex(found[0].title, "^auto: searched for these stages, ")

    @parameterized.parameters("always", "except_last", "never")
    @pytest.mark.slow_after(1)
    def test_memory(self, remat):
        """Stages hold different amounts; the bound is kept in bytes."""
        draw = random.Random(2)
        times = uneven(draw, 6, remat)
        sizes = [
            Sizes(*(draw.randint(0, 9) for _ in range(4))) for _ in range(6)
        ]
        within = []
        for memory in (200, 300, 1000):
            found = search(times, 8, 3, remat, sizes, memory)
            self.assertLessEqual(max(device_peaks(found, remat, sizes)), memory)
            within.append(step_seconds(found, times, remat))
        # More memory makes a step no slower, but for chance.
        self.assertGreater(within[0], 0.98 * within[-1])
        with self.assertRaisesRegex(ValueError, "no order .*memory=3, where"):
            search(times, 8, 3, remat, sizes, memory=3)

    @parameterized.parameters((0.0,), ([0.0, 0.0, 0.0, 1.0],))
    def test_stages_without_cost(self, costs):
        """Embeddings and additions have no FLOPs."""
        found = search(Times.of(4, costs, costs), 4, 2)
        self.assertLen(found.tasks, 2)

    @parameterized.parameters("slices", "temporary", "fixed", "stored")
    def test_returns_nothing_above_the_memory(self, kind):
        """Whatever a stage keeps too much of."""
        sizes = [Sizes(**{kind: 10 if i == 1 else 1}) for i in range(4)]
        for remat in ("never", "except_last", "always"):
            for memory in (14, 24, 34, 44, 54):
                try:
                    found = search(Times.of(4), 2, 2, remat, sizes, memory)
                except ValueError:
                    continue
                most = max(device_peaks(found, remat, sizes))
                self.assertLessEqual(most, memory, (remat, memory))

    def test_refuses(self):
        with self.assertRaisesRegex(ValueError, "num_stages=5, 2 devices"):
            search(Times.of(5), 4, 2)
        with self.assertRaisesRegex(ValueError, "num_micro_batches=0"):
            search(Times.of(4), 0, 2)
        with self.assertRaisesRegex(ValueError, "num_devices=0"):
            search(Times.of(4), 4, 0)
        with self.assertRaisesRegex(ValueError, "Received: 5.*4 stages"):
            search(Times.of(4), 4, 2, sizes=[Sizes()] * 5)
        with self.assertRaisesRegex(TypeError, "memory='8GB'"):
            search(Times.of(4), 4, 2, memory="8GB")


if __name__ == "__main__":
    absltest.main()
