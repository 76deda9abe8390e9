"""If there are more micro-batches than rows, each row is a micro-batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe

DEVICES = ["CPU:0", "CPU:1"]
X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")


def layers(normalized=False):
    dense = [
        L.Dense(4, "tanh", kernel_initializer=keras.initializers.HeNormal(i))
        for i in range(3)
    ]
    norm = [L.BatchNormalization()] if normalized else []
    return [keras.Input((4,)), dense[0], *norm, *dense[1:]]


def pipeline(num_micro_batches, normalized=False, **kwargs):
    kwargs = {"num_stages": 2, "devices": DEVICES, **kwargs}
    return compiled(
        tf_gpipe.PipelinedSequential(
            layers(normalized), num_micro_batches=num_micro_batches, **kwargs
        )
    )


def compiled(model):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def fit(model, batch_size, **kwargs):
    return model.fit(
        X, X, batch_size=batch_size, shuffle=False, verbose=0, **kwargs
    )


class ManyMicroBatchesTest(tf.test.TestCase, parameterized.TestCase):
    def assert_same(self, a, b, **tolerance):
        for x, y in zip(a.get_weights(), b.get_weights(), strict=True):
            self.assertAllClose(x, y, **tolerance)

    @parameterized.product(
        number=(4097, 10**6, 10**30), schedule=("1f1b", "gpipe")
    )
    @pytest.mark.slow_after(1)
    def test_as_plain_keras(self, number, schedule):
        plain = compiled(keras.Sequential(layers()))
        model = pipeline(number, schedule=schedule)
        self.assertEqual(model.num_micro_batches, number)
        for each in (plain, model):
            # With a known number of rows, and with two numbers.
            each.train_on_batch(X, X)
            fit(each, 4)
        self.assert_same(plain, model)

    @pytest.mark.slow
    def test_as_one_a_row(self):
        """Batch normalization tells how many micro-batches there are."""
        few, many = (pipeline(x, normalized=True) for x in (10, 10**6))
        for batch_size in (3, 8):
            for each in (few, many):
                fit(each, batch_size)
            self.assert_same(few, many, rtol=0, atol=0)

    @parameterized.product(number=(4, 10**6), rows=(10, 2))
    @pytest.mark.slow_after(2)
    def test_a_batch_after_fewer_rows(self, number, rows):
        """A step traced for few rows is not taken for a batch of more."""
        used, new = (pipeline(number, normalized=True) for _ in range(2))
        for each in (used, new):
            each.compile(keras.optimizers.SGD(0.1), "mse")
        few, some = ((x, x, x[:, 0]) for x in (X[:4], X[:rows]))
        used.fit(*few[:2], sample_weight=few[2], batch_size=3, verbose=0)
        new.set_weights(used.get_weights())
        for each in (used, new):
            each.train_on_batch(*some)
        self.assert_same(used, new, rtol=0, atol=0)

    def test_tasks(self):
        timeline = tf_gpipe.callbacks.Timeline(steps=[1])
        model = pipeline(10**6)
        fit(model, 5, callbacks=[timeline])
        numbers = {task.micro_batch for _, task, *_ in timeline.spans}
        self.assertEqual(numbers, set(range(5)))
        self.assertNotEmpty(timeline.simulated().spans)
        lines = []
        model.summary(print_fn=lines.append)
        self.assertIn("of 1000000 micro-batches", "\n".join(lines))

    def test_rows_that_are_not_known(self):
        batches = tf.data.Dataset.from_tensor_slices((X, X)).batch(4)
        plain = compiled(keras.Sequential(layers()))
        model = pipeline(10**6)
        self.assertAllClose(
            model.evaluate(batches, verbose=0),
            plain.evaluate(batches, verbose=0),
        )
        with self.assertRaisesRegex(
            ValueError, "drop_remainder=True.*Received: num_micro_batches=1000"
        ):
            model.fit(batches, verbose=0)
        known = batches.unbatch().batch(4, drop_remainder=True)
        for each in (plain, model):
            each.fit(known, verbose=0)
        self.assert_same(plain, model)

    def test_interleaved(self):
        arguments = {
            "num_stages": 2,
            "schedule": "interleaved",
            "devices": DEVICES,
        }
        plain = compiled(keras.Sequential(layers()))
        model = pipeline(10**6, **arguments)
        for each in (plain, model):
            each.train_on_batch(X[:5], X[:5])
        self.assert_same(plain, model)

    def test_more_rows_than_can_be_traced(self):
        rows = np.zeros((5000, 4), "float32")
        with self.assertRaisesRegex(ValueError, "must be at most 4096"):
            pipeline(10**6).train_on_batch(rows, rows)

    def test_plan(self):
        few, many = (
            tf_gpipe.plan(
                layers()[1:], (8, 4), num_stages=2, num_micro_batches=number
            )
            for number in (8, 10**6)
        )
        for each in (few, many):
            self.assertEqual(each.num_micro_batches, 8)
        self.assertEqual(few.bubble, many.bubble)

    def test_verify(self):
        report = tf_gpipe.verify(pipeline(10**6), X, X)
        self.assertTrue(report.ok, report)


if __name__ == "__main__":
    tf.test.main()
