"""Peaks of activations, compared with a walk over all tasks of a step."""

import collections

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import device_peaks
from tf_gpipe.schedule.memory import peak_activations
from tf_gpipe.schedule.memory import stage_peaks


def make_sizes(num_stages):
    return [
        Sizes(7 * k, 1 + k, 5 + k, 2 * k, 2, 3 + k % 3, k % 2, 1 + k // 2)
        for k in range(num_stages)
    ]


def by_hand(schedule, remat, sizes):
    """Returns the peak of these stages, from what is held at each task."""
    most, there = 0, {("fixed", k): x.fixed for k, x in sizes.items()}
    ran = collections.Counter()
    for kind, k, m in schedule.steps(remat):
        if k not in sizes:
            continue
        own = sizes[k]
        again = any(x == ("R", k, m) for x in schedule.steps(remat))
        if kind == "F":
            there["input", k, m] = own.inputs
            there["stored", k, m] = own.kept if again else own.stored
        if kind == "R":
            there["again", k, m] = own.adds_at_a_time
        for stage, x in sizes.items():
            if stage and schedule.devices[stage - 1] != schedule.devices[stage]:
                # One for the next forward pass, if there is one.
                there["next", stage] = x.arriving * (
                    ran[stage] + (kind == "F" and stage == k)
                    < schedule.num_micro_batches
                )
        ran[k] += kind == "F"
        temporary = own.temporary if kind == "B" else 0
        most = max(most, sum(there.values()) + temporary)
        split = ("B", k, m) in schedule.split
        if kind == ("W" if split else "B"):
            for what in ("input", "stored", "again"):
                there.pop((what, k, m), None)
            there["slices", k, m] = own.slices
    slices = sum(x for key, x in there.items() if key[0] == "slices")
    if schedule.num_micro_batches == 1:
        slices = 0
    return max(most, sum(there.values()) + slices)


class MemoryTest(parameterized.TestCase):
    @parameterized.product(
        schedule=(
            schedules.one_f_one_b(4, 6),
            schedules.gpipe(3, 1),
            schedules.zero_bubble(4, 5),
            schedules.eager_zero_bubble(4, 5),
            schedules.get("interleaved", 6, 4, 2),
            schedules.get("zb_v", 6, 4, 3),
        ),
        remat=("always", "except_last", "never"),
    )
    def test_peaks(self, schedule, remat):
        sizes = make_sizes(schedule.num_stages)
        stages = dict(enumerate(sizes))
        self.assertEqual(
            stage_peaks(schedule, remat, sizes),
            [by_hand(schedule, remat, {k: x}) for k, x in stages.items()],
        )
        self.assertEqual(
            device_peaks(schedule, remat, sizes),
            [
                by_hand(
                    schedule,
                    remat,
                    {k: stages[k] for k in stages if devices[k] == device},
                )
                for devices in [schedule.devices]
                for device in range(len(schedule.tasks))
            ],
        )
        # All stages together, as if one device held them.
        self.assertEqual(
            peak_activations(schedule, remat, stages),
            by_hand(schedule, remat, stages),
        )


if __name__ == "__main__":
    absltest.main()
