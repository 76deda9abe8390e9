"""Costs of traced layers, compared with counts by hand.

A multiplication and an addition are two operations; an elementwise operation is
one operation for each element.
"""

import importlib
from unittest import mock

import keras
import tensorflow as tf
from absl.testing import parameterized

from tests.tf_gpipe.partition.uncountable import Endless
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.stage import model_graph

LAYERS = keras.layers
# Keras chooses between loops and cuDNN by this module's `_is_gpu_available`.
RNN = importlib.import_module("keras.src.backend.tensorflow.rnn")


def build(make, shape):
    """Builds a layer without values for its weights."""
    with keras.StatelessScope(initialize_variables=False):
        layer = make()
        layer.build(shape)
    return layer


class Trained(keras.layers.Layer):
    """After it, all layers have backward passes."""

    def build(self, shape):
        self.scale = self.add_weight(shape=())

    def call(self, x):
        return x * self.scale


def trace(make, shape, dtype="float32"):
    spec = keras.KerasTensor(shape, dtype)
    layers = [build(make, shape)]
    if dtype == "float32":
        layers.insert(0, build(Trained, shape))
    found, _ = layer_costs.trace(model_graph.of_layers(layers, spec))
    return found[-1]


class SelfAttention(keras.layers.Layer):
    def __init__(self, num_heads=4, key_dim=8):
        super().__init__()
        self.attention = LAYERS.MultiHeadAttention(num_heads, key_dim)

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, x):
        return self.attention(x, x)


class Block(keras.layers.Layer):
    """A residual block of several layers, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.norm = LAYERS.LayerNormalization()
        self.dense = LAYERS.Dense(16, activation="relu")
        self.conv = LAYERS.Conv1D(16, 3, padding="same", use_bias=False)

    def build(self, input_shape):
        for layer in (self.norm, self.dense, self.conv):
            layer.build(input_shape)

    def call(self, x):
        return x + self.conv(self.dense(self.dense(self.norm(x))))


class Fails(keras.layers.Layer):
    def call(self, x):
        raise RuntimeError("no such luck")


def dense(units, **kwargs):
    return lambda: LAYERS.Dense(units, **kwargs)


class CountsTestCase(parameterized.TestCase, tf.test.TestCase):
    def assert_count(self, count, expected):
        self.assertAllClose(count, expected, rtol=0.02, atol=0)


class FlopsTest(CountsTestCase):
    @parameterized.named_parameters(
        ("dense", dense(32), (8, 16), 2 * 8 * 16 * 32, 8 * 32),
        ("dense_3d", dense(32), (8, 5, 16), 2 * 40 * 16 * 32, 40 * 32),
        (
            "conv_1d",
            lambda: LAYERS.Conv1D(6, 3, padding="same"),
            (2, 10, 4),
            2 * (2 * 10) * (3 * 4) * 6,
            2 * 10 * 6,
        ),
        (
            "conv_2d",
            lambda: LAYERS.Conv2D(6, (3, 5), strides=2, padding="same"),
            (2, 10, 20, 4),
            2 * (2 * 5 * 10) * (3 * 5 * 4) * 6,
            2 * 5 * 10 * 6,
        ),
        (
            "conv_3d",
            lambda: LAYERS.Conv3D(6, 3),
            (2, 8, 7, 6, 4),
            2 * (2 * 6 * 5 * 4) * (27 * 4) * 6,
            2 * 6 * 5 * 4 * 6,
        ),
        (
            "dilated",
            lambda: LAYERS.Conv2D(6, 3, dilation_rate=2),
            (2, 10, 10, 4),
            2 * (2 * 6 * 6) * (9 * 4) * 6,
            2 * 6 * 6 * 6,
        ),
        (
            "grouped_1d",
            lambda: LAYERS.Conv1D(6, 3, groups=2, padding="same"),
            (2, 10, 4),
            2 * (2 * 10) * (3 * 4 // 2) * 6,
            2 * 10 * 6,
        ),
        (
            "grouped_2d",
            lambda: LAYERS.Conv2D(6, 3, groups=2, padding="same"),
            (2, 10, 10, 4),
            2 * (2 * 100) * (9 * 4 // 2) * 6,
            2 * 100 * 6,
        ),
        (
            "depthwise",
            lambda: LAYERS.DepthwiseConv2D(3, depth_multiplier=2),
            (2, 10, 10, 4),
            2 * (2 * 64) * 9 * (4 * 2),
            2 * 64 * 4 * 2,
        ),
        (
            "depthwise_1d",
            lambda: LAYERS.DepthwiseConv1D(3, padding="same"),
            (2, 10, 4),
            2 * (2 * 10) * 3 * 4,
            2 * 10 * 4,
        ),
        # Each element of the input meets the whole filter.
        (
            "transposed_1d",
            lambda: LAYERS.Conv1DTranspose(6, 3, strides=2, padding="same"),
            (2, 10, 4),
            2 * (2 * 10 * 4) * (3 * 6),
            2 * 20 * 6,
        ),
        (
            "transposed_2d",
            lambda: LAYERS.Conv2DTranspose(6, 3, strides=2, padding="same"),
            (2, 10, 10, 4),
            2 * (2 * 100 * 4) * (9 * 6),
            2 * 400 * 6,
        ),
        (
            "transposed_3d",
            lambda: LAYERS.Conv3DTranspose(6, 3, strides=2, padding="same"),
            (2, 4, 4, 4, 4),
            2 * (2 * 64 * 4) * (27 * 6),
            2 * 512 * 6,
        ),
    )
    def test_products(self, make, shape, products, bias):
        graph = trace(make, shape)
        self.assert_count(graph.forward_flops, products + bias)
        # The gradients by the inputs and by the weights.
        self.assert_count(graph.backward_flops, 2 * products + bias)
        self.assertEqual(graph.output_bytes, 4 * bias)

    def test_attention(self):
        rows, length, width, heads, depth = 2, 10, 32, 4, 8
        graph = trace(SelfAttention, (rows, length, width))
        projections = 4 * 2 * rows * length * width * heads * depth
        products = 2 * 2 * rows * heads * length * length * depth
        biases = 4 * rows * length * width
        scores = rows * heads * length * length
        # Scaled, and five operations of softmax.
        self.assert_count(
            graph.forward_flops, projections + products + biases + 6 * scores
        )
        # Softmax: product, sum, difference, product. Three gradients by the
        # inputs are added; those by the weights are sums over rows.
        self.assert_count(
            graph.backward_flops,
            2 * (projections + products)
            + biases
            + 5 * scores
            + 2 * rows * length * width
            + 4 * rows * width * heads * depth,
        )

    def test_embedding(self):
        graph = trace(lambda: LAYERS.Embedding(100, 16), (2, 10), "int32")
        self.assertEqual(graph.forward_flops, 0)
        self.assertEqual(graph.backward_flops, 0)
        self.assertEqual(graph.output_bytes, 4 * 2 * 10 * 16)

    def test_layer_normalization(self):
        graph = trace(LAYERS.LayerNormalization, (2, 10, 32))
        # Mean; squared difference and its mean; the scale is a product with
        # gamma, and with the inputs, and with the mean; two sums.
        by_element = 1 + 2 + 3 + 2
        # Epsilon, reciprocal root, sign.
        by_row = 3
        self.assert_count(
            graph.forward_flops, 2 * 10 * (32 * by_element + by_row)
        )

    def test_batch_normalization(self):
        graph = trace(LAYERS.BatchNormalization, (8, 5, 5, 16))
        # Mean; squared difference and its mean; a product and a sum.
        by_element = 1 + 2 + 2
        # Epsilon, reciprocal root, gamma; the mean's product and difference
        # from beta; two moving averages of two products and a sum.
        by_channel = 3 + 2 + 2 * 3
        self.assert_count(
            graph.forward_flops, 16 * (8 * 25 * by_element + by_channel)
        )

    def test_composite(self):
        graph = trace(Block, (2, 10, 16))
        size = 2 * 10 * 16
        norm = 2 * 10 * (16 * 8 + 3)
        dense_layer = size * (2 * 16 + 1 + 1)
        conv = size * 2 * 3 * 16
        self.assert_count(
            graph.forward_flops, norm + 2 * dense_layer + conv + size
        )
        self.assertGreater(graph.backward_flops, 2 * (2 * 2 * 16 * size + conv))

    @parameterized.parameters(False, True)
    def test_lstm(self, unroll):
        rows, length, width, units = 2, 10, 8, 16
        graph = trace(
            lambda: LAYERS.LSTM(units, return_sequences=True, unroll=unroll),
            (rows, length, width),
        )
        products = 2 * rows * (width + units) * 4 * units
        cell = rows * units
        # Sum and bias of four gates; their functions; the cell's three
        # products, sum and function.
        step = products + 2 * 4 * cell + 4 * cell + 5 * cell
        self.assert_count(graph.forward_flops, length * step)
        # Bias; five functions; three products with two factors each; the
        # states' gradients and those of the weights are summed over steps.
        weights = (width + units) * 4 * units + 4 * units
        step = 2 * products + (4 + 5 + 6 + 2) * cell + weights
        steps = length * step
        if unroll:
            # The first state is zero and needs no gradient.
            steps -= 2 * rows * units * 4 * units + weights
        self.assert_count(graph.backward_flops, steps)

    @parameterized.parameters(
        (LAYERS.MaxPooling1D, (2, 8, 4)),
        (LAYERS.AveragePooling1D, (2, 8, 4)),
        (LAYERS.MaxPooling2D, (2, 8, 8, 4)),
        (LAYERS.AveragePooling2D, (2, 8, 8, 4)),
        (LAYERS.MaxPooling3D, (2, 8, 8, 8, 4)),
        (LAYERS.AveragePooling3D, (2, 8, 8, 8, 4)),
    )
    def test_pooling_reads_each_element(self, cls, shape):
        graph = trace(lambda: cls(2), shape)
        size = tf.TensorShape(shape).num_elements()
        self.assertEqual(graph.forward_flops, size)
        self.assertEqual(graph.backward_flops, size)

    def test_moves_are_free(self):
        graph = trace(LAYERS.Flatten, (2, 5, 4))
        self.assertEqual((graph.forward_flops, graph.backward_flops), (0, 0))


class StoredTest(CountsTestCase):
    @parameterized.named_parameters(
        ("linear", dense(32), (8, 16), "inputs"),
        ("relu", dense(32, activation="relu"), (8, 16), "inputs outputs"),
        ("flatten", LAYERS.Flatten, (2, 5, 4), ""),
        ("softmax", LAYERS.Softmax, (2, 10), "outputs"),
        ("conv", lambda: LAYERS.Conv2D(6, 3), (2, 9, 9, 4), "inputs"),
        (
            "grouped",
            lambda: LAYERS.Conv2D(6, 3, groups=2),
            (2, 9, 9, 4),
            "inputs",
        ),
    )
    def test_keeps_only(self, make, shape, kept):
        graph = trace(make, shape)
        self.assertEqual(graph.kept_inputs, ("inputs" in kept,))
        self.assertEqual(graph.keeps_outputs, "outputs" in kept)
        self.assertEqual(graph.stored_bytes, 0)

    def test_stores_what_is_between(self):
        graph = trace(Block, (2, 10, 16))
        # The outputs of the norm and of both layers after it, and the norm's
        # scale; a mean, its negative and a reciprocal root a row.
        self.assert_count(graph.stored_bytes, 4 * 20 * (4 * 16 + 3))
        self.assertEqual(graph.kept_inputs, (True,))
        self.assertFalse(graph.keeps_outputs)

    def test_every_step_of_a_loop(self):
        rows, length, width, units = 2, 10, 8, 16
        graph = trace(lambda: LAYERS.LSTM(units), (rows, length, width))
        # Four gates, the cell and its function, and the state before.
        self.assertGreaterEqual(
            graph.stored_bytes, 4 * length * rows * 7 * units
        )


class TraceTest(parameterized.TestCase, tf.test.TestCase):
    def test_one_after_another(self):
        shape = (4, 6, 6, 3)
        with keras.StatelessScope(initialize_variables=False):
            layers = [
                LAYERS.Conv2D(8, 3),
                LAYERS.Flatten(),
                LAYERS.Dense(10),
                LAYERS.Dense(10),
                LAYERS.Dense(10),
            ]
            for layer in layers:
                layer.build(shape)
                shape = layer.compute_output_shape(shape)
        graphs, specs = layer_costs.trace(
            model_graph.of_layers(
                layers, keras.KerasTensor((4, 6, 6, 3), "float32")
            )
        )
        self.assertEqual(
            [spec.shape for spec in list(specs.values())[1:]],
            [(4, 4, 4, 8), (4, 128), (4, 10), (4, 10), (4, 10)],
        )
        products = [2 * 4 * 128 * 10, 2 * 4 * 10 * 10, 2 * 4 * 10 * 10]
        self.assertEqual(
            [graph.forward_flops for graph in graphs[2:]],
            [count + 4 * 10 for count in products],
        )

    @parameterized.parameters(
        dense(32), LAYERS.BatchNormalization, lambda: LAYERS.LSTM(16), Block
    )
    def test_allocates_nothing(self, make):
        shape = (2, 10, 16)
        layer = build(make, shape)
        spec = keras.KerasTensor(shape, "float32")
        layer_costs.trace(model_graph.of_layers([layer], spec))
        self.assertNotEmpty(layer.variables)
        for variable in layer.variables:
            self.assertIsNone(variable._value, variable.path)

    def test_size_in_bytes(self):
        self.assertEqual(
            size_in_bytes(
                {
                    "a": keras.KerasTensor((2, 3), "float16"),
                    "b": [keras.KerasTensor((5,), "int64"), None],
                }
            ),
            2 * 3 * 2 + 5 * 8,
        )

    @parameterized.parameters(
        (Endless, "how often the loop .* is not known"),
        (Fails, "no such luck"),
    )
    def test_unknown_cost(self, cls, cause):
        with self.assertRaisesRegex(
            ValueError,
            rf"layer 'odd' \(of type {cls.__name__}\)(.|\n)*{cause}(.|\n)*"
            r"`cost\(layer, input_shape\)`, or the split as a list",
        ):
            trace(lambda: cls(name="odd"), (2, 10))

    def test_layer_without_config(self):
        class NoConfig(keras.layers.Layer):
            def __init__(self, scale):
                super().__init__()
                self.scale = scale

            def call(self, x):
                return x * self.scale

        graph = trace(lambda: NoConfig(tf.constant(2.0)), (2, 10))
        self.assertEqual(graph.forward_flops, 20)

    @parameterized.product(
        make=(
            lambda: LAYERS.LSTM(32),
            lambda: LAYERS.GRU(32, return_sequences=True),
            lambda: LAYERS.Bidirectional(LAYERS.LSTM(32)),
        )
    )
    def test_recurrent_layers_on_a_gpu(self, make):
        shape = 4, 10, 16
        loop = trace(make, shape)
        with mock.patch.object(RNN, "_is_gpu_available", lambda: True):
            cudnn = trace(make, shape)
        # cuDNN's kernel is one operation.
        self.assertLess(cudnn.forward.operations, loop.forward.operations / 2)
        for name in ("forward_flops", "backward_flops"):
            self.assertAllClose(
                getattr(cudnn, name), getattr(loop, name), rtol=0.2
            )
        # What it keeps is an estimate.
        self.assertBetween(cudnn.stored_bytes / loop.stored_bytes, 0.5, 2)


if __name__ == "__main__":
    tf.test.main()
