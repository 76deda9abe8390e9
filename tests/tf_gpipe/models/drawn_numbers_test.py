"""Layers that draw from `random` or `np.random` as they are traced.

Each call gets the number that it gets in a plain model: a pipeline looks at
layers to cut the model, and that draws none.
"""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tf_gpipe import random_numbers

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = np.ones((12, 2), "float32")


class Scaled(L.Layer):
    """Scales by a random number, a constant of the graph."""

    def __init__(self, draw=random.random, adds_loss=False):
        super().__init__()
        self.draw = draw
        self.adds_loss = adds_loss

    def call(self, x):
        number = self.draw()
        if self.adds_loss:
            self.add_loss(number * keras.ops.mean(keras.ops.square(x)))
        return number * x

    def compute_output_shape(self, shape):
        return shape


def stack(*layers):
    return keras.Sequential([keras.Input((4,)), *layers, L.Dense(2)])


def by_python():
    return stack(L.Dense(4), Scaled(), L.Dense(3), Scaled(), L.Dense(3))


def by_numpy():
    scaled = Scaled(np.random.uniform), Scaled(np.random.normal)
    return stack(L.Dense(4), scaled[0], L.Dense(3), scaled[1])


def in_a_loss():
    return stack(L.Dense(4), Scaled(adds_loss=True), L.Dense(3), Scaled())


def nested():
    return stack(stack(Scaled(), L.Dense(4)), Scaled(np.random.uniform))


def augmented():
    """Keras's own layer, which draws the length of each chain."""
    inputs = keras.Input((4,))
    x = L.Reshape((2, 2, 1))(inputs)
    x = L.AugMix((0, 1), num_chains=2, chain_depth=2, seed=1)(x)
    return keras.Model(inputs, L.Dense(2)(L.Dense(4)(L.Flatten()(x))))


class DrawnNumbersTest(parameterized.TestCase, tf.test.TestCase):
    def trained(self, make, **pipelined):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        model = make()
        if pipelined:
            model = tf_gpipe.PipelinedModel.from_model(model, **pipelined)
        model.compile("sgd", "mse")
        # Else the first step is traced twice in plain Keras, and draws twice.
        model.optimizer.build(model.trainable_variables)
        logs = model.fit(
            *(X, Y),
            batch_size=6,
            epochs=2,
            validation_data=(X, Y),
            shuffle=False,
            verbose=0,
        ).history
        return (
            list(logs.values()),
            [np.array(v) for v in model.variables],
            model.predict(X, verbose=0),
            # A program goes on with the same numbers.
            (random.random(), np.random.uniform()),
        )

    @parameterized.parameters(
        (by_python, {"num_micro_batches": 2}),
        (by_python, {"schedule": "zero_bubble", "remat": "never"}),
        (by_python, {"balance": "time"}),
        (by_numpy, {"schedule": "auto", "num_micro_batches": 2}),
        (by_numpy, {"balance": "memory"}),
        (in_a_loss, {}),
        (nested, {"num_micro_batches": 2}),
        (augmented, {}),
    )
    @pytest.mark.slow_after(1)
    def test_as_plain(self, make, kwargs):
        kwargs = {"num_stages": 2, "num_micro_batches": 1, **kwargs}
        piped = self.trained(make, devices=["CPU:0", "CPU:1"], **kwargs)
        self.assert_same(self.trained(make), piped)

    def test_as_layers_are_looked_at(self):
        """Numbers that other threads draw within `fit` stay drawn."""

        def make(*inputs):
            return tf_gpipe.PipelinedSequential(
                [
                    *inputs,
                    *(L.Dense(2, kernel_initializer="ones") for _ in "ab"),
                ],
                num_stages=2,
                num_micro_batches=2,
                devices=["CPU:0", "CPU:1"],
                balance=lambda *_: random.random() + np.random.uniform(),
            )

        before = random_numbers.states()
        make(keras.Input((4,)))
        self.assertEqual(random_numbers.states(), before)
        model = make()
        model.compile("sgd", "mse")
        model.fit(X, Y, shuffle=False, verbose=0)
        for x, y in zip(random_numbers.states(), before, strict=True):
            self.assertNotEqual(x, y)

    def assert_same(self, one, other):
        for expected, received in zip(one, other, strict=True):
            for x, y in zip(expected, received, strict=True):
                self.assertAllClose(x, y, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    tf.test.main()
