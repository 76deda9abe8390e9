"""Cross-entropies after a softmax or sigmoid, taken from the logits behind it.

The inputs saturate the softmax or sigmoid: losses from probabilities would
differ.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison

X = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.0]] * 2, "float32")
CLASS = np.array([1, 1, 0, 1] * 2)
FLAGS = np.array([[0.0, 1.0], [1.0, 1.0]] * 4, "float32")
TWO = {"num_stages": 2, "devices": ["CPU:0", "CPU:1"]}


def eye(factor):
    return lambda shape, dtype=None: factor * tf.eye(*shape, dtype=dtype)


def dense(units, factor=8.0, **kwargs):
    return L.Dense(
        units, use_bias=False, kernel_initializer=eye(factor), **kwargs
    )


@keras.saving.register_keras_serializable()
class Endpoint(L.Layer):
    """Adds a cross-entropy of the probabilities that it gets."""

    def call(self, x):
        labels = keras.ops.one_hot(keras.ops.argmin(x, axis=-1), 2)
        made = keras.losses.categorical_crossentropy(labels, x)
        self.add_loss(keras.ops.mean(made))
        return x

    def compute_output_shape(self, shape):
        return shape


def tail(name):
    """Returns the layers that end a model, and a loss."""
    sparse, binary = "sparse_categorical_crossentropy", "binary_crossentropy"
    return {
        "softmax": ([dense(2, activation="softmax")], sparse),
        "sigmoid": ([dense(2, activation="sigmoid")], binary),
        "softmax layer": ([dense(2), L.Softmax()], sparse),
        "activation layer": ([dense(2), L.Activation("sigmoid")], binary),
        # Outputs of other operations than the loss looks for.
        "sigmoid of classes": ([dense(2, activation="sigmoid")], sparse),
        "tf.nn.softmax": ([dense(2), L.Lambda(tf.nn.softmax)], sparse),
        "tf.nn.sigmoid": ([dense(2), L.Lambda(tf.nn.sigmoid)], binary),
        "tf.nn.softmax of flags": ([dense(2), L.Lambda(tf.nn.softmax)], binary),
        "after a softmax": (
            [dense(2, activation="softmax"), L.Lambda(lambda x: x * 1.0)],
            sparse,
        ),
    }[name]


def labels(loss):
    return CLASS if loss == "sparse_categorical_crossentropy" else FLAGS


class LogitsTest(tf.test.TestCase, parameterized.TestCase):
    def assert_trains_alike(self, make, data, loss, **kwargs):
        options = {"metrics": [], **kwargs.pop("options", {})}
        plain = comparison.train(make, data, loss=loss, **options)
        piped = comparison.train(make, data, loss=loss, **options, **kwargs)
        comparison.assert_same(self, plain, piped)
        for rows in (8, 7):
            x = data[0][0]
            self.assertAllClose(
                plain[0].predict(x[:rows], verbose=0),
                piped[0].predict(x[:rows], verbose=0),
            )

    @parameterized.parameters(
        ("softmax", "1f1b"),
        ("softmax", "gpipe"),
        ("sigmoid", "1f1b"),
        ("softmax layer", "gpipe"),
        ("activation layer", "1f1b"),
        ("sigmoid of classes", "gpipe"),
        ("tf.nn.softmax", "1f1b"),
        ("tf.nn.sigmoid", "gpipe"),
        ("tf.nn.softmax of flags", "1f1b"),
        ("after a softmax", "gpipe"),
    )
    @pytest.mark.slow_after(1)
    def test_fit(self, name, schedule):
        def make():
            return [keras.Input((2,)), dense(2), *tail(name)[0]]

        loss = tail(name)[1]
        y = labels(loss)
        self.assert_trains_alike(
            make,
            [(X, y), (X[:7], y[:7])],
            loss,
            options={"metrics": [loss]},
            schedule=schedule,
            num_micro_batches=3,
            **TWO,
        )

    @parameterized.product(
        schedule=("1f1b", "zero_bubble", "eager_1f1b"),
        remat=("always", "never"),
    )
    @pytest.mark.slow_after(1)
    def test_output_of_an_earlier_stage(self, schedule, remat):
        def make():
            inputs = keras.Input((2,))
            first = dense(2, activation="softmax", name="first")(inputs)
            x = dense(2)(dense(2)(first))
            second = dense(2, activation="sigmoid", name="second")(x)
            return keras.Model(inputs, {"first": first, "second": second})

        self.assert_trains_alike(
            make,
            [(X, {"first": CLASS, "second": FLAGS})],
            {
                "first": "sparse_categorical_crossentropy",
                "second": "binary_crossentropy",
            },
            schedule=schedule,
            remat=remat,
            num_micro_batches=4,
            **TWO,
        )

    @parameterized.parameters("1f1b", "gpipe")
    def test_loss_within_a_later_stage(self, schedule):
        def make():
            return [
                keras.Input((2,)),
                dense(2),
                dense(2, activation="softmax"),
                Endpoint(),
                dense(2, 0.1),
            ]

        self.assert_trains_alike(
            make,
            [(X, FLAGS)],
            "mse",
            schedule=schedule,
            balance=[2, 2],
            num_micro_batches=2,
            **TWO,
        )

    @pairwise.product(
        name=("softmax", "activation layer", "tf.nn.softmax"),
        options=({"run_eagerly": True}, {"run_eagerly": False}),
        schedule=("1f1b", "gpipe"),
    )
    @pytest.mark.slow_after(1)
    def test_train_evaluate_eagerly_and_not(self, name, options, schedule):
        found = []
        for kwargs in (None, {"schedule": schedule, **TWO}):
            layers, loss = tail(name)
            layers = [keras.Input((2,)), dense(2), *layers]
            model = keras.Sequential(layers)
            if kwargs:
                model = tf_gpipe.PipelinedSequential(
                    layers, num_micro_batches=4, **kwargs
                )
            optimizer = keras.optimizers.SGD(0.1)
            model.compile(optimizer, loss, metrics=[loss], **options)
            made = [
                model.train_on_batch(X, labels(loss)),
                model.evaluate(X, labels(loss), batch_size=5, verbose=0),
            ]
            found.append([*made, *model.get_weights()])
        self.assertAllClose(*found)

    @parameterized.product(training=(True, False), graph=(True, False))
    def test_as_a_layer(self, training, graph):
        layers = [keras.Input((2,)), dense(2), dense(2, activation="softmax")]
        plain = keras.Sequential(layers)
        piped = tf_gpipe.PipelinedSequential(layers, num_micro_batches=4, **TWO)
        loss = keras.losses.SparseCategoricalCrossentropy()

        def gradients(model):
            with tf.GradientTape() as tape:
                value = loss(CLASS, model(X, training=training))
            return value, tape.gradient(value, model.trainable_variables)

        expected = gradients(plain)
        run = tf.function(gradients) if graph else gradients
        self.assertAllClose(expected, run(piped))
        self.assertGreater(float(expected[0]), 20.0)

    def test_logits_of_an_input(self):
        """A pipeline in a model takes the logits behind what it gets."""
        inputs = keras.Input((2,))
        found = []
        for make in (
            keras.Sequential,
            lambda x: tf_gpipe.PipelinedSequential(
                x, num_micro_batches=2, **TWO
            ),
        ):
            first = dense(2, 30.0, activation="softmax")
            inner = make([keras.Input((2,)), Endpoint(), dense(2, 1.0)])
            model = keras.Model(inputs, inner(first(inputs)))
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(X, FLAGS, epochs=2, batch_size=8, verbose=0)
            found.append(first.kernel.numpy())
        self.assertAllClose(*found)

    @parameterized.parameters("1f1b", "gpipe")
    def test_mixed_precision(self, schedule):
        def make():
            policy = "mixed_bfloat16"
            return [
                keras.Input((2,)),
                dense(2, dtype=policy),
                dense(2, dtype=policy, activation="softmax"),
            ]

        loss = "sparse_categorical_crossentropy"
        plain = comparison.train(make, [(X, CLASS)], loss=loss)
        piped = comparison.train(
            make,
            [(X, CLASS)],
            loss=loss,
            schedule=schedule,
            num_micro_batches=4,
            **TWO,
        )
        comparison.assert_same(self, plain, piped, rtol=1e-2, atol=1e-2)
