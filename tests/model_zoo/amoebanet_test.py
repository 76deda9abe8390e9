import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from model_zoo.amoebanet import AuxiliaryHead
from model_zoo.amoebanet import Classifier
from model_zoo.amoebanet import amoebanet_d
from model_zoo.amoebanet_cells import AmoebaNetCell
from model_zoo.amoebanet_cells import FactorizedReduction

SMALL = {
    "num_layers": 3,
    "num_filters": 8,
    "num_classes": 5,
    "input_shape": (8, 8, 1),
    "num_stem_reductions": 0,
}


def images(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def labels(rows):
    return np.random.default_rng(0).integers(0, 5, rows)


def compiled(model, aux_head=False, **kwargs):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss_weights = None
    if aux_head:
        loss = {"logits": loss, "aux_logits": loss}
        loss_weights = {"logits": 1.0, "aux_logits": 0.4}
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, loss, loss_weights, **kwargs)
    return model


class AmoebaNetTest(tf.test.TestCase, parameterized.TestCase):
    # torchgpipe's counts of the models in the GPipe paper's Table 1.
    @parameterized.parameters(
        (18, 208, 81.5e6),
        (18, 416, 319.0e6),
        (18, 544, 542.7e6),
        (36, 544, 1.06e9),
        (72, 512, 1.84e9),
    )
    @pytest.mark.slow_after(1)
    def test_parameters(self, num_layers, num_filters, expected):
        with keras.StatelessScope(initialize_variables=False):
            model = keras.Sequential(amoebanet_d(num_layers, num_filters))
        count = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
        self.assertAllClose(count, expected, rtol=0.005)

    def test_layers(self):
        layers = amoebanet_d(6, 8)
        self.assertIsInstance(layers[0], keras.layers.InputLayer)
        self.assertIsInstance(layers[-1], Classifier)
        cells = [x for x in layers if isinstance(x, AmoebaNetCell)]
        self.assertEqual(
            [x.reduction for x in cells],
            [True, True, False, False, True, False, False, True, False, False],
        )
        self.assertEqual(
            [x.filters for x in cells], [4, 8, 8, 8, 16, 16, 16, 32, 32, 32]
        )

    @parameterized.parameters(
        ((8, 8, 1), 0),
        ((9, 7, 2), 0),
        ((13, 14, 3), 1),
        ((13, 14, 3), 2),
        ((1, 33, 3), 3),
        ((1, 1, 1), 4),
    )
    @pytest.mark.slow_after(1)
    def test_input_sizes(self, input_shape, num_stem_reductions):
        layers = amoebanet_d(3, 8, 5, input_shape, num_stem_reductions)
        model = keras.Sequential(layers)
        self.assertEqual(model.output_shape, (None, 5))
        height, width, _ = input_shape
        factor = 2 ** (num_stem_reductions + 2)
        # The last group has four times the filters, and normal cells of four
        # outputs.
        self.assertEqual(
            layers[-2].output[0].shape,
            (None, -(-height // factor), -(-width // factor), 4 * 4 * 8),
        )
        outputs = model(images(2, *input_shape))
        self.assertEqual(outputs.shape, (2, 5))
        self.assertAllEqual(np.isfinite(outputs), np.ones((2, 5), bool))

    @pytest.mark.slow
    def test_unknown_size(self):
        fixed = keras.Sequential(amoebanet_d(**SMALL))
        free = keras.Sequential(
            amoebanet_d(**{**SMALL, "input_shape": (None, None, 1)})
        )
        free.set_weights(fixed.get_weights())
        x = images(2, 8, 8, 1)
        self.assertAllClose(fixed(x), free(x))
        self.assertEqual(free(images(2, 9, 5, 1)).shape, (2, 5))

    def test_mixed_precision(self):
        previous = keras.config.dtype_policy()
        self.addCleanup(keras.config.set_dtype_policy, previous)
        keras.config.set_dtype_policy("mixed_bfloat16")
        model = keras.Sequential(amoebanet_d(**SMALL, aux_head=True))
        outputs = model(images(2, 8, 8, 1))
        self.assertEqual([t.dtype for t in model.outputs], ["bfloat16"] * 2)
        self.assertEqual([t.dtype for t in outputs.values()], [tf.bfloat16] * 2)

    # The larger case runs eagerly, which takes less time than tracing.
    @parameterized.parameters(
        {"num_stages": 2, "aux_head": False, "run_eagerly": False},
        {"num_stages": 4, "aux_head": True, "run_eagerly": True},
    )
    # In so small a model the head is the largest layer.
    @pytest.mark.filterwarnings("ignore:Stage 1 of model")
    @pytest.mark.slow
    def test_trains_as_a_pipeline(self, num_stages, aux_head, run_eagerly):
        # So many batch normalisations and max-poolings of so few pixels
        # magnify the rounding of float32.
        previous = keras.config.dtype_policy()
        self.addCleanup(keras.config.set_dtype_policy, previous)
        keras.config.set_dtype_policy("float64")
        x, y = images(8, 8, 8, 1), labels(8)
        if aux_head:
            y = {"logits": y, "aux_logits": y}
        logs = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(0)
            layers = amoebanet_d(**SMALL, aux_head=aux_head)
            model = keras.Sequential(layers)
            if pipelined:
                model = tf_gpipe.PipelinedSequential(
                    layers, num_stages=num_stages, num_micro_batches=1
                )
            compiled(model, aux_head, run_eagerly=run_eagerly or not pipelined)
            logs.append(
                [model.train_on_batch(x, y, return_dict=True) for _ in range(2)]
            )
        self.assertAllClose(*logs, rtol=1e-6)
        self.assertEqual(
            set(logs[0][0]),
            {"loss", "logits_loss", "aux_logits_loss"}
            if aux_head
            else {"loss"},
        )
        self.assertLess(logs[0][-1]["loss"], logs[0][0]["loss"])

    @pytest.mark.slow
    def test_micro_batches(self):
        model = tf_gpipe.PipelinedSequential(
            amoebanet_d(**SMALL), num_stages=3, num_micro_batches=2
        )
        compiled(model, run_eagerly=True)
        x, y = images(8, 8, 8, 1), labels(8)
        losses = [model.train_on_batch(x, y) for _ in range(4)]
        self.assertLess(losses[-1], losses[0])

    def test_drop_path(self):
        layers = amoebanet_d(**SMALL, drop_path=0.5)
        cells = [x for x in layers if isinstance(x, AmoebaNetCell)]
        self.assertAllClose(
            [x.drop_path for x in cells], [0.1, 0.2, 0.3, 0.4, 0.5]
        )
        x = images(64, 4, 4, 8)
        cell = AmoebaNetCell(8, drop_path=0.5)
        self.assertAllClose(cell(x)[0], cell(x)[0])
        # State 3 is state 1, plus an operation that may be left out for a
        # whole image.
        state = cell(x, training=True)[0][..., 8:16]
        dropped = np.all(state == x, axis=(1, 2, 3))
        self.assertBetween(dropped.sum(), 16, 48)
        self.assertFalse(np.any((state == x)[~dropped]))

    def test_dropout(self):
        head = Classifier(5, dropout=0.5)
        x = images(2, 4, 4, 8)
        self.assertAllClose(head((x, x)), head((x, x)))
        self.assertNotAllClose(
            head((x, x), training=True), head((x, x), training=True)
        )

    @pytest.mark.slow
    def test_saving(self):
        model = keras.Sequential(
            amoebanet_d(**SMALL, aux_head=True, drop_path=0.1)
        )
        path = pathlib.Path(self.get_temp_dir(), "model.keras")
        model.save(path)
        x = images(2, 8, 8, 1)
        loaded = keras.saving.load_model(path)
        self.assertAllClose(loaded(x), model(x))

    @parameterized.parameters(
        ("`num_layers`.*num_layers=4", {"num_layers": 4}),
        ("`num_layers`.*num_layers=0", {"num_layers": 0}),
        (
            "multiple of 4 .*num_filters=6",
            {"num_filters": 6, "num_stem_reductions": 3},
        ),
        ("multiple of 1 .*num_filters=0", {"num_filters": 0}),
        ("`num_stem_reductions`.*=-1", {"num_stem_reductions": -1}),
        (r"`input_shape`.*=\(8, 8\)", {"input_shape": (8, 8)}),
    )
    def test_bad_arguments(self, message, arguments):
        with self.assertRaisesRegex(ValueError, message):
            amoebanet_d(**{**SMALL, **arguments})


class CellTest(tf.test.TestCase, parameterized.TestCase):
    def inputs(self, cell):
        size = 10 if cell.reduce_previous else 5
        x, previous = images(2, 5, 5, 12), images(2, size, size, 6, seed=1)
        cell.build((x.shape, previous.shape))
        return x, previous

    def unit(self, x, cell, name, strides=1):
        """Applies ReLU, convolution and an untrained batch normalisation."""
        (kernel,) = (
            w for w in cell.weights if w.path.endswith(f"/{name}_conv/kernel")
        )
        x = tf.nn.conv2d(tf.nn.relu(x), kernel.value, strides, "SAME")
        return x / np.sqrt(1.001)

    def units(self, x, cell, name, number, strides=1):
        for index in range(1, number + 1):
            x = self.unit(
                x, cell, f"{name}_{index}", strides if index == 2 else 1
            )
        return x

    # The wiring of the paper's figure 5, written out.

    def test_normal_cell(self):
        cell = AmoebaNetCell(8)
        x, previous = self.inputs(cell)
        a = self.unit(x, cell, "input")
        b = self.unit(previous, cell, "previous")
        c = self.units(b, cell, "op_1", 1) + tf.nn.max_pool2d(b, 3, 1, "SAME")
        d = b + self.units(a, cell, "op_4", 4)
        e = self.units(a, cell, "op_5", 1) + self.units(a, cell, "op_6", 4)
        f = tf.nn.max_pool2d(c, 3, 1, "SAME") + c
        g = tf.nn.avg_pool2d(b, 3, 1, "SAME") + self.units(f, cell, "op_10", 1)
        outputs, passed_on = cell((x, previous))
        self.assertAllClose(outputs, tf.concat([a, d, e, g], -1), 1e-4, 1e-4)
        self.assertAllEqual(passed_on, x)

    def test_reduction_cell(self):
        cell = AmoebaNetCell(8, reduction=True)
        x, previous = self.inputs(cell)
        a = self.unit(x, cell, "input")
        b = self.unit(previous, cell, "previous")
        c = tf.nn.max_pool2d(a, 2, 2, "SAME") + tf.nn.max_pool2d(
            a, 3, 2, "SAME"
        )
        d = c + self.units(b, cell, "op_4", 3, strides=2)
        e = self.units(c, cell, "op_5", 4) + tf.nn.max_pool2d(c, 3, 1, "SAME")
        f = d + tf.nn.max_pool2d(b, 2, 2, "SAME")
        g = tf.nn.avg_pool2d(c, 3, 1, "SAME") + self.units(d, cell, "op_10", 1)
        outputs, passed_on = cell((x, previous))
        self.assertAllClose(outputs, tf.concat([e, f, g], -1), 1e-4, 1e-4)
        self.assertAllEqual(passed_on, x)

    @parameterized.product(
        reduction=(False, True), reduce_previous=(False, True)
    )
    def test_shapes(self, reduction, reduce_previous):
        cell = AmoebaNetCell(
            8, reduction, reduce_previous, drop_path=0.1, momentum=0.5
        )
        x, previous = self.inputs(cell)
        inputs = (x, previous, images(2, 3))
        shapes = cell.compute_output_shape(tuple(t.shape for t in inputs))
        self.assertEqual(
            shapes,
            ((2, 3, 3, 24) if reduction else (2, 5, 5, 32), x.shape, (2, 3)),
        )
        self.assertEqual(tuple(t.shape for t in cell(inputs)), shapes)
        specs = cell.compute_output_spec(
            tuple(keras.KerasTensor(t.shape) for t in inputs)
        )
        self.assertEqual(tuple(t.shape for t in specs), shapes)
        copy = AmoebaNetCell.from_config(cell.get_config())
        self.assertEqual(copy.get_config(), cell.get_config())

    def test_one_input_is_both(self):
        cell = AmoebaNetCell(8)
        x = images(2, 5, 5, 3)
        outputs = cell(x)
        self.assertAllClose(outputs, cell((x, x)))
        self.assertEqual(
            cell.compute_output_shape(x.shape), ((2, 5, 5, 32), x.shape)
        )

    @parameterized.parameters(False, True)
    def test_inputs_that_do_not_fit(self, reduce_previous):
        cell = AmoebaNetCell(8, reduce_previous=reduce_previous)
        with self.assertRaisesRegex(ValueError, "height and width.*Received"):
            cell((images(1, 4, 4, 8), images(1, 9, 9, 8)))

    @parameterized.parameters(((6, 7), (3, 4)), ((1, 2), (1, 1)))
    def test_factorized_reduction(self, size, expected):
        layer = FactorizedReduction(5, momentum=0.5)
        x = images(2, *size, 3)
        outputs = layer(x).numpy()
        self.assertEqual(outputs.shape, (2, *expected, 5))
        self.assertEqual(layer.compute_output_shape(x.shape), outputs.shape)
        copy = FactorizedReduction.from_config(layer.get_config())
        self.assertEqual(copy.get_config(), layer.get_config())
        # Three channels from the pixels at even places, two from those at odd
        # ones, with zeros beyond the edge.
        padded = np.maximum(np.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0))), 0)
        kernels = [
            w.numpy()[0, 0] for w in layer.weights if w.path.endswith("kernel")
        ]
        self.assertAllClose(
            outputs * np.sqrt(1.001),
            np.concatenate(
                [
                    np.maximum(x, 0)[:, ::2, ::2] @ kernels[0],
                    padded[:, 1::2, 1::2] @ kernels[1],
                ],
                axis=-1,
            ),
            rtol=1e-4,
        )


class AuxiliaryHeadTest(tf.test.TestCase, parameterized.TestCase):
    # A map of 14x14 pixels is that of images of 224x224.
    @parameterized.parameters(((14, 14), (4, 4)), ((4, 7), (1, 1)))
    def test_kernel(self, size, kernel):
        head = AuxiliaryHead(10, momentum=0.5)
        x = images(2, *size, 8)
        outputs = head((x, x))
        self.assertLen(outputs, 3)
        self.assertEqual(outputs[-1].shape, (2, 10))
        self.assertEqual(
            head.compute_output_shape((x.shape, x.shape)),
            (x.shape, x.shape, (2, 10)),
        )
        shapes = [w.shape for w in head.weights if len(w.shape) == 4]
        self.assertEqual(shapes, [(1, 1, 8, 128), (*kernel, 128, 768)])
        copy = AuxiliaryHead.from_config(head.get_config())
        self.assertEqual(copy.get_config(), head.get_config())

    def test_place(self):
        layers = amoebanet_d(**{**SMALL, "num_layers": 6}, aux_head=True)
        (index,) = (
            i for i, x in enumerate(layers) if isinstance(x, AuxiliaryHead)
        )
        self.assertEqual(layers[index - 1].filters, 16)
        self.assertFalse(layers[index - 1].reduction)
        self.assertTrue(layers[index + 1].reduction)

    def test_unknown_size(self):
        layers = amoebanet_d(
            **{**SMALL, "input_shape": (None, 8, 1)}, aux_head=True
        )
        with self.assertRaisesRegex(ValueError, "auxiliary head.*Received"):
            keras.Sequential(layers)


if __name__ == "__main__":
    tf.test.main()
