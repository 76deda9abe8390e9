"""Bytes of weights that stages own, and of those that they share."""

from absl.testing import absltest
from absl.testing import parameterized
from keras import layers as L  # noqa: N812

import tf_gpipe
from tf_gpipe.partition.parameter_bytes import ParameterBytes
from tf_gpipe.partition.parameter_bytes import WeightBytes

SHARED, OTHER = WeightBytes(10, 3, 20), WeightBytes(1, 1, 2)


class ParameterBytesTest(parameterized.TestCase):
    @parameterized.parameters(
        # The first stage owns the weight; others need a copy, or none.
        ([3], [0], [37]),
        ([1, 2], [0, 1], [33, 4 + 13]),
        ([1, 2], [0, 0], [33, 4 + 3]),
        ([1, 1, 1], [0, 1, 2], [33, 4, 13]),
        ([2, 1], ["a", "b"], [37, 13]),
    )
    def test_of_stages(self, counts, devices, expected):
        found = ParameterBytes([{"x": SHARED}, {"y": OTHER}, {"x": SHARED}])
        self.assertEqual(found.of_stages(counts, devices), expected)

    def test_a_copy_serves_all_stages_of_a_device(self):
        found = ParameterBytes([{"x": SHARED}] * 4)
        self.assertEqual(found.of_stages([1] * 4, [0, 1, 1, 0]), [33, 13, 3, 3])

    @parameterized.parameters(True, False)
    def test_plan_of_a_tied_layer(self, trainable):
        """The last stage, too, holds the matrix and its gradient."""

        def last(tied):
            first = L.Dense(64)
            first.trainable = trainable
            plan = tf_gpipe.plan(
                [
                    first,
                    L.Dense(64),
                    first if tied else L.Dense(64),
                    L.Dense(8),
                ],
                (8, 64),
                num_stages=2,
                balance=[2, 2],
                optimizer="sgd",
            )
            return plan.stages[1].parameter_bytes

        matrix = 4 * (64 * 64 + 64)
        self.assertEqual(last(False) - last(True), 0 if trainable else matrix)

    def test_memory_limit_of_a_model(self):
        """The stage that shares the weight needs more than its owner."""
        plans = {}
        for tied in (True, False):
            first = L.Dense(256)
            layers = [first, first if tied else L.Dense(8), L.Dense(8)]
            with self.assertRaises(ValueError) as caught:
                tf_gpipe.PipelinedSequential(
                    [L.Input((256,)), *layers],
                    num_stages=2,
                    balance=[1, 2],
                    devices=["CPU:0", "CPU:1"],
                    remat="auto",
                    memory_limit=1000,
                    batch_size=8,
                )
            plans[tied] = caught.exception.stages
        self.assertEqual(plans, {True: [1], False: [0]})


if __name__ == "__main__":
    absltest.main()
