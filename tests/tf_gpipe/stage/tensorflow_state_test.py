"""Layers that keep state in `tf.Variable`s, and layers that merge their own."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe

X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(24, 1)).astype("float32")
OUTSIDE = []


class State(L.Layer):
    """Base of layers with a state, which most of them change in training.

    A change has no influence on the outputs of other micro-batches: all of
    them start from the state before the mini-batch.
    """

    def values(self):
        raise NotImplementedError

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones")


class Counter(State):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.n = tf.Variable(1.0, trainable=False)
        self.calls = tf.Variable(0, trainable=False)
        self.mean = tf.Variable(0.0)

    def call(self, x, training=False):
        y = self.w * x * tf.stop_gradient(self.n)
        if training:
            self.n.assign_add(0.25)
            self.calls.assign(self.calls + 1)
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x))
        return y

    def values(self):
        return [self.n, self.calls, self.mean]


class Within(State):
    """Assigns to variables in lists, dicts and modules, in several ways."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.states = [tf.Variable(tf.zeros(3)), {"b": tf.Variable([1.0, 2.0])}]
        self.module = tf.Module()
        self.module.rows = tf.Variable(tf.zeros((2, 2)))

    def call(self, x, training=False):
        first, second = self.states[0], self.states[1]["b"]
        if training:
            first.scatter_nd_add([[1]], [1.0])
            second[0].assign(tf.reduce_mean(x))
            self.module.rows.scatter_nd_update([[0]], [second.read_value()])
        return self.w * x

    def values(self):
        return [self.states[0], self.states[1]["b"], self.module.rows]


class Added(State):
    """Counts rows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows = tf.Variable(
            0.0, aggregation=tf.VariableAggregation.SUM, trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(tf.cast(tf.shape(x)[0], "float32"))
        return self.w * x

    def values(self):
        return [self.rows]


class Compiled(State):
    """Assigns within a function, a branch and a loop."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.n = tf.Variable(0.0, trainable=False)

    @tf.function
    def count(self, x):
        if tf.reduce_sum(x) < 1e9:
            self.n.assign_add(1.0)
        for _ in tf.range(3):
            self.n.assign_add(0.5)

    def call(self, x, training=False):
        if training:
            self.count(x)
        return self.w * x * tf.stop_gradient(1.0 + 0.0 * self.n)

    def values(self):
        return [self.n]


class Outside(State):
    """Assigns to a variable that is no attribute of a layer."""

    def call(self, x):
        OUTSIDE[0].assign_add(1.0)
        return self.w * x


class Generator(State):
    """Draws from a generator of TensorFlow."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return self.w * x * self.generator.uniform(tf.shape(x), 0.5, 1.5)


class Codebook(State):
    """Keeps moving averages of sums over rows, as a VQ-VAE's codebook does."""

    def build(self, shape):
        super().build(shape)
        self.size = self.add_weight(
            name="size", shape=(), initializer="ones", trainable=False
        )
        self.sums = self.add_weight(
            name="sums", shape=shape[1:], initializer="ones", trainable=False
        )
        self.code = self.add_weight(
            name="code", shape=shape[1:], initializer="ones", trainable=False
        )

    def call(self, x, training=False):
        y = self.w * x + ops.stop_gradient(self.code)
        if training:
            rows = ops.cast(ops.shape(x)[0], "float32")
            self.size.assign(0.9 * self.size + 0.1 * rows)
            self.sums.assign(0.9 * self.sums + 0.1 * ops.sum(x, axis=0))
            self.code.assign(self.sums / (self.size + 0.1))
        return y

    def merge_micro_batches(self, before, after, shares):
        merged = {
            name: 0.9 * before[name]
            + sum(
                ops.where(share > 0, each[name] - 0.9 * before[name], 0.0)
                for each, share in zip(after, shares, strict=True)
            )
            for name in ("size", "sums")
        }
        merged["code"] = merged["sums"] / (merged["size"] + 0.1)
        return merged

    def values(self):
        return [self.size, self.sums, self.code]


class TensorFlowStateTest(tf.test.TestCase, parameterized.TestCase):
    @staticmethod
    @functools.cache
    def plain(make, **kwargs):
        return TensorFlowStateTest.fitted(make, **kwargs)

    @staticmethod
    def fitted(make, batch_size=8, eager=False, layers=1, **kwargs):
        keras.utils.set_random_seed(1)
        states = [make() for _ in range(layers)]
        each = [
            keras.Input((6,)),
            L.Dense(4, "tanh"),
            states[0],
            L.Dense(4),
            *states[1:],
            L.Dense(1),
        ]
        model = keras.Sequential(each)
        if kwargs:
            model = tf_gpipe.PipelinedSequential(
                model, num_stages=2, devices=["CPU:0", "CPU:1"], **kwargs
            )
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eager)
        history = model.fit(
            X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0
        )
        return [
            *history.history["loss"],
            *model.evaluate(X, Y, verbose=0, return_dict=True).values(),
            *model.get_weights(),
            *(np.array(v) for state in states for v in state.values()),
        ]

    @parameterized.parameters(
        *(
            (make, kwargs)
            for make in (Counter, Codebook)
            for kwargs in (
                {},
                {"remat": "never", "schedule": "gpipe"},
                {"schedule": "zero_bubble", "batch_size": 7},
                {"batch_size": 9, "num_micro_batches": 5},
                {"eager": True, "schedule": "gpipe"},
                {"num_micro_batches": 1},
                {"layers": 2},
            )
        ),
        *(
            (make, kwargs)
            for make in (Within, Added, Compiled)
            for kwargs in (
                {},
                {"schedule": "gpipe", "batch_size": 7},
                {"eager": True},
            )
        ),
    )
    @pytest.mark.slow_after(1)
    def test_as_in_the_plain_model(self, make, kwargs):
        if make is Compiled and kwargs.get("eager"):
            kwargs = {**kwargs, "eager": False}
        same = {
            k: v for k, v in kwargs.items() if k in ("batch_size", "layers")
        }
        piped = self.fitted(make, **{"num_micro_batches": 4, **kwargs})
        self.assertAllClose(
            self.plain(make, **same), piped, rtol=1e-5, atol=1e-5
        )

    def test_others_are_refused_by_name(self):
        OUTSIDE[:] = [tf.Variable(0.0)]
        with self.assertRaisesRegex(ValueError, "'outside' assigns to a"):
            self.fitted(Outside, num_micro_batches=2)

    @parameterized.parameters("always", "never")
    def test_generator(self, remat):
        """A recomputation draws the numbers of the first run again."""
        inputs = keras.Input((6,))
        state = Generator()
        model = keras.Model(inputs, L.Dense(1)(state(L.Dense(4)(inputs))))
        model = tf_gpipe.PipelinedModel.from_model(
            model,
            num_stages=2,
            num_micro_batches=2,
            schedule="gpipe",
            remat=remat,
            balance=[2, 1],
            devices=["CPU:0", "CPU:1"],
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
        # The outputs are linear in `w`: its gradient shows the numbers.
        _, gradients, outputs = model.loss_and_gradients(X, Y)
        del gradients, outputs
        run = tf.function(lambda: model.loss_and_gradients(X, Y))
        _, gradients, outputs = run()
        names = [v.path for v in model.trainable_variables]
        by_w = gradients[names.index(state.w.path)]
        kernel, bias = model.layers[-1].get_weights()
        del kernel
        expected = np.mean(2 * (outputs - Y) * (outputs - bias)) / state.w
        self.assertAllClose(by_w, expected, rtol=1e-4)
