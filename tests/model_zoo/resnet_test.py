import pathlib

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import model_zoo
from model_zoo.resnet import ResidualBlock


class ModelZooTest(parameterized.TestCase):
    def test_names(self):
        self.assertIn("resnet_small", model_zoo.names())
        self.assertEqual(model_zoo.names(), sorted(model_zoo.names()))

    def test_unknown_name(self):
        with self.assertRaisesRegex(ValueError, "resnet_small.*name='resnet'"):
            model_zoo.get("resnet")

    def test_unknown_hyper_parameter(self):
        with self.assertRaisesRegex(TypeError, "num_blocks.*Received: depth"):
            model_zoo.get("resnet_small", depth=3)


class ResNetTest(tf.test.TestCase, parameterized.TestCase):
    def test_default(self):
        layers = model_zoo.get("resnet_small")
        self.assertIsInstance(layers[0], keras.layers.InputLayer)
        model = keras.Sequential(layers)
        self.assertEqual(model.output_shape, (None, 10))
        self.assertEqual(model.count_params(), 170_794)
        trainable = sum(w.shape.num_elements() for w in model.trainable_weights)
        self.assertEqual(trainable, 169_834)

    @parameterized.parameters(1, 2, 5)
    def test_hyper_parameters(self, num_blocks):
        layers = model_zoo.get(
            "resnet_small",
            num_classes=3,
            input_shape=(9, 7, 2),
            num_filters=4,
            num_blocks=num_blocks,
        )
        blocks = [x for x in layers if isinstance(x, ResidualBlock)]
        self.assertLen(blocks, num_blocks)
        outputs = keras.Sequential(layers)(np.ones((2, 9, 7, 2), "float32"))
        self.assertEqual(outputs.shape, (2, 3))

    def test_save(self):
        model = keras.Sequential(
            model_zoo.get("resnet_small", num_filters=4, num_blocks=2)
        )
        path = pathlib.Path(self.get_temp_dir()) / "model.keras"
        x = np.random.default_rng(0).normal(size=(2, 8, 8, 1))
        expected = model(x)
        model.save(path)
        self.assertAllClose(keras.saving.load_model(path)(x), expected)

    @parameterized.parameters(
        {"strides": 1, "channels": 4, "shape": (2, 7, 5, 4)},
        {"strides": 2, "channels": 4, "shape": (2, 4, 3, 4)},
        {"strides": 1, "channels": 3, "shape": (2, 7, 5, 4)},
    )
    def test_block(self, strides, channels, shape):
        block = ResidualBlock(4, strides=strides, momentum=0.5)
        inputs = np.ones((2, 7, 5, channels), "float32")
        self.assertEqual(block.compute_output_shape(inputs.shape), shape)
        self.assertEqual(block(inputs).shape, shape)
        copy = ResidualBlock.from_config(block.get_config())
        self.assertEqual(copy.get_config(), block.get_config())

    def test_identity_shortcut_has_no_weights(self):
        block = ResidualBlock(4)
        block.build((None, 8, 8, 4))
        self.assertLen(block.trainable_weights, 6)
        block = ResidualBlock(4, strides=2)
        block.build((None, 8, 8, 4))
        self.assertLen(block.trainable_weights, 9)

    def test_training_moves_statistics(self):
        block = ResidualBlock(4)
        x = np.random.default_rng(0).normal(1.0, 2.0, size=(8, 4, 4, 4))
        block(x, training=False)
        before = [w.numpy() for w in block.non_trainable_weights]
        block(x, training=False)
        self.assertAllEqual(before[0], block.non_trainable_weights[0].numpy())
        block(x, training=True)
        for old, new in zip(before, block.non_trainable_weights, strict=True):
            self.assertNotAllClose(old, new.numpy())
