"""Simulated schedules, compared with formulas and results by hand."""

import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import device_peaks
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.simulate import Span
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.tasks import Task


def written(simulation):
    """Writes the spans of each device as `task start-end`."""
    rows = [[] for _ in simulation.busy]
    for span in simulation.spans:
        rows[span.device].append(f"{span.task} {span.start:g}-{span.end:g}")
    return rows


def recomputed(simulation):
    return [str(s.task) for s in simulation.spans if s.task.kind == "R"]


class SimulateTest(parameterized.TestCase):
    @parameterized.product(
        name=("gpipe", "1f1b"),
        num_stages=(1, 2, 3, 4, 8),
        num_micro_batches=(1, 2, 4, 7, 32),
    )
    def test_bubble(self, name, num_stages, num_micro_batches):
        result = simulate(schedules.get(name, num_stages, num_micro_batches))
        slots = num_micro_batches + num_stages - 1
        self.assertEqual(result.makespan, 3 * slots)
        # Whole numbers: a product is exact where a quotient is rounded.
        self.assertEqual(
            (num_stages * result.makespan - sum(result.busy)) * slots,
            (num_stages - 1) * num_stages * result.makespan,
        )
        self.assertEqual(result.bubble, round((num_stages - 1) / slots, 12))

    @parameterized.product(
        num_stages=(1, 2, 3, 4, 8), num_micro_batches=(1, 2, 4, 7, 32)
    )
    def test_recomputation_waits_for_no_gradient(
        self, num_stages, num_micro_batches
    ):
        result = simulate(
            schedules.gpipe(num_stages, num_micro_batches), recompute=1.0
        )
        slots = num_micro_batches + num_stages - 1
        # All stages but the last one do their first recomputation while they
        # wait, and the last one recomputes nothing of a single micro-batch.
        waiting = num_stages if num_micro_batches == 1 else num_stages - 1
        self.assertEqual(result.makespan, 4 * slots - waiting)

    @parameterized.product(num_stages=(2, 3, 4, 8), more=(0, 1, 4, 24))
    def test_zero_bubble(self, num_stages, more):
        num_micro_batches = num_stages + more
        result, unsplit = (
            simulate(schedules.get(name, num_stages, num_micro_batches))
            for name in ("zero_bubble", "1f1b")
        )
        # Forward passes, gradients by inputs and gradients by weights take
        # equally long.
        self.assertAlmostEqual(
            result.bubble * result.makespan,
            unsplit.bubble * unsplit.makespan / 3,
        )
        self.assertEqual(
            max(result.peak_micro_batches), max(unsplit.peak_micro_batches)
        )

    @parameterized.product(
        num_stages=(2, 3, 4, 8), num_micro_batches=(1, 2, 3, 7)
    )
    def test_zero_bubble_of_few(self, num_stages, num_micro_batches):
        # What docs/how_it_works.md says of fewer micro-batches than stages.
        if num_micro_batches >= num_stages:
            return
        split, unsplit = (
            simulate(schedules.get(name, num_stages, num_micro_batches))
            for name in ("zero_bubble", "1f1b")
        )
        idle = split.makespan - 3 * num_micro_batches
        self.assertEqual(idle, 2 * num_stages - 1 - num_micro_batches)
        self.assertEqual(
            unsplit.makespan - 3 * num_micro_batches, 3 * (num_stages - 1)
        )
        self.assertEqual(
            split.peak_micro_batches, [num_micro_batches] * num_stages
        )

    @parameterized.product(
        num_stages=(1, 2, 3, 4, 8), num_micro_batches=(1, 7, 32)
    )
    def test_eager_one_f_one_b(self, num_stages, num_micro_batches):
        transfer = 0.5
        eager, usual, gpipe = (
            simulate(
                schedules.get(name, num_stages, num_micro_batches),
                transfer=transfer,
            )
            for name in ("eager_1f1b", "1f1b", "gpipe")
        )
        # Transfers add time only while the first micro-batch goes to the last
        # stage, and while the last one comes back.
        self.assertAlmostEqual(eager.makespan, gpipe.makespan)
        exposed = min(num_stages, num_micro_batches) > 1
        self.assertEqual(eager.makespan < usual.makespan - 1e-9, exposed)
        self.assertEqual(
            eager.peak_micro_batches,
            [
                min(2 * (num_stages - k) - 1, num_micro_batches)
                for k in range(num_stages)
            ],
        )

    @parameterized.product(num_stages=(1, 2, 3, 4, 8), more=(0, 2, 8))
    def test_eager_zero_bubble(self, num_stages, more):
        num_micro_batches = 4 * num_stages + more
        split, eager = (
            simulate(schedules.get(name, num_stages, num_micro_batches))
            for name in ("eager_zero_bubble", "eager_1f1b")
        )
        # Without counting what splitting costs.
        self.assertLessEqual(split.makespan, eager.makespan - (num_stages - 1))
        self.assertEqual(
            max(split.peak_micro_batches), max(eager.peak_micro_batches)
        )

    def test_some_are_split(self):
        schedule = tf_gpipe.Schedule(
            [["F0.0", "B0.0", "F0.1", "B0.1", "W0.1"]], name="mine"
        )
        result = simulate(schedule, 1.0, 5.0, weights=2.0)
        self.assertEqual(
            written(result),
            [["F0.0 0-1", "B0.0 1-6", "F0.1 6-7", "B0.1 7-10", "W0.1 10-12"]],
        )
        self.assertEqual(result.peak_micro_batches, [1])
        # What the first one keeps is freed by its backward pass.
        sizes = [Sizes(inputs=1, stored=4)]
        self.assertEqual(device_peaks(schedule, "never", sizes), [5])

    def test_gradients_of_weights(self):
        schedule = schedules.zero_bubble(2, 2)
        spans = simulate(schedule, 1.0, 5.0, weights=[2.0, 1.0]).spans
        found = {(x.task.kind, x.task.stage): x.end - x.start for x in spans}
        self.assertEqual(
            found,
            {
                ("F", 0): 1.0,
                ("F", 1): 1.0,
                ("B", 0): 3.0,
                ("B", 1): 4.0,
                ("W", 0): 2.0,
                ("W", 1): 1.0,
            },
        )
        with self.assertRaisesRegex(ValueError, "a part of `backward`.*2.0"):
            simulate(schedule, 1.0, 1.0, weights=2.0)

    def test_gradients_of_weights_alone(self):
        schedule = schedules.zero_bubble(2, 2)
        sums = simulate(schedule, 1.0, 0.3, weights=0.1 + 0.2)
        self.assertEqual(
            sums.makespan, simulate(schedule, 1.0, 0.3, weights=0.3).makespan
        )

    @parameterized.product(
        num_stages=(1, 2, 3, 4, 8), num_micro_batches=(1, 2, 4, 7, 32)
    )
    def test_peak_micro_batches(self, num_stages, num_micro_batches):
        gpipe = schedules.gpipe(num_stages, num_micro_batches)
        self.assertEqual(
            simulate(gpipe).peak_micro_batches,
            [num_micro_batches] * num_stages,
        )
        one_f_one_b = schedules.one_f_one_b(num_stages, num_micro_batches)
        self.assertEqual(
            simulate(one_f_one_b).peak_micro_batches,
            [min(num_stages - k, num_micro_batches) for k in range(num_stages)],
        )

    @parameterized.product(
        num_devices=(1, 2, 3, 4), chunks=(1, 2, 3), more=(0, 1, 4, 7, 13)
    )
    def test_interleaved(self, num_devices, chunks, more):
        num_micro_batches = num_devices + more
        plan = schedules.interleaved(
            chunks * num_devices, num_micro_batches, num_devices
        )
        result = simulate(plan)
        slots = chunks * num_micro_batches + num_devices - 1
        self.assertEqual(result.makespan, 3 * slots)
        self.assertEqual(result.bubble, round((num_devices - 1) / slots, 12))
        if chunks == 1:
            same = schedules.one_f_one_b(num_devices, num_micro_batches)
            self.assertEqual(plan.tasks, same.tasks)
        split = schedules.interleaved_zero_bubble(
            chunks * num_devices, num_micro_batches, num_devices
        )
        # Bubbles shrink to a third, as all tasks take equally long.
        self.assertEqual(
            simulate(split).makespan, result.makespan - 2 * (num_devices - 1)
        )
        # The first device keeps the most.
        sizes = [Sizes()] * plan.num_stages
        self.assertEqual(
            max(device_peaks(split, "never", sizes)),
            device_peaks(plan, "never", sizes)[0],
        )

    def test_example(self):
        result = simulate(
            schedules.gpipe(2, 2),
            forward=[1, 2],
            backward=[2, 3],
            recompute=[0.5, 1],
            transfer=0.25,
        )
        self.assertEqual(
            written(result),
            [
                [
                    "F0.0 0-1",
                    "F0.1 1-2",
                    "R0.1 2-2.5",
                    "B0.1 9.5-11.5",
                    "R0.0 11.5-12",
                    "B0.0 13.5-15.5",
                ],
                [
                    "F1.0 1.25-3.25",
                    "F1.1 3.25-5.25",
                    "R1.1 5.25-6.25",
                    "B1.1 6.25-9.25",
                    "R1.0 9.25-10.25",
                    "B1.0 10.25-13.25",
                ],
            ],
        )
        self.assertEqual(result.makespan, 15.5)
        self.assertEqual(result.busy, [7, 12])
        self.assertEqual(result.bubble, round(12 / 31, 12))

    def test_each_boundary_has_its_transfer(self):
        result = simulate(
            schedules.one_f_one_b(3, 1), forward=1, backward=1, transfer=[1, 4]
        )
        self.assertEqual(
            written(result),
            [
                ["F0.0 0-1", "B0.0 15-16"],
                ["F1.0 2-3", "B1.0 13-14"],
                ["F2.0 7-8", "B2.0 8-9"],
            ],
        )

    def test_no_transfer_within_a_device(self):
        plan = schedules.interleaved(4, 2, 1)
        self.assertEqual(simulate(plan, transfer=9).makespan, 24)
        self.assertEqual(simulate(plan, transfer=9).bubble, 0)

    @parameterized.parameters(
        ("gpipe", "always", "R1.2 R1.1 R0.2 R1.0 R0.1 R0.0", [12, 12]),
        ("gpipe", "except_last", "R1.1 R1.0 R0.1 R0.0", [11, 11]),
        ("gpipe", "never", "", [9, 9]),
        # The last stage goes backward at once, and still holds its activations.
        ("1f1b", "always", "R0.0 R0.1 R0.2", [12, 9]),
        ("1f1b", "except_last", "R0.0 R0.1", [11, 9]),
        ("1f1b", "never", "", [9, 9]),
    )
    def test_remat(self, name, remat, tasks, busy):
        result = simulate(schedules.get(name, 2, 3), recompute=1, remat=remat)
        self.assertCountEqual(recomputed(result), tasks.split())
        self.assertEqual(result.busy, busy)

    def test_no_span_without_recomputation(self):
        self.assertEmpty(recomputed(simulate(schedules.gpipe(2, 2))))

    @parameterized.parameters("gpipe", "1f1b", "interleaved")
    def test_busy_and_idle(self, name):
        plan = schedules.get(name, 4, 4, num_devices=2)
        result = simulate(
            plan,
            forward=[1, 2, 3, 4],
            backward=[4, 1, 2, 3],
            recompute=[1, 0, 2, 1],
            transfer=[1, 2, 3],
            remat="except_last",
        )
        for device, busy in enumerate(result.busy):
            spans = [s for s in result.spans if s.device == device]
            self.assertEqual(busy, sum(s.end - s.start for s in spans))
            for before, after in zip(spans, spans[1:], strict=False):
                self.assertLessEqual(before.end, after.start)
            self.assertEqual(
                [s.task for s in spans if s.task.kind != "R"],
                list(plan.tasks[device]),
            )
        self.assertEqual(result.makespan, max(s.end for s in result.spans))
        # 4 forward and backward passes of all stages. Recomputations take 1 + 2
        # for the first three stages, and 1 for the last one, which recomputes
        # nothing where it goes backward at once.
        recomputed = 4 if name == "gpipe" else 3
        self.assertEqual(sum(result.busy), 4 * (10 + 10) + 3 * recomputed)

    def test_free_tasks_leave_no_bubble(self):
        result = simulate(schedules.gpipe(2, 2), forward=0, backward=0)
        self.assertEqual((result.makespan, result.bubble), (0, 0))

    @parameterized.parameters(
        ({"forward": [1]}, "`forward` must be .* list of 2 numbers"),
        ({"backward": [1, 2, 3]}, "`backward` must be .* list of 2 numbers"),
        ({"recompute": []}, "`recompute` must be .* list of 2 numbers"),
        ({"transfer": [1, 1]}, "`transfer` must be .* list of 1 numbers"),
        ({"forward": -1}, "`forward` must not be negative.*forward=-1"),
        ({"backward": [1, -2]}, r"`backward` must not .*backward=\[1, -2\]"),
        ({"recompute": float("nan")}, "`recompute` must not .*recompute=nan"),
        ({"transfer": [float("nan")]}, "`transfer` must not"),
        ({"remat": "sometimes"}, "`remat` must be one of .*remat='sometimes'"),
    )
    def test_refuses(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            simulate(schedules.gpipe(2, 2), **arguments)

    @parameterized.parameters(
        "schedule.search",
        "schedule.simulate",
        "schedule.tasks",
        "schedule.memory",
        "schedule.timeline",
        "planning.plans",
        "partition.contiguous",
    )
    def test_imports_no_tensorflow(self, module):
        # An empty package replaces tf_gpipe's own, which imports TensorFlow.
        code = (
            "import importlib, sys, types\n"
            "package = types.ModuleType('tf_gpipe')\n"
            f"package.__path__ = {list(tf_gpipe.__path__)!r}\n"
            "sys.modules['tf_gpipe'] = package\n"
            f"importlib.import_module('tf_gpipe.{module}')\n"
            "assert not {'tensorflow', 'keras'} & set(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class ExecutionTest(absltest.TestCase):
    def test_overlap_counts_once(self):
        found = Execution(
            [
                Span(0, Task("B", 0, 0), 18.0, 20.0),
                Span(0, Task("B", 0, 1), 12.0, 14.0),
                Span(0, Task("F", 0, 1), 11.0, 12.0),
                Span(0, Task("F", 0, 0), 10.0, 13.0),
            ]
        )
        self.assertEqual(found.start, 10.0)
        self.assertEqual(found.makespan, 10.0)
        self.assertEqual(found.busy, [6.0])
        self.assertEqual(found.bubble, 0.4)
        self.assertEqual(found.peak_micro_batches, [2])

    def test_device_without_spans(self):
        found = Execution([Span(0, Task("F", 0, 0), 0.0, 1.0)], ["a", "b"])
        self.assertEqual(found.busy, [1.0, 0.0])
        self.assertEqual(found.bubble, 0.5)


if __name__ == "__main__":
    absltest.main()
