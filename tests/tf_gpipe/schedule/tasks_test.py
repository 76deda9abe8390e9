"""Schedules, compared with pictures of them."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.schedule import schedules


def clock(plan):
    """Draws a schedule: a row a stage, a column a unit of time."""
    rows = [[] for _ in range(plan.num_stages)]
    ends = {}
    for task in plan.order:
        needs = [ends[need] for need in plan.needs(task)]
        start = max([len(rows[task.stage]), *needs])
        row = rows[task.stage]
        row += [" ."] * (start - len(row)) + [f"{task.kind}{task.micro_batch}"]
        ends[task] = start + 1
    width = max(map(len, rows))
    return [" ".join(row + [" ."] * (width - len(row))) for row in rows]


class ScheduleTest(parameterized.TestCase):
    @parameterized.parameters(
        (1, 1, ["F0 B0"]),
        (1, 3, ["F0 F1 F2 B2 B1 B0"]),
        (
            3,
            1,
            [
                "F0  .  .  .  . B0",
                " . F0  .  . B0  .",
                " .  . F0 B0  .  .",
            ],
        ),
        (
            3,
            4,
            [
                "F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0",
                " . F0 F1 F2 F3  .  . B3 B2 B1 B0  .",
                " .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .",
            ],
        ),
    )
    def test_gpipe(self, num_stages, num_micro_batches, picture):
        plan = schedules.gpipe(num_stages, num_micro_batches)
        self.assertEqual(clock(plan), picture)
        self.assertTrue(plan.forwards_first)

    @parameterized.parameters(
        (1, 1, ["F0 B0"]),
        (1, 3, ["F0 B0 F1 B1 F2 B2"]),
        (2, 2, ["F0 F1  . B0  . B1", " . F0 B0 F1 B1  ."]),
        (
            3,
            4,
            [
                "F0 F1 F2  .  . B0 F3 B1  . B2  . B3",
                " . F0 F1  . B0 F2 B1 F3 B2  . B3  .",
                " .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .",
            ],
        ),
    )
    def test_one_f_one_b(self, num_stages, num_micro_batches, picture):
        plan = schedules.one_f_one_b(num_stages, num_micro_batches)
        self.assertEqual(clock(plan), picture)
        self.assertEqual(plan.forwards_first, num_micro_batches == 1)

    @parameterized.parameters(
        (1, 3, ["F0 B0 F1 B1 F2 B2"]),
        (2, 3, ["F0 F1 F2 B0  . B1  . B2", " . F0 B0 F1 B1 F2 B2  ."]),
        (
            3,
            4,
            [
                "F0 F1 F2 F3  . B0  . B1  . B2  . B3",
                " . F0 F1 F2 B0 F3 B1  . B2  . B3  .",
                " .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .",
            ],
        ),
    )
    def test_eager_one_f_one_b(self, num_stages, num_micro_batches, picture):
        plan = schedules.eager_one_f_one_b(num_stages, num_micro_batches)
        self.assertEqual(clock(plan), picture)

    @parameterized.product(
        num_stages=(1, 2, 3, 5), num_micro_batches=(1, 2, 3, 7, 16)
    )
    def test_eager_zero_bubble(self, num_stages, num_micro_batches):
        """The last backward passes of all stages but the first are split."""
        plan = schedules.eager_zero_bubble(num_stages, num_micro_batches)
        plain = schedules.eager_one_f_one_b(num_stages, num_micro_batches)
        for k, row in enumerate(plan.tasks):
            late = min(2 * k, num_micro_batches)
            size = len(row) - late
            self.assertEqual(row[:size], plain.tasks[k])
            last = range(num_micro_batches - late, num_micro_batches)
            self.assertEqual(
                [str(x) for x in row[size:]], [f"W{k}.{m}" for m in last]
            )
            split = [x.micro_batch for x in plan.split if x.stage == k]
            self.assertEqual(sorted(split), list(last))

    @parameterized.product(
        name=("gpipe", "1f1b", "eager_1f1b"),
        num_stages=(1, 2, 3, 5, 8),
        num_micro_batches=(1, 2, 3, 7, 16),
    )
    def test_takes_the_least_time(self, name, num_stages, num_micro_batches):
        plan = schedules.get(name, num_stages, num_micro_batches)
        columns = {len(row.split()) for row in clock(plan)}
        self.assertEqual(columns, {2 * (num_micro_batches + num_stages - 1)})

    @parameterized.parameters(
        (schedules.one_f_one_b(3, 4), "B2.0 B2.1 B2.2 B2.3"),
        (schedules.interleaved(4, 4, 2), "B3.0 B3.1 B3.2 B3.3"),
        # The loss of the whole mini-batch comes between forward and backward.
        (schedules.gpipe(3, 4), ""),
        # Here, too, but it is the loss of the micro-batch.
        (schedules.gpipe(3, 1), "B2.0"),
        (schedules.one_f_one_b(3, 1), "B2.0"),
        (schedules.one_f_one_b(1, 1), "B0.0"),
        (schedules.interleaved(4, 1, 2), "B3.0"),
        (
            schedules.Schedule(
                [["F0.0", "F0.1", "B0.1", "F0.2", "B0.0", "B0.2"]]
            ),
            "B0.1",
        ),
    )
    def test_direct(self, plan, tasks):
        self.assertEqual(sorted(map(str, plan.direct)), tasks.split())
        for before, task in itertools.pairwise(plan.order):
            if task in plan.direct:
                self.assertEqual(before, task._replace(kind="F"))

    def test_one_f_one_b_holds_few_micro_batches(self):
        plan = schedules.one_f_one_b(4, 7)
        for k, row in enumerate(plan.tasks):
            held = most = 0
            for task in row:
                held += 1 if task.kind == "F" else -1
                most = max(most, held)
            self.assertEqual(most, min(4 - k, 7))

    @parameterized.parameters(
        (
            2,
            "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
            "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
        ),
        (
            4,
            "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 "
            "F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
            "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 "
            "F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
        ),
    )
    def test_interleaved(self, num_micro_batches, *rows):
        plan = schedules.interleaved(4, num_micro_batches, num_devices=2)
        self.assertEqual(str(plan).splitlines(), list(rows))

    @parameterized.product(
        num_devices=(1, 2, 3, 4), chunks=(2, 3), groups=(1, 2, 4)
    )
    def test_interleaved_warm_up(self, num_devices, chunks, groups):
        plan = schedules.interleaved(
            chunks * num_devices, groups * num_devices, num_devices
        )
        for rank, row in enumerate(plan.tasks):
            # As in Megatron-LM, whose steady state starts with one more
            # forward pass where one is left.
            warm_up = (chunks - 1) * num_devices + 2 * (num_devices - rank - 1)
            forwards = [task.kind for task in row].index("B")
            self.assertEqual(forwards, min(warm_up + 1, len(row) // 2))

    @parameterized.parameters("interleaved", "interleaved_zero_bubble")
    def test_interleaved_refuses(self, name):
        for make in (
            getattr(schedules, name),
            lambda *args: schedules.get(name, *args),
        ):
            with self.assertRaisesRegex(
                ValueError, "`num_stages` .*num_stages=5, 2 devices"
            ):
                make(5, 4, 2)

    @parameterized.product(
        name=("interleaved", "interleaved_zero_bubble"),
        num_devices=(1, 2, 3, 5),
        chunks=(1, 2, 3),
    )
    def test_interleaved_takes_any_number(self, name, num_devices, chunks):
        for num_micro_batches in range(1, 3 * num_devices + 2):
            plan = schedules.get(
                name, chunks * num_devices, num_micro_batches, num_devices
            )
            self.assertEqual(plan.num_micro_batches, num_micro_batches)
            self.assertLen(plan.tasks, num_devices)

    @parameterized.parameters(
        ("1f1b", 4, None, 4),
        ("zero_bubble", 4, 2, 4),
        ("interleaved", 4, None, 4),
        ("interleaved_zero_bubble", 4, 2, 2),
        ("interleaved", 4, 6, 4),
        ("auto", 4, 2, 2),
        ("zb_v", 4, None, 2),
        ("v_half", 6, 5, 3),
    )
    def test_spread(self, name, num_stages, num_devices, expected):
        found = schedules.num_devices_of(name, num_stages, num_devices)
        self.assertEqual(found, expected)

    @parameterized.parameters(
        ("zb_v", 3, None, "two stages on each device.*num_stages=3"),
        ("v_half", 4, 4, "twice the number.*num_stages=4, 4 devices"),
        ("v_min", 1, None, "must be even.*num_stages=1"),
        ("auto", 4, 2, "depends on the costs"),
        ("1F1B", 4, None, r"must be one of \['1f1b'.*'zb_v'.*schedule='1F1B'"),
    )
    def test_get_refuses(self, name, num_stages, num_devices, message):
        with self.assertRaisesRegex(ValueError, message):
            schedules.get(name, num_stages, 4, num_devices)

    def test_devices(self):
        self.assertEqual(schedules.gpipe(3, 2).devices, [0, 1, 2])
        plan = schedules.interleaved(6, 2, num_devices=2)
        self.assertEqual(plan.devices, [0, 1, 0, 1, 0, 1])
        plan = schedules.Schedule([["F1.0", "B1.0"], ["F0.0", "B0.0"]])
        self.assertEqual(plan.devices, [1, 0])

    def test_get_with_devices(self):
        plan = schedules.get("interleaved", 4, 4, num_devices=2)
        self.assertEqual(plan.tasks, schedules.interleaved(4, 4, 2).tasks)
        self.assertEqual(plan.name, "interleaved")
        plan = schedules.get("interleaved", 4, 4)
        self.assertEqual(plan.tasks, schedules.one_f_one_b(4, 4).tasks)
        for name in ("1f1b", "gpipe"):
            plan = schedules.get(name, 4, 4, num_devices=2)
            self.assertEqual(plan.devices, [0, 1, 2, 3])

    @parameterized.parameters(
        ([["F0.0"]], "lacks B0.0"),
        (
            [["F0.0", "F0.99999999999", "B0.0"]],
            r"lacks B0\.1, .*B0\.10, \.\.\.",
        ),
        ([["F99999999999.0", "B0.0"]], r"lacks B1\.0, .*B10\.0, \.\.\."),
        ([["F0.0", "F0.0", "B0.0"]], r"repeats F0\.0\. Every"),
        ([["F0.0", "B0.0", "W0.0", "W0.0"]], "repeats W0.0"),
        ([["F0.0", "B0.0", "R0.0"]], "'R0.0'"),
        ([["F0.0", "W0.0", "B0.0"]], "W0.0 waits for B0.0"),
        ([["F0.0"], ["B0.0"]], "rows 0 and 1"),
        ([["B0.0", "F0.0"]], "B0.0 waits for F0.0"),
        (
            [["F0.0", "B0.0"], ["B1.0", "F1.0"]],
            "B0.0 waits for B1.0; B1.0 waits for F1.0",
        ),
        ([["X0.0"]], "'X0.0'"),
        ([[]], "has no tasks"),
    )
    def test_refuses(self, tasks, message):
        with self.assertRaisesRegex(ValueError, message):
            schedules.Schedule(tasks)

    @parameterized.product(argument=["name", "description"], value=[5, None])
    def test_refuses_what_is_no_string(self, argument, value):
        with self.assertRaisesRegex(TypeError, f"`{argument}` must be a str"):
            schedules.Schedule([["F0.0", "B0.0"]], **{argument: value})

    def test_config_round_trip(self):
        plan = schedules.one_f_one_b(2, 3)
        plan.description = "as on paper"
        copy = schedules.Schedule(**plan.get_config())
        self.assertEqual(copy.tasks, plan.tasks)
        self.assertEqual(copy.title, "1f1b: as on paper")
        self.assertEqual(str(copy), str(plan))


if __name__ == "__main__":
    absltest.main()
