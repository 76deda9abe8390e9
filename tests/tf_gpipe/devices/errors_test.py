"""Errors that a stage's operations raise while a step runs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.tf_gpipe.devices.cluster_test import client
from tf_gpipe.commands import workers

L = keras.layers
MESSAGE = "what is wrong"


def not_finite(x):
    return tf.debugging.assert_all_finite(tf.math.log(-tf.abs(x)), MESSAGE)


def assertion(x):
    tf.debugging.assert_less(tf.reduce_max(x), -9.0, message=MESSAGE)
    return x


def index(x):
    return tf.gather(x, tf.cast(tf.argmax(x, axis=1), tf.int32) * 0 + 99)


def python(x):
    def fail(_):
        raise ValueError(MESSAGE)

    y = tf.numpy_function(fail, [x], x.dtype)
    y.set_shape(x.shape)
    return y


@tf.custom_gradient
def backward(x):
    return tf.identity(x), lambda upstream: tf.debugging.check_numerics(
        upstream / 0.0 * 0.0, MESSAGE
    )


def make(kind, num_stages, place=2, **kwargs):
    layers = [keras.Input((6,)), *(L.Dense(6) for _ in range(4))]
    layers.insert(place, L.Lambda(kind, name="bad"))
    kwargs.setdefault("devices", [f"CPU:{i}" for i in range(num_stages)])
    model = tf_gpipe.PipelinedSequential(
        layers, num_stages=num_stages, num_micro_batches=4, **kwargs
    )
    model.compile("sgd", "mse")
    return model


def failures(model, steps, times=5):
    """Runs each step several times; yields its name and error each time."""
    x = np.random.default_rng(0).standard_normal((16, 6), dtype="float32")
    runs = {
        "fit": lambda: model.fit(x, x, verbose=0),
        "evaluate": lambda: model.evaluate(x, x, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, x),
        "test_on_batch": lambda: model.test_on_batch(x, x),
        "predict_on_batch": lambda: model.predict_on_batch(x),
    }
    for step in steps:
        for _ in range(times):
            try:
                runs[step]()
            except Exception as error:
                yield step, error
            else:
                raise AssertionError(f"{step} has not failed.")


ALL = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)


class StageErrorsTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, model, steps, message=MESSAGE, by="layer 'bad'"):
        for step, error in failures(model, steps):
            with self.subTest(step):
                self.assertIsInstance(error, tf.errors.InvalidArgumentError)
                self.assertIn(message, str(error))
                (note,) = error.__notes__
                self.assertRegex(note, f"^Raised by {by}.* in stage [0-9] on ")

    @parameterized.parameters(
        (not_finite, 2, "1f1b", ALL),
        (not_finite, 4, "zero_bubble", ("fit", "predict")),
        (assertion, 4, "gpipe", ("fit", "evaluate")),
        (assertion, 2, "zero_bubble", ("fit", "predict")),
        (python, 2, "1f1b", ("fit", "predict")),
        (python, 4, "gpipe", ("train_on_batch",)),
    )
    @pytest.mark.slow_after(1)
    def test_told_with_its_place(self, kind, num_stages, schedule, steps):
        self.check(make(kind, num_stages, schedule=schedule), steps)

    @parameterized.parameters("gpipe", "1f1b")
    def test_index(self, schedule):
        model = make(index, 2, schedule=schedule)
        self.check(model, ("fit", "predict"), "indices[0] = 99 is not in")

    @parameterized.parameters(("gpipe", 2), ("1f1b", 4), ("zero_bubble", 2))
    @pytest.mark.slow_after(1)
    def test_in_a_backward_pass(self, schedule, num_stages):
        # In the first stage and in the last.
        for place in (2, 5):
            model = make(backward, num_stages, place, schedule=schedule)
            self.check(model, ("fit",), by="an operation")

    def test_eager(self):
        model = make(not_finite, 2)
        model.compile("sgd", "mse", run_eagerly=True)
        for _, error in failures(model, ALL, times=1):
            self.assertIn(MESSAGE, str(error))
            self.assertIn("layer 'bad'", "\n".join(error.__notes__))
        model = make(backward, 2)
        model.compile("sgd", "mse", run_eagerly=True)
        for _, error in failures(model, ["fit"], times=1):
            self.assertIn("B0.0 of stage 0 on", "\n".join(error.__notes__))

    def test_a_model_goes_on_after_an_error(self):
        model = make(assertion, 2)
        x = np.ones((16, 6), "float32")
        before = [np.array(w) for w in model.get_weights()]
        with self.assertRaises(tf.errors.InvalidArgumentError):
            model.fit(x, x, verbose=0)
        for a, b in zip(before, model.get_weights(), strict=True):
            self.assertAllEqual(a, b)
        for w in model.weights:
            w.assign(tf.zeros_like(w) - 99.0)
        model.fit(x, x, verbose=0)

    @pytest.mark.slow
    def test_over_workers(self):
        with workers.started(2) as processes:
            addresses = [worker.address for worker in processes]
            output, _ = client("failing", addresses).communicate()
        self.assertEqual(output.splitlines()[-1:], ["done"])
