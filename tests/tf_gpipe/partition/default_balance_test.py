"""The default of `balance`: which costs it makes equal."""

import os

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests.tf_gpipe.partition.uncountable import Endless
from tf_gpipe.partition import layer_costs
from tf_gpipe.stage import model_graph


class Fails(L.Layer):
    """Cannot be traced in training mode: it needs values."""

    def call(self, x, training=False):
        if training:
            x.numpy()
        return x


def images():
    """Layers with the work at one end, and the parameters at the other."""
    return [
        keras.Input((16, 16, 3)),
        *(L.Conv2D(8, 3, padding="same") for _ in range(4)),
        L.Flatten(),
        L.Dense(8),
        L.Dense(8),
    ]


def dense(*others):
    layers = [L.Dense(4), L.Dense(4), L.Dense(400), L.Dense(4)]
    return [keras.Input((4,)), *layers, *others]


def pipelined(layers, num_stages=2, **kwargs):
    kwargs["devices"] = ["CPU:0"] * num_stages
    return tf_gpipe.PipelinedSequential(layers, num_stages=num_stages, **kwargs)


class DefaultBalanceTest(tf.test.TestCase, parameterized.TestCase):
    def test_work(self):
        found = pipelined(images()).balance
        self.assertEqual(found, pipelined(images(), balance="flops").balance)
        other = pipelined(images(), balance="parameters").balance
        self.assertNotEqual(found, other)

    def test_plan(self):
        found = tf_gpipe.plan(images()[1:], (4, 16, 16, 3), num_stages=2)
        self.assertEqual(
            [len(x.layers) for x in found.stages], pipelined(images()).balance
        )

    @parameterized.parameters(Endless, Fails)
    def test_operations_that_cannot_be_counted(self, other):
        layers = dense(other())
        self.assertEqual(
            pipelined(layers).balance,
            pipelined(dense(other()), balance="parameters").balance,
        )
        with self.assertRaisesRegex(ValueError, "cannot be found"):
            pipelined(dense(other()), balance="flops")

    def test_layers_without_operations(self):
        inputs = keras.Input((4,), dtype="int32")
        outputs = L.Flatten()(L.Embedding(10, 4)(inputs))
        more = L.Flatten()(L.Embedding(300, 4)(inputs))
        model = keras.Model(inputs, [outputs, more])
        found = tf_gpipe.PipelinedModel.from_model(
            model, num_stages=2, devices=["CPU:0"] * 2
        )
        sizes = sorted(stage.count_params() for stage in found.stages)
        self.assertEqual(sizes, [40, 1200])

    def test_saved_files_keep_their_cut(self):
        model = pipelined(images())
        path = os.path.join(self.get_temp_dir(), "a.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        self.assertEqual(loaded.balance, model.balance)
        self.assertEqual(loaded.get_config()["balance"], model.balance)
        # Like files saved when "parameters" was the default.
        config = {**model.get_config(), "balance": "parameters"}
        older = tf_gpipe.PipelinedSequential.from_config(config)
        self.assertEqual(
            older.balance, pipelined(images(), balance="parameters").balance
        )

    def test_not_built(self):
        model = pipelined(images()[1:])
        self.assertIsNone(model.balance)
        self.assertIsNone(model.get_config()["balance"])
        model(np.zeros((2, 16, 16, 3)))
        self.assertEqual(model.balance, pipelined(images()).balance)

    def test_traced_once(self):
        calls = []

        class Counted(L.Dense):
            def call(self, inputs, training=None):
                calls.append(self.name)
                return super().call(inputs, training)

        x = keras.Input((4,))
        model = keras.Model(x, Counted(4)(Counted(4)(Counted(4)(x))))
        graph = model_graph.of_model(model)
        del calls[:]
        first = layer_costs.trace(graph)[0]
        # One layer is traced for all that are alike.
        self.assertLen(set(calls), 1)
        del calls[:]
        self.assertEqual(layer_costs.trace(graph)[0], first)
        self.assertEmpty(calls)
        model.layers[2].trainable = False
        layer_costs.trace(graph)
        self.assertEqual(set(calls), {model.layers[2].name})

    def test_memory_that_is_uneven_is_told(self):
        layers = [
            keras.Input((16,)),
            L.Embedding(50_000, 16),
            *(L.Dense(16) for _ in range(7)),
        ]
        with self.assertWarnsRegex(
            UserWarning,
            "Stage 0 of model 'model' has 9.% of the memory, where each of 4 "
            r"stages should have 25%\. Layer 'embedding",
        ):
            pipelined(layers, 4, name="model")

    def test_weights_do_not_seem_to_be_all_of_the_memory(self):
        """No warning, though the model's batch size is not known."""
        layers = [
            keras.Input((16, 16, 3)),
            *(L.Conv2D(16, 3, padding="same") for _ in range(3)),
            L.GlobalAveragePooling2D(),
            *(L.Dense(150) for _ in range(4)),
        ]
        pipelined(layers, 4)


if __name__ == "__main__":
    tf.test.main()
