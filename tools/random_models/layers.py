"""Kinds of layers that Keras lacks, and a loss."""

from typing import Any

import keras
import tensorflow as tf
from keras import layers as L
from keras import ops


class Bottleneck(L.Layer):
    """A layer made of two layers, which may add losses."""

    def __init__(self, units, adds, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.adds = adds
        self.narrow = L.Dense(2, "tanh")
        self.wide = L.Dense(units)

    def build(self, input_shape):
        self.narrow.build(input_shape)
        self.wide.build((*input_shape[:-1], 2))

    def call(self, x):
        x = self.wide(self.narrow(x))
        if self.adds == "one":
            self.add_loss(1e-2 * ops.mean(x * x))
        if self.adds == "one a row":
            axes = tuple(range(1, len(x.shape)))
            self.add_loss(ops.mean(x * x, axis=axes))
        return x

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.wide.units)


class Attention(L.Layer):
    """Self-attention, as a layer with one input."""

    def __init__(self, attention, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention = attention

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, x, mask=None):
        return self.attention(x, x, query_mask=mask)

    def compute_output_shape(self, input_shape):
        return input_shape


class Unchanged(L.Layer):
    """A layer whose output has the shape of its input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def compute_output_shape(self, input_shape):
        return input_shape


class Track(Unchanged):
    """A layer that counts calls and averages inputs in `tf.Variable`s."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.mean = tf.Variable(0.0, trainable=False, dtype=self.variable_dtype)

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x))
        return x


class Positions(Unchanged):
    """A layer that adds a learned embedding of each position."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table: Any = None

    def build(self, input_shape):
        _, length, dim = input_shape
        self.length = length
        self.table = L.Embedding(length, dim)
        self.table.build((None,))

    def call(self, x):
        return x + self.table(ops.arange(self.length))


class Constant(L.Layer):
    """A layer that returns its weight, without a batch axis."""

    def __init__(self, shape, **kwargs):
        super().__init__(**kwargs)
        self.shape = shape

    def build(self, input_shape):
        self.weight = self.add_weight(shape=self.shape, initializer="ones")

    def call(self, x):
        return ops.convert_to_tensor(self.weight)

    def compute_output_spec(self, x):
        return keras.KerasTensor(self.shape, self.compute_dtype)


class ScaledError(keras.losses.Loss):
    """A squared error whose scale is learned."""

    def __init__(self, weights, **kwargs):
        super().__init__(**kwargs)
        # A function, so that Keras finds no weights in the loss.
        self.weights = weights

    def call(self, y_true, y_pred):
        scale = ops.convert_to_tensor(self.weights())
        scale = ops.mean(scale * scale) + 0.1
        error = ops.mean((y_true - y_pred) ** 2, axis=-1)
        return error / scale + ops.log(scale)


def pooled(x: Any) -> Any:
    """Returns one vector per row, averaged over sequences and images."""
    pool = {3: L.GlobalAveragePooling1D, 4: L.GlobalAveragePooling2D}
    rank = len(x.shape)
    return pool[rank]()(x) if rank in pool else x
