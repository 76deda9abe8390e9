"""Layers whose methods or attributes are `tf.function`s."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests import pairwise
from tests.devices import KIND

L = keras.layers


class Scaled(L.Layer):
    def build(self, shape):
        self.scale = self.add_weight(
            shape=(shape[-1],), initializer="random_normal"
        )


class Method(Scaled):
    @tf.function
    def scaled(self, x):
        return x * self.scale

    def call(self, x):
        return self.scaled(x)


class Call(Scaled):
    @tf.function
    def call(self, x):
        return x * self.scale


class Attribute(Scaled):
    def build(self, shape):
        super().build(shape)
        self.scaled = tf.function(lambda x: x * self.scale, autograph=False)

    def call(self, x):
        return self.scaled(x)


class Branch(Method):
    """AutoGraph converts its Python code."""

    @tf.function
    def scaled(self, x):
        if tf.shape(x)[1] > 2:
            return x * self.scale
        return x


class Counting(Method):
    def build(self, shape):
        super().build(shape)
        self.mean = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    @tf.function
    def scaled(self, x):
        self.mean.assign(0.9 * self.mean + tf.reduce_mean(x))
        return x * self.scale


class WithLayers(Method):
    def build(self, shape):
        super().build(shape)
        self.dense = L.Dense(shape[-1])
        self.dense.build(shape)
        self.dropout = L.Dropout(0.5, seed=1)

    @tf.function
    def scaled(self, x):
        return self.dropout(self.dense(x), training=False) * self.scale


class Frozen(Method):
    def build(self, shape):
        super().build(shape)
        self.trainable = False


_KINDS = (Method, Call, Attribute, Branch, Counting, WithLayers, Frozen)


def _layers(kind):
    return [
        keras.Input((4,)),
        kind(),
        L.Dense(4, "tanh"),
        kind(),
        L.Dense(4),
    ]


def _trained(model):
    """Returns what a model's steps return, its weights, and a call of it."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    found = [model.train_on_batch(x, x) for _ in range(2)]
    found += [model.evaluate(x, x, verbose=0), model.predict(x, verbose=0)]
    found.append(model.train_on_batch(x, x))
    plain = getattr(model, "to_keras", lambda: model)()
    return [*found, *plain.get_weights(), plain(x)]


def with_grouped_convolution():
    """Returns a pipeline whose second stage XLA compiles a part of."""
    return tf_gpipe.PipelinedSequential(
        [
            keras.Input((8, 4)),
            L.Dense(4),
            L.Conv1D(4, 3, groups=2, bias_initializer="ones"),
        ],
        num_stages=2,
        num_micro_batches=2,
        devices=[f"{KIND}:0", f"{KIND}:1"],
    )


class FunctionsOfLayersTest(tf.test.TestCase, parameterized.TestCase):
    @pairwise.product(
        kind=_KINDS, remat=("never", "always"), built=(False, True)
    )
    @pytest.mark.slow_after(4)
    def test_as_plain(self, kind, remat, built):
        plain = keras.Sequential(_layers(kind))
        weights = plain.get_weights()
        expected = _trained(plain)
        layers = _layers(kind)
        options = {
            "num_stages": 2,
            "num_micro_batches": 2,
            "remat": remat,
            "devices": [f"{KIND}:0", f"{KIND}:1"],
        }
        if built:
            model = tf_gpipe.PipelinedModel.from_model(
                keras.Sequential(layers), **options
            )
        else:
            model = tf_gpipe.PipelinedSequential(layers, **options)
        model.set_weights(weights)
        for x, y in zip(_trained(model), expected, strict=True):
            self.assertAllClose(x, y, rtol=1e-5, atol=1e-6)

    @parameterized.product(
        layer=(L.Conv1D, L.Conv2D), method=("predict", "frozen", "fit")
    )
    def test_grouped_convolutions(self, layer, method):
        """TensorFlow has them on a CPU if XLA compiles them, as Keras asks."""
        axes = (8,) if layer is L.Conv1D else (8, 8)
        x = np.random.default_rng(0).normal(size=(5, *axes, 4))
        found = []
        for options in (None, {"num_stages": 2, "num_micro_batches": 2}):
            keras.utils.set_random_seed(1)
            grouped = layer(4, 3, groups=2, bias_initializer="ones")
            grouped.trainable = method != "frozen"
            model = keras.Sequential(
                [
                    keras.Input((*axes, 4)),
                    L.Dense(4),
                    grouped,
                    L.Flatten(),
                    L.Dense(2),
                ]
            )
            if options:
                model = tf_gpipe.PipelinedModel.from_model(
                    model, devices=[f"{KIND}:0", f"{KIND}:1"], **options
                )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            if method != "predict":
                model.train_on_batch(x, x[:, 0].reshape((5, -1))[:, :2])
            found.append(model.predict(x, verbose=0))
        self.assertAllClose(*found, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(
        lambda model, x: model.to_keras().predict(x, verbose=0),
        lambda model, x: keras.Model(model.inputs, model.outputs)(x),
        lambda model, x: functools.reduce(lambda x, f: f(x), model.layers, x),
    )
    def test_grouped_convolutions_out_of_the_pipeline(self, run):
        """XLA takes no weights of another device."""
        x = np.random.default_rng(0).normal(size=(5, 8, 4)).astype("float32")
        model = with_grouped_convolution()
        expected = model.predict(x, verbose=0)
        self.assertAllClose(run(model, x), expected, rtol=1e-5, atol=1e-6)

    def test_grouped_convolutions_are_verified(self):
        model = with_grouped_convolution()
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(4, 8, 4)).astype("float32")
        report = tf_gpipe.verify(model, x, x[:, :6])
        self.assertTrue(report.ok, report)


if __name__ == "__main__":
    tf.test.main()
