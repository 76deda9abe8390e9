"""The memory that a backward pass needs only while it runs."""

import functools
import math

import keras
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.partition import peak_memory

L = keras.layers
# Bytes of one activation of the models below, for a micro-batch.
_UNIT = 4 * 8 * 16 * 16 * 4


def _peak(run, *shapes):
    """Returns the peak of a function's operations, in tensors of 100 floats."""
    graph = (
        tf.function(run, autograph=False)
        .get_concrete_function(*(tf.TensorSpec(x) for x in shapes))
        .graph
    )
    return peak_memory.peak(graph.get_operations(), graph.outputs) / 400


class PassingTest(tf.test.TestCase):
    def test_in_place(self):
        # Each operation overwrites the result of the one before.
        self.assertEqual(_peak(lambda x: tf.tanh(tf.exp(x)), [100]), 1)

    def test_needed_later(self):
        def run(x):
            y = tf.exp(x)
            return tf.tanh(y) * y

        self.assertEqual(_peak(run, [100]), 2)

    def test_not_in_place(self):
        # A product of matrices is made beside its operands.
        self.assertEqual(_peak(lambda x: tf.exp(x) @ x, [10, 10]), 2)

    def test_same_memory(self):
        self.assertEqual(
            _peak(lambda x: tf.reshape(tf.exp(x), [10, 10]) @ x, [10, 10]), 2
        )

    def test_results_stay(self):
        self.assertEqual(_peak(lambda x: (tf.exp(x), tf.tanh(x)), [100]), 2)

    def test_within_functions(self):
        inner = tf.function(
            lambda x: tf.reduce_sum(tf.exp(x) @ x), autograph=False
        )

        def run(x):
            return tf.exp(x), tf.grad_pass_through(inner)(x)

        self.assertBetween(_peak(run, [10, 10]), 3, 3.1)


class PlannedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        # The gradient that arrives, and the one that leaves.
        ("dense", lambda: L.Dense(8, use_bias=False), 2),
        ("convolution", lambda: L.Conv2D(8, 3, padding="same"), 2),
        ("depthwise", lambda: L.DepthwiseConv2D(3, padding="same"), 2),
        # Also the gradients through the mean and the variance.
        ("normalization", L.BatchNormalization, 4),
    )
    def test_layers(self, make, expected):
        found = _activations(lambda x: _small(make()(make()(x))))
        # Also the input of the second layer.
        self.assertAllClose(found, expected + 1, atol=0.2)

    @parameterized.named_parameters(
        # Beside the input of the last layer: outputs, their gradient, and what
        # the loss needs for it.
        ("of_the_loss", lambda x: L.Dense(8)(x), 3),
        # Or in the layer before: the input of the last layer, the four tensors
        # of above, and the gradient of the outputs.
        (
            "after_the_loss",
            lambda x: L.Dense(8)(L.BatchNormalization()(x)),
            1 + 4 + 1,
        ),
    )
    def test_gradient_of_the_outputs(self, call, expected):
        self.assertAllClose(_activations(call), expected, atol=0.1)

    def test_gradient_of_the_outputs_of_a_layer_of_layers(self):
        """The caller of a function that several layers share holds it."""

        class Block(L.Layer):
            def build(self, shape):
                self.first = L.Dense(8, use_bias=False)
                self.second = L.Dense(8, use_bias=False)
                self.first.build(shape)
                self.second.build(shape)

            def call(self, x):
                return self.second(self.first(x))

            def compute_output_shape(self, shape):
                return shape

        def alone(x):
            dense = [L.Dense(8, use_bias=False) for _ in range(4)]
            return _small(functools.reduce(lambda x, f: f(x), dense, x))

        self.assertAllClose(
            _activations(lambda x: _small(Block()(Block()(x)))),
            _activations(alone) + 1,
            atol=0.01,
        )

    def test_gradient_of_a_skip_waits(self):
        def convolution(x):
            return L.Conv2D(8, 3, padding="same", use_bias=False)(x)

        def chain(x):
            for _ in range(3):
                x = convolution(x)
            return x

        def skip(x):
            x = convolution(x)
            return L.Add()([x, convolution(convolution(x))])

        # The sum of both gradients is as large as one of them.
        self.assertAllClose(
            _activations(lambda x: _small(skip(x))),
            _activations(lambda x: _small(chain(x))) + 1,
            atol=0.01,
        )

    def test_each_gradient_of_a_value_waits(self):
        """They are added up when all are there."""

        def skips(x, count):
            x = y = L.Conv2D(8, 3, padding="same", use_bias=False)(x)
            for _ in range(count):
                y = L.Conv2D(8, 3, padding="same", use_bias=False)(y)
                y = L.Add()([x, y])
            return _small(y)

        few, many = (
            _activations(functools.partial(skips, count=n)) for n in (1, 3)
        )
        # Also the input of each convolution.
        self.assertAllClose(many, few + 2 + 2, atol=0.01)


def _small(x):
    """Returns outputs for which the loss needs little memory."""
    return L.GlobalAveragePooling2D()(x)


def _activations(call):
    """Returns how many activations of a micro-batch a stage needs at its peak.

    By its plan, and without the model's inputs and the targets.
    """
    inputs = keras.Input((16, 16, 8))
    outputs = call(inputs)
    plan = tf_gpipe.plan(
        keras.Model(inputs, outputs),
        (8, 16, 16, 8),
        num_stages=1,
        num_micro_batches=2,
        remat="never",
    )
    # One target for each position of the outputs.
    targets = 8 * 4 * math.prod(outputs.shape[1:-1])
    return (plan.stages[0].activation_bytes - targets) / _UNIT - 2
