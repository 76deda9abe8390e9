"""Models that several benchmarks train, and their data."""

import argparse
import functools
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L

from model_zoo import resnet
from tf_gpipe.stage.function_call import FunctionCall

NUM_CLASSES = 10


@keras.saving.register_keras_serializable(package="benchmark")
class SelfAttention(L.Layer):
    """The first half of a Transformer block: `x + attention(norm(x))`.

    Args:
        num_heads: Integer.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, num_heads=4, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def build(self, input_shape):
        self.norm = L.LayerNormalization(epsilon=1e-5)
        self.attention = L.MultiHeadAttention(
            self.num_heads, input_shape[-1] // self.num_heads
        )
        self.norm.build(input_shape)
        self.attention.build(input_shape, input_shape)

    def call(self, x):
        h = self.norm(x)
        return x + self.attention(h, h)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "num_heads": self.num_heads}


@keras.saving.register_keras_serializable(package="benchmark")
class FeedForward(L.Layer):
    """The second half of a Transformer block: `x + outer(inner(norm(x)))`.

    Args:
        inner_dim: Integer, the width between the two layers.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, inner_dim=1024, **kwargs):
        super().__init__(**kwargs)
        self.inner_dim = inner_dim

    def build(self, input_shape):
        self.norm = L.LayerNormalization(epsilon=1e-5)
        self.inner = L.Dense(self.inner_dim, activation="relu")
        self.outer = L.Dense(input_shape[-1])
        self.norm.build(input_shape)
        self.inner.build(input_shape)
        self.outer.build((*input_shape[:-1], self.inner_dim))

    def call(self, x):
        return x + self.outer(self.inner(self.norm(x)))

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "inner_dim": self.inner_dim}


@keras.saving.register_keras_serializable(package="benchmark")
class ResidualBlock(L.Layer):
    """Two convolutions with batch normalisation, added to the input."""

    def build(self, input_shape):
        filters = input_shape[-1]
        self.body = []
        for _ in range(2):
            self.body += [
                L.Conv2D(filters, 3, padding="same", use_bias=False),
                L.BatchNormalization(momentum=0.9, epsilon=1e-5),
                L.ReLU(),
            ]
        for layer in self.body:
            layer.build(input_shape)

    def call(self, x, training=None):
        h = x
        for layer in self.body:
            if isinstance(layer, L.BatchNormalization):
                h = layer(h, training=training)
            else:
                h = layer(h)
        return x + h

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable(package="benchmark")
class Wait(L.Layer):
    """A simulated layer: it waits instead of computing.

    Args:
        seconds: Float, time of the forward pass per row.
        backward: Float, time of the backward pass per row, half of it for the
            gradients of the weights. Defaults to twice `seconds`.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, seconds, backward=None, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds
        self.backward = 2 * seconds if backward is None else backward

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        # TensorFlow considers waiting a side effect, and would otherwise let
        # stages wait one after another.
        self._after = FunctionCall(_after, stateless=True)

    def call(self, x):
        num_rows = tf.cast(tf.shape(x)[0], tf.float32)

        def back(upstream):
            return self._after(upstream, num_rows * self.backward / 2)

        scale = tf.custom_gradient(lambda scale: (tf.identity(scale), back))

        @tf.custom_gradient
        def wait(x):
            y = self._after(x, num_rows * self.seconds)
            # The gradient uses the output, as most layers' do, so that there
            # is something to recompute; but too little to change the result.
            return y, lambda upstream: back(upstream + 1e-30 * y)

        return wait(x * scale(tf.convert_to_tensor(self.scale)))

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "seconds": self.seconds,
            "backward": self.backward,
        }


@functools.cache
def _lag():
    """Returns by how many seconds a wait overruns on this machine.

    This is a lower bound: the shortest of several measurements.
    """
    wanted, num_waits = 0.01, 10

    @tf.function
    def waits(x):
        for _ in range(num_waits):
            x = _asleep(x, wanted)
        return x

    taken = []
    # Runs at once, even while a function is being traced.
    with tf.init_scope():
        x = tf.zeros((1, 1))
        waits(x)
        for _ in range(10):
            start = time.perf_counter()
            waits(x)
            taken.append(time.perf_counter() - start)
    return max(0.0, min(taken) / num_waits - wanted)


def _after(x, seconds):
    """Returns `x` after this many seconds."""
    return _asleep(x, tf.maximum(seconds - _lag(), 0.0))


def _asleep(x, seconds):
    """Returns `x` after this many seconds and the thread's time to wake up.

    Several that run on a device wait one after another, as a device that
    computes would make them.
    """
    mutex = tf.raw_ops.MutexV2(container="", shared_name="simulated device")
    with tf.control_dependencies([x]):
        lock = tf.raw_ops.MutexLock(mutex=mutex)
    with tf.control_dependencies([lock]):
        slept = _slept(x, seconds)
    with tf.control_dependencies([slept]):
        free = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    with tf.control_dependencies([free]):
        return tf.identity(slept)


def _slept(x, seconds):
    """Returns `x` after this many seconds, beside others on the device."""
    types = {"output_types": [x.dtype], "output_shapes": [x.shape]}
    # TensorFlow can sleep only in its data pipelines. It sleeps twice: before
    # the element, and before the end.
    dataset = tf.raw_ops.SleepDataset(
        input_dataset=tf.raw_ops.TensorDataset(
            components=[x], output_shapes=[x.shape]
        ),
        sleep_microseconds=tf.cast(seconds * 1e6 / 2, tf.int64),
        **types,
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=dataset, **types)[0]


def waiting(num_layers, seconds=0.02):
    """Returns a stack of simulated layers.

    Args:
        num_layers: Integer.
        seconds: Float, time of each layer's forward pass per row.

    Returns:
        List of layers from `(B, 10)` to `(B, 10)`.
    """
    return [
        keras.Input((NUM_CLASSES,)),
        *(Wait(seconds) for _ in range(num_layers)),
    ]


def transformer(num_blocks=8, width=256, length=64):
    """Returns a stack of Transformer blocks.

    Each half of a block is a layer, so that stages may be cut there.

    Args:
        num_blocks: Integer.
        width: Integer, size of the embedding axis.
        length: Integer, positions.

    Returns:
        List of layers from `(B, length, width)` to `(B, length, 10)`.
    """
    return [
        keras.Input((length, width)),
        *(
            half
            for _ in range(num_blocks)
            for half in (SelfAttention(), FeedForward(4 * width))
        ),
        L.Dense(NUM_CLASSES),
    ]


def convolutional(num_blocks=8, filters=32, size=32):
    """Returns a stack of residual convolution blocks.

    Args:
        num_blocks: Integer.
        filters: Integer, channels.
        size: Integer, height and width of the images.

    Returns:
        List of layers from `(B, size, size, 3)` to `(B, 10)`.
    """
    return [
        keras.Input((size, size, 3)),
        L.Conv2D(filters, 3, padding="same", use_bias=False),
        L.BatchNormalization(momentum=0.9, epsilon=1e-5),
        L.ReLU(),
        *(ResidualBlock() for _ in range(num_blocks)),
        L.GlobalAveragePooling2D(),
        L.Dense(NUM_CLASSES),
    ]


def dense(num_blocks=400, width=16):
    """Returns a stack of small equal layers.

    Args:
        num_blocks: Integer.
        width: Integer.

    Returns:
        List of layers from `(B, width)` to `(B, 10)`.
    """
    return [
        keras.Input((width,)),
        *(L.Dense(width, "relu") for _ in range(num_blocks)),
        L.Dense(NUM_CLASSES),
    ]


def resnet50(size=64):
    """Returns the model zoo's ResNet-50 for small images.

    Args:
        size: Integer, height and width of the images.

    Returns:
        List of layers from `(B, size, size, 3)` to `(B, 10)`.
    """
    return resnet.resnet50(NUM_CLASSES, (size, size, 3))


WORKLOADS = {"transformer": transformer, "convolutional": convolutional}


def check_rows(batch_size, num_micro_batches):
    """Checks that a batch has a row for each of so many micro-batches.

    With fewer rows there would be fewer micro-batches than a report says.
    """
    if num_micro_batches > batch_size:
        raise argparse.ArgumentError(
            None,
            f"--batch_size={batch_size} has fewer rows than "
            f"--num_micro_batches={num_micro_batches}",
        )


def data(layers, batch_size):
    """Returns one batch of random inputs and labels for a list of layers."""
    model = keras.Sequential(layers)
    generator = np.random.default_rng(0)
    x = generator.standard_normal(
        (batch_size, *model.input_shape[1:]), dtype="float32"
    )
    labels = generator.integers(
        0, NUM_CLASSES, (batch_size, *model.output_shape[1:-1])
    )
    return x, labels.astype("int32")


def compiled(model, jit_compile=False, steps_per_execution=1):
    """Compiles a model with SGD and cross-entropy, and returns it.

    XLA is off unless asked for: with Keras's own default, "auto", a GPU would
    run plain models with XLA, and pipelines without.
    """
    model.compile(
        keras.optimizers.SGD(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
        steps_per_execution=steps_per_execution,
    )
    return model
