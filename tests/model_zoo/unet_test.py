import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from model_zoo.unet import unet
from tests.tf_gpipe import comparison

SMALL = {
    "num_blocks": 2,
    "num_filters": 4,
    "num_classes": 3,
    "input_shape": (8, 12, 2),
    "depth": 2,
}


def images(shape=(8, 12, 2), rows=4):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, *shape)).astype("float32")


def layers_of(model, kind):
    return [x for x in model.layers if isinstance(x, kind)]


def source(tensor):
    return tensor._keras_history.operation.name


class UNetTest(tf.test.TestCase, parameterized.TestCase):
    # The parameters in torchgpipe's memory benchmark; for (5, 64), whose speed
    # it measures, those of its model's convolutions.
    @parameterized.parameters(
        (5, 64, 232_687_328),
        (6, 72, 362.2e6),
        (11, 128, 2.21e9),
        (24, 160, 7.80e9),
        (48, 160, 15.82e9),
    )
    @pytest.mark.slow_after(1)
    def test_parameters(self, num_blocks, num_filters, expected):
        self.addCleanup(sys.setrecursionlimit, sys.getrecursionlimit())
        sys.setrecursionlimit(10_000)  # For 48 blocks a level.
        with keras.StatelessScope(initialize_variables=False):
            model = unet(num_blocks, num_filters)
        count = sum(int(np.prod(w.shape)) for w in model.weights)
        self.assertAllClose(count, expected, rtol=0.003)

    def test_default(self):
        with keras.StatelessScope(initialize_variables=False):
            model = unet()
        self.assertEqual(model.count_params(), 232_783_713)
        self.assertEqual(model.input_shape, (None, 192, 192, 3))
        self.assertEqual(model.output_shape, (None, 192, 192, 1))
        self.assertEqual(
            [source(x) for x in model.outputs + model.inputs],
            ["logits", "image"],
        )

    @parameterized.parameters(
        {"num_blocks": 1, "depth": 1, "shape": (2, 6, 1), "num_classes": 1},
        {"num_blocks": 1, "depth": 3, "shape": (8, 16, 3), "num_classes": 2},
        {"num_blocks": 3, "depth": 2, "shape": (20, 4, 2), "num_classes": 5},
    )
    def test_shapes(self, num_blocks, depth, shape, num_classes):
        model = unet(num_blocks, 2, num_classes, shape, depth)
        expected = (4, *shape[:2], num_classes)
        self.assertEqual(model.compute_output_shape((4, *shape)), expected)
        self.assertEqual(model(images(shape)).shape, expected)
        convolutions = layers_of(model, keras.layers.Conv2D)
        self.assertLen(convolutions, num_blocks * (2 * depth + 1) + 1)

    def test_any_size(self):
        fixed = unet(**SMALL)
        free = unet(**{**SMALL, "input_shape": (None, None, 2)})
        free.set_weights(fixed.get_weights())
        x = images()
        self.assertAllClose(free(x), fixed(x))
        self.assertEqual(free(images((4, 20, 2))).shape, (4, 4, 20, 3))
        self.assertEqual(
            free.predict(images((16, 8, 2)), verbose=0).shape, (4, 16, 8, 3)
        )
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "must be equal.*4,8,8.*5,8,8"
        ):
            free(images((10, 16, 2)))

    def test_channels(self):
        model = unet(**SMALL)
        channels = [
            x.filters
            for x in model.layers
            if isinstance(x, keras.layers.Conv2D)
        ]
        self.assertEqual(channels, [4, 4, 8, 8, 16, 8, 4, 4, 2, 2, 3])

    def test_skip_connections(self):
        model = unet(**SMALL)
        sources = {
            layer.name: [source(x) for x in layer.input]
            for layer in layers_of(model, keras.layers.Concatenate)
        }
        self.assertEqual(
            sources,
            {
                "decoder_2_skip": ["decoder_2_upsample", "encoder_2_relu_2"],
                "decoder_1_skip": ["decoder_1_upsample", "encoder_1_relu_2"],
            },
        )

    def test_only_keras_layers(self):
        for layer in unet(**SMALL, dropout=0.1).layers:
            self.assertIs(
                type(layer), getattr(keras.layers, type(layer).__name__)
            )

    def test_layers_of_a_block(self):
        model = unet(**SMALL, dropout=0.1)
        convolution, dropout, norm, relu = model.layers[1:5]
        self.assertEqual(convolution.kernel_size, (3, 3))
        self.assertFalse(convolution.use_bias)
        self.assertIsInstance(dropout, keras.layers.SpatialDropout2D)
        self.assertEqual(dropout.rate, 0.1)
        self.assertIsInstance(norm, keras.layers.BatchNormalization)
        self.assertEqual(relu.negative_slope, 0.01)

    def test_momentum(self):
        model = unet(**SMALL, momentum=0.5)
        norms = layers_of(model, keras.layers.BatchNormalization)
        self.assertEqual([x.momentum for x in norms], [0.5] * 10)

    def test_dropout(self):
        model = unet(**SMALL, dropout=0.5)
        x = images()
        self.assertAllClose(model(x), model(x))
        self.assertNotAllClose(model(x, training=True), model(x, training=True))
        model = unet(**SMALL)
        self.assertAllClose(model(x, training=True), model(x, training=True))

    def test_trains(self):
        model = unet(**{**SMALL, "num_blocks": 1})
        x = images()
        # Per pixel, the sign of the first channel and whether it is large.
        y = np.digitize(x[..., 0], [0.0, 1.0])
        model.compile(
            keras.optimizers.Adam(0.02),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        losses = [model.train_on_batch(x, y) for _ in range(12)]
        self.assertLess(losses[-1], 0.8 * losses[0])

    @pytest.mark.slow
    def test_trains_as_a_pipeline(self):
        def make():
            return unet(**{**SMALL, "num_blocks": 1})

        x = images()
        data = [(x, np.digitize(x[..., 0], [0.0, 1.0]))]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        plain = comparison.train(make, data, loss=loss)
        pipelined = comparison.train(
            make, data, loss=loss, num_stages=4, num_micro_batches=1
        )
        comparison.assert_same(self, plain, pipelined, rtol=1e-3, atol=1e-4)

    def test_saving(self):
        model = unet(**SMALL, dropout=0.1)
        x = images()
        model(x, training=True)  # Moves the statistics.
        path = pathlib.Path(self.get_temp_dir(), "model.keras")
        model.save(path)
        self.assertAllClose(keras.saving.load_model(path)(x), model(x))

    @parameterized.parameters(
        {"num_blocks": 0}, {"num_filters": 1}, {"depth": 0}
    )
    def test_too_small(self, **sizes):
        ((name, value),) = sizes.items()
        with self.assertRaisesRegex(
            ValueError, f"must be at least 1.*Received:.* {name}={value}"
        ):
            unet(**{**SMALL, **sizes})

    def test_too_deep_for_python(self):
        sizes = {**SMALL, "num_blocks": 80}
        with (
            keras.StatelessScope(initialize_variables=False),
            self.assertRaisesRegex(
                RecursionError, "sys.setrecursionlimit.*num_blocks=80, depth=2"
            ),
        ):
            unet(**sizes)

    @parameterized.parameters(
        ((8, 10, 2),), ((6, None, 2),), ((8, 8),), ((1, 8, 8, 2),)
    )
    def test_input_shapes_that_do_not_fit(self, input_shape):
        with self.assertRaisesRegex(
            ValueError, r"2\*\*depth = 4 or `None`. Received: input_shape="
        ):
            unet(**{**SMALL, "input_shape": input_shape})


if __name__ == "__main__":
    tf.test.main()
