"""Copies of layers that Keras itself would not load from a file."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_gpipe.planning import layer_copies

L = keras.layers
FACTOR = 3.0


class Own(L.Layer):
    """A layer that is not registered with Keras, with one within it."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = L.Dense(units, activation=tripled)

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x):
        return self.dense(x)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Ones(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return tf.ones(shape, dtype)


class NoConfig(L.Layer):
    """A layer whose arguments Keras cannot serialise."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.function(x) * self.scale


class Other(Own):
    """Another class with a `build` of its own, and lambdas of its own."""

    def __init__(self, units, **kwargs):
        super().__init__(units, **kwargs)
        self.doubled, self.negative = lambda x: x + x, lambda x: -x

    def build(self, input_shape):
        super().build(input_shape)

    def call(self, x):
        return self.negative(self.doubled(super().call(x)))


def tripled(x):
    return FACTOR * x


def nested():
    inputs = keras.Input((4,))
    return keras.Model(inputs, Own(2)(inputs))


def compiled():
    model = nested()
    model.compile("adam", lambda y, x: tf.reduce_mean(tf.square(x - y)))
    return model


def frozen():
    layer = Own(2)
    layer.dense.trainable = False
    return layer


class LayerCopiesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("own", lambda: Own(2)),
        ("nested", nested),
        ("several", lambda: keras.Sequential([Own(2), Other(2), Own(3)])),
        ("compiled", compiled),
        ("frozen", frozen),
        ("wrapped", lambda: L.TimeDistributed(Own(2))),
        ("wrapped compiled", lambda: L.TimeDistributed(compiled())),
        ("function", lambda: L.Dense(2, activation=tripled)),
        ("initializer", lambda: L.Dense(2, kernel_initializer=Ones())),
        ("named function", lambda: L.Lambda(tripled)),
        # What it calls is among its globals.
        ("lambda", lambda: L.Lambda(lambda x: FACTOR * tf.nn.relu(x))),
        ("wrapped lambda", lambda: L.TimeDistributed(L.Lambda(lambda x: -x))),
    )
    def test_it_computes_the_same(self, make):
        layer = make()
        copy = layer_copies.copied(layer)
        self.assertIsNot(copy, layer)
        self.assertIs(type(copy), type(layer))
        self.assertEqual(copy.name, layer.name)
        shape = (2, 3, 4) if isinstance(layer, L.TimeDistributed) else (2, 4)
        x = np.random.default_rng(0).normal(size=shape).astype("float32")
        expected = layer(x)
        copy(x)
        copy.set_weights(layer.get_weights())
        self.assertAllClose(copy(x), expected)
        for own, other in zip(copy.weights, layer.weights, strict=True):
            self.assertIsNot(own, other)
        self.assertEqual(
            len(copy.trainable_weights), len(layer.trainable_weights)
        )

    def test_policy(self):
        old, new = (
            keras.dtype_policies.serialize(keras.DTypePolicy(x))
            for x in ("float32", "mixed_bfloat16")
        )
        copy = layer_copies.copied(
            L.TimeDistributed(L.Dense(2, dtype="float32")), (old, new)
        )
        self.assertEqual(copy.layer.compute_dtype, "bfloat16")

    def test_an_operation_is_not_called(self):
        x = keras.Input((4,))
        operation = keras.ops.relu(x)._keras_history.operation
        before = list(operation._inbound_nodes)
        copy = layer_copies.copied(operation)
        copy(x)
        self.assertEqual(operation._inbound_nodes, before)
        self.assertIs(type(copy), type(operation))

    def test_initial_values_are_not_listed(self):
        """A config with the vectors of all words would take gigabytes."""

        class Vectors(np.ndarray):
            def tolist(self):
                raise AssertionError("listed")

        values = np.ones((9, 2), "float32").view(Vectors)
        layer = L.Embedding(
            9, 2, embeddings_initializer=keras.initializers.Constant(values)
        )
        layer.trainable = False
        copy = layer_copies.copied(layer)
        self.assertEqual(copy(tf.constant([[1, 8]])).shape, (1, 2, 2))
        self.assertFalse(copy.trainable)
        self.assertAllEqual(layer(tf.constant([[1, 8]])), tf.ones((1, 2, 2)))

    def test_no_copy(self):
        with self.assertRaisesRegex(
            layer_copies.NoCopyError,
            "Layer 'mine' .*cannot be copied.*Received",
        ) as caught:
            layer_copies.copied(NoConfig(tripled, name="mine"))
        self.assertLess(len(str(caught.exception)), 600)

    def test_two_of_one_name(self):
        def other(function):
            function.__name__ = "tripled"
            return function

        layer = keras.Sequential(
            [
                L.Dense(2, activation=tripled),
                L.Dense(2, activation=other(lambda x: -x)),
            ]
        )
        # Rather than a copy of another function.
        with self.assertRaises(layer_copies.NoCopyError):
            layer_copies.copied(layer)


if __name__ == "__main__":
    tf.test.main()
