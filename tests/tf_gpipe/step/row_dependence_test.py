"""Each output has the rows of the mini-batch, or is returned once."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tests import pairwise

X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
Y = np.ones((10, 2), "float32")


class Returns(L.Layer):
    """Returns a function of its inputs and a weight."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 3))

    def call(self, x):
        return self.function(x, self.w)


ONCE = {
    "weight": lambda x, w: w,
    "scalar of weights": lambda x, w: ops.sum(w * w),
    "constant": lambda x, w: ops.convert_to_tensor([1, 2]),
    "flag": lambda x, w: tf.constant(True),
    "names": lambda x, w: tf.constant(["a", "b"]),
    "mean": lambda x, w: ops.mean(x @ w, axis=0),
    "sum": lambda x, w: ops.sum(x @ w),
    "number of rows": lambda x, w: tf.shape(x)[0],
    "sum beyond a margin": lambda x, w: ops.sum(ops.relu(x @ w - 0.5)),
    "pixels beyond": lambda x, w: ops.sum(ops.relu(300.0 * x @ w - 255.0)),
    "number beyond": lambda x, w: ops.sum(ops.cast(x > 600.0, "int32")),
    "columns beyond": lambda x, w: tf.shape(x)[1] - 5,
    "number of columns": lambda x, w: tf.shape(x)[1],
}
ROWS = {
    "bools": lambda x, w: ops.any(x @ w > 0, -1),
    "integers": lambda x, w: ops.argmax(x @ w, -1),
    "strings": lambda x, w: tf.strings.as_string(x[:, 0] > 0),
    "several a row": lambda x, w: ops.reshape(x @ w, (-1,)),
    "repeated": lambda x, w: ops.repeat(x @ w, 3, axis=0),
    "there and back": lambda x, w: ops.split(ops.tile(x @ w, (2, 1)), 2)[1],
}
ACROSS = {
    "similarity": lambda x, w: ops.matmul(x, ops.transpose(x)),
    "rows last": lambda x, w: ops.transpose(x),
    "upper": lambda x, w: ops.matmul(x, ops.transpose(x))[:4, :],
}
# Several rows of one, which are not next to each other.
REORDERED = {
    "two views": lambda x, w: ops.concatenate([x, 2.0 * x]),
    "tiled": lambda x, w: ops.tile(x @ w, (3, 1)),
    "columns first": lambda x, w: ops.reshape(ops.transpose(x @ w), (-1, 1)),
    "words": lambda x, w: tf.tile(tf.strings.as_string(x[:, 0] > 0), [2]),
    "halves": lambda x, w: ops.concatenate(
        ops.split(ops.repeat(x, 2, axis=0)[..., :2], 2, axis=1)
    ),
}
# Neither, and not numbers that have a mean.
LOST = {
    "any": lambda x, w: ops.any(x > 0),
    "argmax": lambda x, w: ops.argmax(ops.mean(x, axis=0)),
    "any beyond": lambda x, w: ops.any(x > 600.0),
    "all within": lambda x, w: ops.all(x < 600.0),
    "never": lambda x, w: ops.sum(ops.cast(x > 1e9, "int32")),
}


def functional(*functions, batch_size=None):
    def make():
        keras.utils.set_random_seed(1)
        x = keras.Input((4,), batch_size=batch_size)
        h = L.Dense(5, "tanh")(x)
        others = [
            Returns(function, name=f"returns_{i}")(h)
            for i, function in enumerate(functions)
        ]
        return keras.Model(x, [L.Dense(2)(h), *others])

    return make


def pipeline(make, **kwargs):
    kwargs = {
        "num_stages": 2,
        "num_micro_batches": 4,
        "devices": ["CPU:0", "CPU:1"],
        **kwargs,
    }
    return tf_gpipe.PipelinedModel.from_model(make(), **kwargs)


def fit(model, loss=None, rows=10, eager=False):
    """Returns the losses of two steps, and the model's outputs after them."""
    count = len(model.outputs) - 1
    model.compile(
        keras.optimizers.SGD(0.05), ["mse", *[loss] * count], run_eagerly=eager
    )
    y = [Y[:rows], *[Y[:rows] if loss else None] * count]
    losses = [model.train_on_batch(X[:rows], y) for _ in range(2)]
    return losses, model.predict_on_batch(X[:rows])


class RowsTest(parameterized.TestCase, tf.test.TestCase):
    def assert_same(self, plain, piped):
        for a, b in zip(plain, piped, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            self.assertEqual(a.shape, b.shape)
            if a.dtype.kind in "OSU":
                self.assertAllEqual(a, b)
            else:
                self.assertAllClose(a, b, rtol=2e-5, atol=2e-6)

    @parameterized.parameters(
        {"schedule": "1f1b"},
        {"schedule": "gpipe", "remat": "never"},
        {"schedule": "zero_bubble", "num_stages": 3},
        {"schedule": "1f1b", "eager": True},
        {"schedule": "gpipe", "rows": 3},
        {"schedule": "1f1b", "rows": 8, "batch_size": 8},
    )
    @pytest.mark.slow_after(1)
    def test_outputs(
        self, rows=10, batch_size=None, eager=False, num_stages=2, **kwargs
    ):
        functions = [*ONCE.values(), *ROWS.values()]
        make = functional(*functions, batch_size=batch_size)
        plain = make()
        piped = pipeline(
            make,
            num_stages=num_stages,
            devices=[f"CPU:{i}" for i in range(num_stages)],
            **kwargs,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*no batch axis")
            expected, received = (
                fit(model, rows=rows, eager=eager) for model in (plain, piped)
            )
        self.assert_same(expected[0], received[0])
        self.assert_same(expected[1], received[1])
        self.assert_same(plain.get_weights(), piped.get_weights())

    @parameterized.parameters("float64", "float16", "bfloat16")
    def test_dtypes(self, dtype):
        def make():
            keras.utils.set_random_seed(1)
            x = keras.Input((4,))
            return keras.Model(
                x,
                [
                    Returns(function, dtype=dtype)(x)
                    for function in (*ONCE.values(), *ROWS.values())
                ],
            )

        plain, piped = make(), pipeline(make)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*no batch axis")
            found = piped(X)
        for a, b in zip(plain(X), found, strict=True):
            a = tf.convert_to_tensor(a)
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
            if a.dtype.is_floating:
                a, b = (tf.cast(x, "float64") for x in (a, b))
                self.assertAllClose(a, b, rtol=2e-2, atol=2e-2)
            else:
                self.assertAllEqual(a, b)

    @parameterized.parameters("float16", "bfloat16")
    def test_operations_in_half_precision(self, dtype):
        """Operations, unlike layers, do not tell a dtype."""

        def make():
            keras.utils.set_random_seed(1)
            x = keras.Input((4,))
            h = L.Dense(5, "sigmoid", dtype=dtype)(x)
            return keras.Model(x, [L.Dense(2)(h), ops.sum(h), ops.max(h, 1)])

        plain, piped = make(), pipeline(make)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*no batch axis")
            found = piped(X)
        for a, b in zip(plain(X), found, strict=True):
            a, b = (tf.cast(x, "float32") for x in (a, b))
            self.assertAllClose(a, b, rtol=2e-2)

    @parameterized.parameters(True, False)
    def test_gradients_of_a_call(self, training):
        make = functional(*(ONCE[x] for x in ("weight", "mean", "sum")))
        plain, piped = make(), pipeline(make)
        found = []
        for model in (plain, piped):
            x = tf.constant(X)
            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = model(x, training=training)
                total = sum(tf.reduce_sum(tf.sin(out)) for out in outputs)
            found.append(tape.gradient(total, [x, *model.trainable_variables]))
        self.assert_same(*found)

    @pytest.mark.slow
    def test_loss_of_the_whole(self):
        # The loss gets the outputs of the whole mini-batch, as in plain Keras.
        def loss(_, y):
            return ops.square(y - 1.0)

        for name in ("weight", "mean"):
            make = functional(ONCE[name])
            expected = fit(make(), loss)
            received = fit(pipeline(make, schedule="gpipe"), loss)
            self.assert_same(expected[0], received[0])
            with self.assertRaisesRegex(
                ValueError, "without a batch axis.*schedule='gpipe'"
            ):
                fit(pipeline(make), loss)

    def test_predict_and_evaluate(self):
        make = functional(ONCE["mean"], ONCE["weight"], ROWS["bools"])
        plain, piped = make(), pipeline(make)
        found = []
        for model in (plain, piped):
            model.compile(loss=["mse", None, None, None])
            found.append(
                (
                    *model.predict(X, batch_size=5, verbose=0),
                    model.evaluate(X, [Y, None, None, None], verbose=0),
                )
            )
        self.assert_same(*found)

    @parameterized.product(name=list(ACROSS), schedule=("1f1b", "gpipe"))
    def test_rows_across_are_refused(self, name, schedule):
        model = pipeline(functional(ACROSS[name]), schedule=schedule)
        with self.assertRaisesRegex(
            ValueError, "'returns_0' .* rows of a batch.*num_micro_batches=1"
        ):
            fit(model)
        with self.assertRaisesRegex(ValueError, "'returns_0'"):
            model.predict(X, verbose=0)

    @pairwise.product(
        name=list(REORDERED),
        batch_size=(None, 8),
        schedule=("1f1b", "gpipe"),
        eager=(False, True),
    )
    @pytest.mark.slow_after(3)
    def test_reordered_rows_are_refused(
        self, name, batch_size, schedule, eager
    ):
        make = functional(REORDERED[name], batch_size=batch_size)
        model = pipeline(make, schedule=schedule)
        message = "'returns_0' .*not next to each other.*num_micro_batches=1"
        with self.assertRaisesRegex(ValueError, message):
            fit(model, rows=batch_size or 10, eager=eager)
        with self.assertRaisesRegex(ValueError, message):
            model.predict(X[:8], batch_size=batch_size, verbose=0)
        with self.assertRaisesRegex(ValueError, message):
            model(X[:8], training=True)

    @parameterized.parameters(True, False)
    def test_reordered_rows_that_layers_go_on_with(self, returned):
        """As of an encoder of two views, whose results may be parted again."""

        def make():
            keras.utils.set_random_seed(1)
            x = keras.Input((4,))
            h = ops.concatenate([x, L.Dense(4)(x)], axis=0)
            inner = keras.Sequential(
                [keras.Input((4,)), L.Dense(3), L.LayerNormalization()]
            )
            h = L.Dense(3, name="last")(inner(h) + 1.0)
            return keras.Model(x, h if returned else ops.split(h, 2))

        plain, piped = make(), pipeline(make)
        if returned:
            with self.assertRaisesRegex(ValueError, "'last' .*not next"):
                piped.predict(X, verbose=0)
            return
        found = [m.predict(X, batch_size=4, verbose=0) for m in (plain, piped)]
        self.assert_same(*found)

    def test_first_layer_across_is_named(self):
        layers = [
            keras.Input((4,)),
            L.Dense(3, name="before"),
            L.Lambda(
                lambda x: ops.matmul(x, ops.transpose(x)), name="compares"
            ),
            L.ReLU(name="after"),
        ]
        model = tf_gpipe.PipelinedSequential(
            layers, num_stages=2, num_micro_batches=2, devices=["CPU:0"] * 2
        )
        with self.assertRaisesRegex(ValueError, "'after' .*'compares'"):
            model.predict(X, verbose=0)

    @parameterized.parameters(*ACROSS, *REORDERED, *LOST)
    def test_one_micro_batch_is_exact(self, name):
        make = functional({**ACROSS, **REORDERED, **LOST}[name])
        expected = fit(make())
        received = fit(pipeline(make, num_micro_batches=1))
        for a, b in zip(expected, received, strict=True):
            self.assert_same(a, b)

    @parameterized.parameters(*LOST)
    def test_what_cannot_be_put_together_is_refused(self, name):
        with self.assertRaisesRegex(ValueError, "'returns_0' .*no batch axis"):
            fit(pipeline(functional(LOST[name])))

    def test_spread_over_rows_warns(self):
        make = functional(lambda x, w: ops.std(x))
        with self.assertWarnsRegex(UserWarning, "'returns_0' .*no batch axis"):
            _, (_, found) = fit(pipeline(make))
        self.assertEqual(found.shape, ())

    @parameterized.parameters(
        (ops.transpose, True),
        (lambda x: ops.reshape(x, (5, -1)), False),
        (lambda x: ops.cumsum(ops.transpose(x), axis=1), False),
    )
    def test_mean_over_rows_across(self, across, exact):
        """A mean of means only if the layer before keeps rows apart."""

        def make():
            keras.utils.set_random_seed(1)
            x = keras.Input((4,))
            h = L.Lambda(across)(L.Dense(5)(x))
            return keras.Model(x, L.Lambda(lambda x: ops.mean(x, axis=1))(h))

        plain, piped = make(), pipeline(make)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = piped(X)
        warned = any("neither a mean" in str(x.message) for x in caught)
        self.assertEqual(warned, not exact)
        self.assertEqual(np.allclose(plain(X), found, rtol=2e-5), exact)

    def test_sequences_of_any_length(self):
        # Their second axis is not known, and does not grow with the rows.
        def make():
            keras.utils.set_random_seed(1)
            x = keras.Input((None, 4))
            return keras.Model(
                x, L.Dense(2)(L.LSTM(3, return_sequences=True)(x))
            )

        x = np.random.default_rng(1).normal(size=(10, 4, 4)).astype("float32")
        expected, received = (
            model.predict(x, verbose=0) for model in (make(), pipeline(make))
        )
        self.assert_same([expected], [received])
