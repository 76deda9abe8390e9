"""Layers that draw from `random` or `np.random` as they are traced.

Each call gets the number that it gets in a plain model: calls that a pipeline
makes to learn about layers draw none, and no block has another block's.
"""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe

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


class Alike(L.Layer):
    """As `Scaled`, without an attribute that might differ in others."""

    def call(self, x):
        return random.random() * x

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


def equal_blocks():
    """Blocks that are alike, but for the numbers they draw."""
    return stack(
        *(
            layer
            for _ in range(4)
            for layer in (L.Dense(4, "tanh"), L.LayerNormalization(), Alike())
        )
    )


def called_again():
    x = inputs = keras.Input((4,))
    dense, normalize, scaled = (
        L.Dense(4, "tanh"),
        L.UnitNormalization(),
        Scaled(),
    )
    for _ in range(3):
        x = scaled(normalize(dense(x)))
    return keras.Model(inputs, L.Dense(2)(x))


def nested():
    return stack(stack(Scaled(), L.Dense(4)), Scaled(np.random.uniform))


def augmented():
    """Keras's own layer, which draws the length of each chain."""
    inputs = keras.Input((4,))
    x = L.Reshape((2, 2, 1))(inputs)
    x = L.AugMix((0, 1), num_chains=2, chain_depth=2, seed=1)(x)
    return keras.Model(inputs, L.Dense(2)(L.Dense(4)(L.Flatten()(x))))


class DrawnWhileTracedTest(parameterized.TestCase, tf.test.TestCase):
    def trained(self, make, run_eagerly=False, **pipelined):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        model = make()
        if pipelined:
            model = tf_gpipe.PipelinedModel.from_model(model, **pipelined)
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
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
        (equal_blocks, {}),
        (by_python, {"num_micro_batches": 2}),
        (by_python, {"schedule": "zero_bubble", "remat": "never"}),
        (by_python, {"balance": "time"}),
        (by_numpy, {"schedule": "auto", "num_micro_batches": 2}),
        (by_numpy, {"balance": "memory"}),
        (in_a_loss, {}),
        (in_a_loss, {"num_micro_batches": 3}),
        (equal_blocks, {"remat": "never", "num_micro_batches": 2}),
        (called_again, {}),
        (called_again, {"num_stages": 1}),
        (nested, {"num_micro_batches": 2}),
        (augmented, {}),
    )
    @pytest.mark.slow_after(1)
    def test_as_plain(self, make, kwargs):
        kwargs = {"num_stages": 2, "num_micro_batches": 1, **kwargs}
        piped = self.trained(make, devices=["CPU:0", "CPU:1"], **kwargs)
        self.assert_same(self.trained(make), piped)

    @parameterized.parameters(by_python, by_numpy)
    def test_recomputed_eagerly(self, make):
        """A recomputation draws what the forward pass has drawn."""
        self.assert_same(
            *(
                self.trained(
                    make,
                    run_eagerly=True,
                    num_stages=2,
                    num_micro_batches=2,
                    schedule="gpipe",
                    remat=remat,
                )
                for remat in ("never", "always")
            )
        )

    def assert_same(self, one, other):
        for expected, received in zip(one, other, strict=True):
            for x, y in zip(expected, received, strict=True):
                self.assertAllClose(x, y, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    tf.test.main()
