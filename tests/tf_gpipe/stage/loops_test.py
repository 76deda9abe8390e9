"""Layers that assign variables, or draw numbers, within loops and branches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison

TWO = {"num_stages": 2, "devices": ["CPU:0", "CPU:1"]}
X = np.random.default_rng(0).normal(size=(6, 5, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(6, 2)).astype("float32")


class Cell(L.Layer):
    """A recurrent cell, `change` of whose result is called in each step."""

    def __init__(self, change, **kwargs):
        super().__init__(**kwargs)
        self.state_size = 4
        self.change = change
        self.inner = L.Dense(4)
        self.again = L.Dense(4)

    def build(self, shape):
        self.inner.build(shape)
        self.again.build((shape[0], 4))
        self.change.build((shape[0], 4))

    def call(self, x, states):
        h = ops.tanh(self.inner(x) + self.again(states[0]))
        h = self.change(h)
        return h, [h]


class Noise(L.Layer):
    """Adds noise, drawn from a seed of its own or from Keras's."""

    def __init__(self, scale, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale
        self.seed = seed and keras.random.SeedGenerator(seed)

    def call(self, x):
        noise = keras.random.normal(ops.shape(x), seed=self.seed)
        return x + self.scale * noise


class State(L.Layer):
    """Has states of several dtypes, which do not depend on the samples."""

    def build(self, shape):
        def state(name, dtype):
            return self.add_weight(
                name=name,
                shape=(2,),
                dtype=dtype,
                initializer="zeros",
                trainable=False,
            )

        dtypes = "float32", "float64", "float16", "bfloat16", "complex64"
        self.states = [state(x, x) for x in (*dtypes, "int32", "int64")]
        self.flag = state("flag", "bool")

    def call(self, x):
        first, *others = self.states
        result = x + 0.1 * first[0]
        first.assign(ops.where(self.flag, first * 1.5, first + 0.5))
        for v in others:
            v.assign_add(ops.ones((2,), v.dtype))
        self.flag.assign(ops.logical_not(self.flag))
        return result + 0.01 * ops.cast(self.states[-1][0], "float32")


class InLoop(L.Layer):
    """Calls a layer several times, in one of the ways that Keras has."""

    def __init__(self, how, inner, **kwargs):
        super().__init__(**kwargs)
        self.how = how
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        inner = self.inner
        if self.how == "while":
            _, x = ops.while_loop(
                lambda i, x: i < 3, lambda i, x: (i + 1, inner(x)), (0, x)
            )
        elif self.how == "for":
            x = ops.fori_loop(0, 3, lambda i, x: inner(x), x)
        elif self.how == "map":
            x = ops.map(inner, ops.expand_dims(x, 0))[0]
        elif self.how == "branch":
            x = ops.cond(ops.sum(x) > -1e6, lambda: inner(x), lambda: x)
        elif self.how == "branch of loop":

            def body(i, x):
                x = ops.cond(i > 0, lambda: inner(x), lambda: 2.0 * x)
                return i + 1, x

            _, x = ops.while_loop(lambda i, x: i < 3, body, (0, x))
        return inner(x)

    def compute_output_shape(self, shape):
        return shape


def recurrent(change):
    return lambda: [
        keras.Input((5, 3)),
        L.RNN(Cell(change()), return_sequences=True),
        L.RNN(Cell(change())),
        L.Dense(2),
    ]


def looping(how, change):
    return lambda: [
        keras.Input((5, 3)),
        L.Flatten(),
        L.Dense(4),
        InLoop(how, change()),
        InLoop(how, change()),
        L.Dense(2),
    ]


HOW = "while", "for", "map", "branch", "branch of loop"
CHANGES = {
    "own seed": lambda: Noise(0.3, seed=7),
    "global seed": lambda: Noise(0.3),
    "dropout": lambda: L.Dropout(0.4, seed=3),
    "state": State,
}


class LoopsTest(tf.test.TestCase, parameterized.TestCase):
    def assert_trains_alike(self, make, **kwargs):
        def train(**kwargs):
            return comparison.train(make, [(X, Y)], loss="mse", **kwargs)

        plain, model = train(), train(**TWO, **kwargs)
        comparison.assert_same(self, plain, model)
        found = []
        for each, _ in (plain, model):
            # Without it they would draw from one global seed in turn.
            keras.utils.set_random_seed(2)
            found.append(each.predict(X, verbose=0))
        self.assertAllClose(*found)

    @pairwise.product(
        change=tuple(CHANGES), remat=("always", "never"), schedule=("1f1b",)
    )
    @pytest.mark.slow_after(2)
    def test_recurrent_cells(self, change, remat, schedule):
        """With one micro-batch all numbers are the plain model's."""
        self.assert_trains_alike(
            recurrent(CHANGES[change]),
            num_micro_batches=1,
            remat=remat,
            schedule=schedule,
        )

    @parameterized.product(how=HOW, change=("own seed", "state"))
    @pytest.mark.slow_after(2)
    def test_loops(self, how, change):
        self.assert_trains_alike(
            looping(how, CHANGES[change]), num_micro_batches=1
        )

    @parameterized.product(
        schedule=("gpipe", "zero_bubble", "1f1b"), num_micro_batches=(2, 4)
    )
    @pytest.mark.slow_after(2)
    def test_micro_batches(self, schedule, num_micro_batches):
        for how in ("branch of loop", "recurrent"):
            make = recurrent(State)
            if how != "recurrent":
                make = looping(how, State)
            self.assert_trains_alike(
                make, schedule=schedule, num_micro_batches=num_micro_batches
            )

    @pytest.mark.slow
    def test_numbers_differ(self):
        """Between steps of the loop, and between micro-batches."""
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), InLoop("while", Noise(1.0, 5)), L.Flatten()],
            num_micro_batches=2,
            **TWO,
        )
        found = np.asarray(model(np.zeros((4, 4)), training=True))
        self.assertNotAllClose(found[:2], found[2:])
        single = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), Noise(1.0, 5), L.Flatten()],
            num_micro_batches=2,
            **TWO,
        )
        once = np.asarray(single(np.zeros((4, 4)), training=True))
        self.assertNotAllClose(found[:2], 4.0 * once[:2])

    @pytest.mark.slow
    def test_gradient_of_a_tape(self):
        found = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(1)
            layers = recurrent(CHANGES["own seed"])()
            model = keras.Sequential(layers)
            if pipelined:
                model = tf_gpipe.PipelinedSequential(
                    model, num_micro_batches=1, **TWO
                )
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = ops.mean((model(X, training=True) - Y) ** 2)
                weights = [v.value for v in model.trainable_variables]
                found.append([loss, *tape.gradient(loss, weights)])
        for a, b in zip(found[:2], found[2:], strict=True):
            self.assertAllClose(a, b)

    @pytest.mark.slow
    def test_eagerly(self):
        self.assert_trains_alike(
            looping("branch", CHANGES["own seed"]),
            num_micro_batches=1,
            run_eagerly=True,
        )

    def test_refused_under_xla(self):
        model = tf_gpipe.PipelinedSequential(
            looping("branch", CHANGES["own seed"])(), **TWO
        )
        model.compile("sgd", "mse", jit_compile=True)
        with self.assertRaisesRegex(
            ValueError, "(?s)stage 1.*'.*seed_generator_state' within a loop"
        ):
            model.train_on_batch(X, Y)

    def test_masks_computed_ahead(self):
        """1F1B counts what is not masked before the outputs are there."""

        def make():
            return [
                keras.Input((5, 3)),
                L.Masking(0.0),
                L.RNN(Cell(State()), return_sequences=True),
                L.Dense(2),
            ]

        x = X * (np.arange(5) < 3)[None, :, None]
        y = np.random.default_rng(2).normal(size=(6, 5, 2))

        def train(**kwargs):
            return comparison.train(make, [(x, y)], loss="mse", **kwargs)

        comparison.assert_same(
            self,
            train(),
            train(num_micro_batches=2, schedule="zero_bubble", **TWO),
        )
