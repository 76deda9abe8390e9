"""Plans as people read them: the verdict first, and no more than a page."""

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.planning.plans import Plan
from tf_gpipe.planning.plans import StagePlan


def stage(k, num_layers=13, sends=2**28):
    return StagePlan(
        layers=["layer"] * num_layers,
        parameters=655_000_000 * num_layers,
        parameter_bytes=10_000 * 2**20,
        activation_bytes=6_000 * 2**20,
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
        rows = [
            [cell.strip() for cell in line.split("│")[1:3]]
            for line in str(plan(stages)).splitlines()
            if line.startswith("│")
        ]
        self.assertEqual(
            rows[-3:], [["0 to 4", "13"], ["5", "14"], ["6 to 127", "13"]]
        )
        few = str(plan(stages[:4]))
        self.assertEqual(few.count("8,515,000,000"), 4)

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
