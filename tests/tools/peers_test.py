"""The programs of `tools.peers` train the same model."""

import argparse

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tools.benchmark import peers
from tools.peers import keras_layers
from tools.peers import program


def arguments(workload):
    return argparse.Namespace(workload=workload, batch_size=2)


class ProgramTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*program.WORKLOADS)
    @pytest.mark.slow_after(1)
    def test_weights_are_those_of_the_keras_model(self, workload):
        args = arguments(workload)
        model = keras.Sequential(keras_layers.make(args))
        train = keras_layers.trained(args, model)
        values = [w for _, weights in program.layers(args) for w in weights]
        self.assertLen(values, len(model.trainable_variables))
        for value, variable in zip(
            values, model.trainable_variables, strict=True
        ):
            self.assertEqual(value.size, np.prod(variable.shape))
        x, y = program.data(args)
        expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
            y, model(x, training=True)
        )
        loss, seconds = train(1)
        self.assertAllClose(loss, expected, rtol=1e-4)
        self.assertGreater(seconds, 0)

    @parameterized.parameters(*program.WORKLOADS)
    def test_halves_have_as_many_blocks(self, workload):
        kinds = [
            [kind for kind, _ in half]
            for half in program.halves(arguments(workload))
        ]
        for block in ("attention", "residual"):
            self.assertEqual(kinds[0].count(block), kinds[1].count(block))
        self.assertIn("dense", kinds[1][-1])


class LossesTest(tf.test.TestCase):
    def running(self, *losses):
        return {
            (f"library {i}", ""): argparse.Namespace(ready={"losses": found})
            for i, found in enumerate(losses)
        }

    def test_same(self):
        peers._check_losses(self.running([1.0, 0.5], [1.0001, 0.5001]))

    def test_another_model(self):
        with self.assertRaisesRegex(
            RuntimeError, "library 1 .*0.6.* instead of .*0.5"
        ):
            peers._check_losses(self.running([1.0, 0.5], [1.0, 0.6]))


class BestTest(tf.test.TestCase):
    def rows(self, **figures):
        """Returns rows of samples a second and shares, and seconds of turns."""
        rows = [
            {
                "library": name.partition(" ")[0],
                "schedule": name.partition(" ")[2],
                "samples_per_second": samples,
                "fraction": fraction,
            }
            for name, (samples, fraction) in figures.items()
        ]
        seconds = {
            (row["library"], row["schedule"]): [
                factor / row["samples_per_second"] for factor in (1, 2, 9)
            ]
            for row in rows
        }
        return rows, seconds

    def test_fastest_of_both_sides(self):
        found = peers._best(
            *self.rows(
                **{
                    "tf_gpipe one core": (300.0, None),
                    "tf_gpipe 1f1b": (80.0, 1.1),
                    "tf_gpipe zero_bubble": (90.0, 1.0),
                    "Keras one core": (200.0, None),
                    "torch gpipe": (100.0, 0.8),
                    "Lingvo gpipe": (50.0, 0.88),
                }
            )
        )
        self.assertEqual(found["schedule"], "zero_bubble")
        self.assertEqual(found["other"], "torch, gpipe")
        self.assertAllClose(found["ratio"], 0.9)
        # The largest shares, whichever pipelines have them.
        self.assertAllClose(found["fraction_ratio"], 1.1 / 0.88)

    def test_without_others(self):
        found = peers._best(*self.rows(**{"tf_gpipe 1f1b": (80.0, 1.1)}))
        self.assertEqual(found["schedule"], "1f1b")
        self.assertIsNone(found["ratio"])


if __name__ == "__main__":
    tf.test.main()
