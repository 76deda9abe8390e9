"""V schedules, compared with the figures of their papers."""

import random

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import device_peaks
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.tasks import Schedule


def memory(plan):
    """Returns the peak of a device, relative to that of 1F1B's first device.

    1F1B's first device keeps as many micro-batches as there are devices.
    """
    peaks = device_peaks(plan, "never", [Sizes()] * plan.num_stages)
    return max(peaks) / (2 * len(plan.tasks))


class VSchedulesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("zb_v", 4, 0.059, 0.015, 1.0),
        ("zb_v", 8, 0.127, 0.035, 1.0),
        ("v_half", 4, 0.094, 0.025, 0.75),
        ("v_half", 8, 0.262, 0.081, 0.63),
        ("v_min", 4, 0.186, 0.054, 0.5),
        ("v_min", 8, 0.360, 0.123, 0.5),
    )
    def test_figures(self, name, num_devices, of_8, of_32, kept):
        """Bubbles with M=8 and 32, and memory, for tasks of equal length."""
        for num_micro_batches, bubble in ((8, of_8), (32, of_32)):
            plan = schedules.get(name, 2 * num_devices, num_micro_batches)
            self.assertLessEqual(
                round(simulate(plan, remat="never").bubble, 3), bubble
            )
            self.assertLessEqual(round(memory(plan), 2), kept)

    @parameterized.product(
        num_devices=(1, 2, 3, 4, 5, 6, 7, 8, 12),
        num_micro_batches=(1, 2, 3, 5, 8, 13, 24, 33),
    )
    def test_idle(self, num_devices, num_micro_batches):
        def idle(name):
            plan = schedules.get(name, 2 * num_devices, num_micro_batches)
            self.assertEqual(plan.name, name)
            self.assertEqual(
                plan.devices,
                [*range(num_devices), *reversed(range(num_devices))],
            )
            busy = 6 * num_micro_batches
            return simulate(plan).makespan - busy, memory(plan)

        waits, kept = idle("zb_v")
        self.assertLessEqual(kept, 1.0)
        if num_micro_batches >= num_devices:
            self.assertEqual(waits, num_devices - 1)
        waits, kept = idle("v_half")
        self.assertLessEqual(kept, (num_devices + 2) / (2 * num_devices))
        if num_micro_batches >= num_devices >= 3:
            odd = num_devices % 2
            self.assertEqual(waits, 3 * num_devices - 7 + odd)
        waits, kept = idle("v_min")
        self.assertLessEqual(kept, 1 / 3 + 8 / 3 / (2 * num_devices))
        self.assertLessEqual(waits, max(4 * num_devices - 5, 0))

    @parameterized.parameters(
        (
            "zb_v",
            2,
            [
                "F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 W3.0 B0.1 W3.1 W0.0 W0.1",
                "F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1 W2.0 W1.0 W2.1 W1.1",
            ],
        ),
    )
    def test_rows(self, name, num_micro_batches, rows):
        plan = schedules.get(name, 4, num_micro_batches)
        self.assertEqual(str(plan).splitlines(), rows)

    @parameterized.parameters((3, 0.031), (4, 0.03), (5, 0.03), (8, 0.03))
    def test_no_bubble_between_steps(self, num_devices, bubble):
        """Eight steps in one graph: each device does one after another."""
        M = 2 * num_devices
        one = schedules.get("zb_v", 2 * num_devices, M)
        rows = [
            [t._replace(micro_batch=t.micro_batch + i * M) for t in row]
            for row in one.tasks
            for i in range(8)
        ]
        several = Schedule(
            [sum(rows[i : i + 8], []) for i in range(0, len(rows), 8)]
        )
        self.assertLess(simulate(several).bubble, bubble)
        self.assertGreater(simulate(one).bubble, 1.5 * bubble)

    @parameterized.parameters("zb_v", "v_half", "v_min")
    def test_uneven_costs(self, name):
        draw = random.Random(0)
        for num_devices in (2, 3, 4):
            plan = schedules.get(name, 2 * num_devices, 7)
            times = [
                [draw.uniform(0.5, 1.5) for _ in range(2 * num_devices)]
                for _ in range(2)
            ]
            for remat in ("always", "except_last", "never"):
                step = simulate(
                    plan, *times, recompute=times[0], transfer=0.3, remat=remat
                )
                self.assertLess(step.bubble, 0.6)
            # The last stage goes backward at once.
            self.assertLen(plan.direct, 7)


if __name__ == "__main__":
    absltest.main()
