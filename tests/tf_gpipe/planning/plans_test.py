"""Plans as text: the verdict first, in at most 80 columns, and short."""

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.planning.plans import Plan
from tf_gpipe.planning.plans import Rival
from tf_gpipe.planning.plans import StagePlan


def stage(k, num_layers=13, sends=2**28, activations=6_000):
    return StagePlan(
        layers=["layer"] * num_layers,
        parameters=655_000_000 * num_layers,
        parameter_bytes=10_000 * 2**20,
        activation_bytes=activations * 2**20,
        flops=9 * 10**12,
        backward_flops=2 * 10**13,
        sends={k + 1: sends},
    )


def plan(stages, devices=None, **kwargs):
    return Plan(
        stages=stages,
        devices=devices or list(range(len(stages))),
        device_activation_bytes=[2**30] * len(stages),
        num_micro_batches=32,
        schedule="1f1b",
        remat="always",
        bubble=0.2,
        relative_step_time=0.01,
        **kwargs,
    )


def cells(text, *columns):
    """Returns columns of the rows of a plan's table."""
    return [
        [line.split("│")[i].strip() for i in columns]
        for line in text.splitlines()
        if line.startswith("│")
    ][2:]


class PlansTest(parameterized.TestCase):
    @parameterized.parameters(([*range(4)],), ([0, 1, 0, 1],), ([*range(128)],))
    def test_80_columns_and_all_digits(self, devices):
        text = str(plan([stage(k) for k in range(len(devices))], devices))
        self.assertLessEqual(max(map(len, text.splitlines())), 80)
        self.assertIn("8,515,000,000", text)
        self.assertNotIn("…", text)

    def test_equal_stages_of_many_are_one_row(self):
        stages = [stage(k) for k in range(128)]
        stages[5] = stage(5, num_layers=14)
        self.assertEqual(
            cells(str(plan(stages)), 1, 2),
            [["0 to 4", "13"], ["5", "14"], ["6 to 127", "13"]],
        )
        few = str(plan(stages[:4]))
        self.assertEqual(few.count("8,515,000,000"), 4)

    def test_stages_that_differ_in_activations_alone_are_one_row(self):
        # As with 1F1B, where stage k keeps K - k micro-batches.
        text = str(plan([stage(k, activations=128 - k) for k in range(128)]))
        self.assertEqual(
            cells(text, 1, 6), [["0 to 127", "1.0 to"], ["", "128.0"]]
        )
        self.assertLessEqual(max(map(len, text.splitlines())), 80)

    @parameterized.parameters(
        (1, None, "1.0% faster, too little for more devices"),
        # Tried, but not the rival.
        (1, 2.0, "1.0% faster by an estimate"),
        (2, None, "1.0% faster by an estimate"),
        (2, 2.0, "1.0% faster by an estimate"),
    )
    def test_a_rival_that_is_faster(self, count, measured, words):
        text = str(
            plan(
                [stage(k) for k in range(count)],
                step_seconds=2.0,
                measured_seconds=measured,
                rivals=[Rival("K=4", 1.98), Rival("K=8", 2.02)],
            )
        )
        self.assertIn(f"next best: K=4, {words}\n", text)
        self.assertIn("then: K=8, 1.0% slower\n", text)

    @parameterized.parameters(
        # Interleaved, and a V.
        ([*range(64), *range(64)],),
        ([*range(64), *reversed(range(64))],),
    )
    def test_the_devices_of_a_row_rise_or_fall(self, devices):
        rows = cells(str(plan([stage(k) for k in range(128)], devices)), 1, 2)
        found = []
        for stages, names in rows:
            first, last = map(int, stages.split(" to "))
            ends = [int(x) for x in names.split(" to ")]
            self.assertEqual(ends, [devices[first], devices[last]])
            own = devices[first : last + 1]
            self.assertIn(own, (sorted(own), sorted(own, reverse=True)))
            found += range(first, last + 1)
        self.assertEqual(found, [*range(128)])
        self.assertLen(rows, 2)

    def test_skips_to_many_stages_are_told_as_one(self):
        stages = [stage(k) for k in range(128)]
        stages[0].sends.update(dict.fromkeys(range(64, 128), 2**20))
        self.assertIn(
            "skips from stage 0 to 64-127 (1.0 MiB each) a micro-batch",
            str(plan(stages)),
        )

    def test_verdict_first(self):
        text = str(
            plan(
                [stage(0), stage(1)],
                device_memory=2**30,
                advice="It would fit with num_stages=4.",
            )
        )
        first, second, *_ = text.splitlines()
        self.assertStartsWith(first, "does not fit: the fullest device needs ")
        self.assertEqual(second, "It would fit with num_stages=4.")


if __name__ == "__main__":
    absltest.main()
