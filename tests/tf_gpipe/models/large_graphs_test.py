"""Models of many layers: in a row, or side by side."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.devices import KIND

# With its two other layers, the model is deeper than Python recurses.
DEEP = 1000
WIDE = 1000
ROWS = 4


def deep(kind):
    """Returns a function that makes a pipeline of many layers in a row."""
    arguments = dict(
        num_stages=2,
        num_micro_batches=2,
        balance=[DEEP // 2, DEEP // 2 + 2],
        devices=[f"{KIND}:0", f"{KIND}:1"],
    )
    layers = [
        keras.layers.Dense(3, name="first"),
        *(keras.layers.Identity() for _ in range(DEEP)),
        keras.layers.Dense(2, name="last"),
    ]
    if kind == "sequential":
        return lambda: tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), *layers], **arguments
        )
    x = inputs = keras.Input((4,))
    for layer in layers:
        x = layer(x)
    return lambda: tf_gpipe.PipelinedModel(inputs, x, **arguments)


class LargeGraphsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("sequential", "functional")
    def test_deeper_than_python_recurses(self, kind):
        make = deep(kind)
        with self.assertRaises(RecursionError) as caught:
            make()
        (note,) = caught.exception.__notes__[:1]
        self.assertIn("sys.setrecursionlimit(100_000)", note)
        self.addCleanup(sys.setrecursionlimit, sys.getrecursionlimit())
        sys.setrecursionlimit(100_000)
        model = make()
        self.assertEqual(
            [len(stage.nodes) for stage in model.stages],
            [DEEP // 2, DEEP // 2 + 2],
        )
        x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
        expected = model.get_layer("last")(model.get_layer("first")(x))
        self.assertAllClose(expected, model.predict(x, verbose=0))

    @pytest.mark.slow
    def test_wide(self):
        def make():
            keras.utils.set_random_seed(0)
            x = inputs = keras.Input((4,))
            x = keras.layers.Dense(3)(x)
            made = [keras.layers.Identity()(x) for _ in range(WIDE)]
            return keras.Model(
                inputs, keras.layers.Dense(1)(keras.layers.Average()(made))
            )

        plain = make()
        model = tf_gpipe.PipelinedModel.from_model(
            make(),
            num_stages=2,
            num_micro_batches=2,
            balance=[WIDE // 2, WIDE // 2 + 3],
            devices=[f"{KIND}:0", f"{KIND}:1"],
        )
        x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
        for each in (plain, model):
            each.compile("sgd", "mse")
            each.train_on_batch(x, x[:, :1])
        for a, b in zip(plain.weights, model.weights, strict=True):
            self.assertAllClose(a, b)


if __name__ == "__main__":
    tf.test.main()
