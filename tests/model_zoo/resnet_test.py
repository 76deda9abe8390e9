import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import model_zoo
import tf_gpipe
from model_zoo.resnet import BottleneckBlock
from model_zoo.resnet import ResidualBlock
from model_zoo.resnet import resnet50
from model_zoo.resnet import resnet101


def counterparts(layers, reference):
    """Yields pairs of layers with weights, ours and `keras.applications`'."""
    names = {
        "stem_conv": "conv1_conv",
        "stem_norm": "conv1_bn",
        "logits": "predictions",
    }
    for layer in layers:
        if layer.name in names:
            yield layer, reference.get_layer(names[layer.name])
        elif isinstance(layer, BottleneckBlock):
            for part in (*layer.main_path, *layer.shortcut):
                if part.weights:
                    kind, index = part.name.split("_")
                    kind = {"conv": "conv", "norm": "bn"}[kind]
                    yield (
                        part,
                        reference.get_layer(f"{layer.name}_{index}_{kind}"),
                    )


def perturbed(weight, rng):
    """Returns a weight's values, away from ones and zeros."""
    values = weight.numpy()
    if weight.name != "kernel":
        values += rng.uniform(-0.5, 0.5, values.shape)
    return values


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


class BottleneckTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"strides": 1, "channels": 8, "shape": (2, 7, 5, 8)},
        {"strides": 2, "channels": 8, "shape": (2, 4, 3, 8)},
        {"strides": 1, "channels": 3, "shape": (2, 7, 5, 8)},
    )
    def test_block(self, strides, channels, shape):
        block = BottleneckBlock(2, strides=strides, momentum=0.5)
        inputs = np.ones((2, 7, 5, channels), "float32")
        self.assertEqual(block.compute_output_shape(inputs.shape), shape)
        self.assertEqual(block(inputs).shape, shape)
        copy = BottleneckBlock.from_config(block.get_config())
        self.assertEqual(copy.get_config(), block.get_config())
        has_projection = strides != 1 or channels != 8
        self.assertLen(block.shortcut, 2 if has_projection else 0)

    # A resolution of one pixel is not halved, and has a projection all the
    # same.
    def test_strides_of_one_pixel(self):
        block = BottleneckBlock(2, strides=2)
        self.assertEqual(block(np.ones((1, 1, 1, 8))).shape, (1, 1, 1, 8))
        self.assertLen(block.shortcut, 2)

    def test_normalizations(self):
        layers = resnet50(input_shape=(8, 8, 3), num_filters=1, momentum=0.5)
        model = keras.Sequential(layers)
        norms = [
            x
            for x in model._flatten_layers()
            if isinstance(x, keras.layers.BatchNormalization)
        ]
        self.assertEqual(
            [(x.momentum, x.epsilon) for x in norms], [(0.5, 1.001e-5)] * 53
        )

    @parameterized.parameters(
        (resnet50, keras.applications.ResNet50, 25_636_712, 25_583_592),
        (resnet101, keras.applications.ResNet101, 44_707_176, 44_601_832),
    )
    def test_parameters(self, function, reference, count, trainable):
        with keras.StatelessScope(initialize_variables=False):
            models = keras.Sequential(function()), reference(weights=None)
        for model in models:
            self.assertEqual(model.count_params(), count)
            self.assertEqual(
                sum(int(np.prod(w.shape)) for w in model.trainable_weights),
                trainable,
            )

    @pytest.mark.slow
    def test_equals_keras_applications(self):
        shape = (45, 34, 3)
        reference = keras.applications.ResNet50(
            weights=None, input_shape=shape, classifier_activation=None
        )
        layers = resnet50(input_shape=shape)
        model = keras.Sequential(layers)
        rng = np.random.default_rng(0)
        num_weights = 0
        for ours, theirs in counterparts(layers, reference):
            values = [perturbed(w, rng) for w in theirs.weights]
            theirs.set_weights(values)
            ours.set_weights(values)
            num_weights += len(values)
        self.assertLen(model.weights, num_weights)
        self.assertLen(reference.weights, num_weights)
        x = rng.normal(size=(2, *shape)).astype("float32")
        expected = reference(x)
        self.assertGreater(np.std(expected), 0.01)
        self.assertAllClose(model(x), expected, rtol=1e-4, atol=1e-4)

    @parameterized.product(
        function=[resnet50, resnet101],
        shape=[(32, 32, 3), (5, 9, 1), (None, None, 2)],
    )
    def test_shapes(self, function, shape):
        layers = function(4, shape, num_filters=1)
        self.assertIsInstance(layers[0], keras.layers.InputLayer)
        blocks = [x for x in layers if isinstance(x, BottleneckBlock)]
        self.assertLen(blocks, 16 if function is resnet50 else 33)
        with keras.StatelessScope(initialize_variables=False):
            model = keras.Sequential(layers)
        self.assertEqual(model.output_shape, (None, 4))

    def test_any_size(self):
        model = keras.Sequential(resnet50(4, (None, None, 2), num_filters=1))
        for size in ((1, 1), (33, 18)):
            self.assertEqual(model(np.ones((3, *size, 2))).shape, (3, 4))

    def test_resolutions(self):
        layers = resnet50(4, (64, 32, 3), num_filters=1)
        with keras.StatelessScope(initialize_variables=False):
            keras.Sequential(layers)
        shapes = [x.output.shape[1:] for x in layers if x.name != "image"]
        self.assertEqual(shapes[5], (16, 8, 1))
        self.assertEqual(
            shapes[6:-2],
            [(16, 8, 4)] * 3
            + [(8, 4, 8)] * 4
            + [(4, 2, 16)] * 6
            + [(2, 1, 32)] * 3,
        )

    @pytest.mark.slow
    def test_trains_as_a_pipeline(self):
        # So many normalisations of small batches amplify rounding errors.
        previous = keras.config.dtype_policy()
        self.addCleanup(keras.config.set_dtype_policy, previous)
        keras.config.set_dtype_policy("float64")
        rng = np.random.default_rng(0)
        x = rng.normal(size=(8, 16, 16, 3))
        y = rng.integers(0, 4, 8)
        results = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(0)
            layers = resnet50(4, (16, 16, 3), num_filters=2)
            model = keras.Sequential(layers)
            if pipelined:
                model = tf_gpipe.PipelinedSequential(
                    layers, num_stages=3, num_micro_batches=1
                )
            model.compile(
                keras.optimizers.SGD(0.01),
                keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, dtype="float64"
                ),
                # Tracing the plain model takes longer than its only step.
                run_eagerly=not pipelined,
            )
            before = model.get_weights()
            loss = model.train_on_batch(x, y)
            after = model.get_weights()
            results.append([loss, *after])
        self.assertAllClose(*results, rtol=1e-6, atol=1e-9)
        for old, new in zip(before, after, strict=True):
            self.assertNotAllEqual(old, new)

    def test_saving(self):
        # Up to a block of the second group, which has a projection.
        layers = resnet50(4, (8, 8, 3), num_filters=1)[:11]
        model = keras.Sequential(layers)
        x = np.random.default_rng(0).normal(size=(4, 8, 8, 3))
        model(x, training=True)  # Moves the statistics.
        path = pathlib.Path(self.get_temp_dir(), "model.keras")
        model.save(path)
        self.assertAllClose(keras.saving.load_model(path)(x), model(x))

    @parameterized.parameters(
        {"num_classes": 0}, {"num_filters": 0}, {"input_shape": (8, -8, 3)}
    )
    def test_bad_arguments(self, **arguments):
        ((_, value),) = arguments.items()
        with self.assertRaisesRegex(ValueError, rf"-8|={value}"):
            resnet50(**arguments)
