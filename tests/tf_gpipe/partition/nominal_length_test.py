"""Costs of layers whose inputs have axes of unknown size."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise
from tests.devices import KIND
from tests.tf_gpipe.partition.uncountable import Endless

WORDS = ["a", "b", "c", "d"]
COSTS = ("flops", "memory", "time")


class Attention(L.Layer):
    """A layer whose work grows with the square of the length."""

    def call(self, x):
        scores = keras.ops.matmul(x, keras.ops.swapaxes(x, -1, -2))
        return keras.ops.matmul(keras.ops.softmax(scores), x)

    def compute_output_shape(self, input_shape):
        return input_shape


class Positions(L.Layer):
    """Adds a table of at most `most` positions."""

    def __init__(self, most, **kwargs):
        super().__init__(**kwargs)
        self.most = most

    def build(self, input_shape):
        shape = (self.most, input_shape[-1])
        self.table = self.add_weight(shape=shape, name="table")

    def call(self, x):
        length = keras.ops.shape(x)[1]
        table = keras.ops.slice(self.table, (0, 0), (length, x.shape[-1]))
        return x + table

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "most": self.most}


def pipelined(layers, functional=False, **kwargs):
    kwargs = dict(num_stages=2, devices=[f"{KIND}:0"] * 2) | kwargs
    if not functional:
        return tf_gpipe.PipelinedSequential(layers, **kwargs)
    model = keras.Sequential(layers)
    return tf_gpipe.PipelinedModel.from_model(
        keras.Model(model.inputs, model.outputs), **kwargs
    )


def counts(model):
    return [len(stage.nodes) for stage in model.stages]


class NominalLengthTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(balance=COSTS, functional=(True, False))
    def test_is_known_by_its_name(self, balance, functional):
        layers = [
            keras.Input((None,), dtype="int32"),
            L.Embedding(50, 4),
            L.Dense(8),
            L.LSTM(4),
            L.Dense(2),
        ]
        model = pipelined(layers, functional, balance=balance)
        self.assertEqual(model(np.ones((3, 5), "int32")).shape, (3, 2))
        self.assertEqual(sum(counts(model)), 4)

    @parameterized.product(
        case=((2, [2, 2]), (None, [1, 3]), (1000, [1, 3])),
        functional=(True, False),
    )
    def test_another_length(self, case, functional):
        length, expected = case
        layers = [
            keras.Input((None, 8)),
            Attention(),
            *(L.Dense(8, use_bias=False) for _ in range(3)),
        ]
        kwargs = {"balance": "flops", "remat": "never"}
        if length is not None:
            kwargs["nominal_length"] = length
        model = pipelined(layers, functional, **kwargs)
        self.assertEqual(counts(model), expected)
        self.assertEqual(model.nominal_length, length or 128)
        # The same as for inputs of that length, where it does not count.
        layers = [keras.Input((length or 128, 8)), *model.layers[-4:]]
        kwargs["nominal_length"] = 5
        self.assertEqual(
            counts(pipelined(layers, functional, **kwargs)), expected
        )

    def test_of_a_searched_order(self):
        """The order of tasks is searched with the costs at that length."""

        def tasks(length, **kwargs):
            layers = [Attention() if i % 3 else L.Dense(8) for i in range(8)]
            model = pipelined(
                [keras.Input((length, 8)), *layers],
                num_stages=4,
                balance=[2, 2, 2, 2],
                num_micro_batches=8,
                schedule="auto",
                **kwargs,
            )
            return model._pipeline.schedule.tasks

        short = tasks(None, nominal_length=2)
        long = tasks(None, nominal_length=1000)
        self.assertEqual(short, tasks(2))
        self.assertEqual(long, tasks(1000))
        self.assertNotEqual(short, long)

    def test_images(self):
        layers = [
            keras.Input((None, None, 3)),
            L.Conv2D(4, 3),
            L.Conv2D(4, 3),
            L.GlobalAveragePooling2D(),
            L.Dense(2),
        ]
        model = pipelined(layers, balance="flops", remat="never")
        self.assertEqual(counts(model), [1, 3])

    def test_is_kept(self):
        layers = [keras.Input((None, 8)), Attention(), L.Dense(8), L.Dense(8)]
        model = pipelined(layers, nominal_length=20)
        model.rebalance("flops")
        self.assertEqual(model.nominal_length, 20)
        config = model.get_config()
        self.assertEqual(config["nominal_length"], 20)
        with keras.saving.custom_object_scope({"Attention": Attention}):
            made = type(model).from_config(config)
            self.assertEqual(made.nominal_length, 20)
            # Like a file saved before the argument existed.
            del config["nominal_length"]
            made = type(model).from_config(config)
            self.assertEqual(made.nominal_length, 128)

    @pairwise.product(
        case=(
            # Shorter than a table of positions, longer than a kernel.
            ([keras.Input((None, 8)), Positions(16), L.Dense(8)], 128, 10),
            ([keras.Input((None, 8)), L.Conv1D(8, 9), L.Dense(8)], 4, 20),
            # An image.
            ([keras.Input((None, None, 8)), L.Conv2D(8, 9), L.Dense(8)], 4, 20),
        ),
        balance=COSTS,
        functional=(True, False),
    )
    def test_that_a_layer_does_not_take(self, case, balance, functional):
        (spec, *layers), bad, good = case
        layers = [spec, *(type(x).from_config(x.get_config()) for x in layers)]
        kwargs = dict(functional=functional, balance=balance)
        with self.assertRaisesRegex(
            ValueError,
            f"(?s)cost of layer '{layers[1].name}'.* count as the model's "
            "`nominal_length`: .*give another. Or give costs with a function",
        ):
            pipelined(layers, nominal_length=bad, **kwargs)
        model = pipelined(layers, nominal_length=good, **kwargs)
        self.assertEqual(counts(model), [1, 1])

    def test_is_not_told_of_known_lengths(self):
        with self.assertRaisesRegex(ValueError, r"known\. Give costs with a"):
            pipelined(
                [keras.Input((4,)), L.Dense(4), Endless()], balance="flops"
            )

    @parameterized.parameters(0, -3, 2.5, "long", None)
    def test_is_checked(self, length):
        with self.assertRaisesRegex(ValueError, "`nominal_length` must be"):
            pipelined([keras.Input((4,)), L.Dense(2)], nominal_length=length)


def numbers(shape=(1,), dtype="float32"):
    return keras.Input(shape, dtype=dtype)


PREPROCESSING = {
    "TextVectorization": lambda: [
        numbers((), "string"),
        L.TextVectorization(vocabulary=WORDS, output_sequence_length=6),
        L.Embedding(8, 4),
        L.GlobalAveragePooling1D(),
    ],
    "TextVectorization, any length": lambda: [
        numbers((), "string"),
        L.TextVectorization(vocabulary=WORDS),
        L.Embedding(8, 4),
        L.GlobalAveragePooling1D(),
    ],
    "StringLookup": lambda: [
        numbers((None,), "string"),
        L.StringLookup(vocabulary=WORDS),
        L.Embedding(8, 4),
        L.GlobalAveragePooling1D(),
    ],
    "StringLookup, multi-hot": lambda: [
        numbers((3,), "string"),
        L.StringLookup(vocabulary=WORDS, output_mode="multi_hot"),
    ],
    "Hashing": lambda: [
        numbers((3,), "string"),
        L.Hashing(8),
        L.Embedding(8, 4),
        L.Flatten(),
    ],
    "IntegerLookup": lambda: [
        numbers((3,), "int64"),
        L.IntegerLookup(vocabulary=[1, 2, 3]),
        L.Embedding(8, 4),
        L.Flatten(),
    ],
    "Discretization": lambda: [
        numbers((3,)),
        L.Discretization(bin_boundaries=[0.0, 1.0]),
        L.Embedding(8, 4),
        L.Flatten(),
    ],
    "CategoryEncoding": lambda: [
        numbers((3,), "int32"),
        L.CategoryEncoding(8, output_mode="count"),
    ],
    "Normalization": lambda: [
        numbers((3,)),
        L.Normalization(mean=0.0, variance=1.0),
    ],
    "Resizing": lambda: [
        numbers((None, None, 3)),
        L.Resizing(8, 8),
        L.Flatten(),
    ],
}


class PreprocessingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(name=tuple(PREPROCESSING), balance=COSTS)
    @pytest.mark.slow_after(1)
    def test_layers_behind(self, name, balance):
        layers = [*PREPROCESSING[name](), L.Dense(8), L.Dense(8)]
        plain = keras.Sequential(layers)
        # Without a length, rows are padded to the longest of a micro-batch.
        rows = 1 if name.endswith("any length") else 2
        model = pipelined(layers, balance=balance, num_micro_batches=rows)
        spec = layers[0]
        shape = [n or 8 for n in spec.shape[1:]]
        if spec.dtype == "string":
            text = np.resize(["a b", "c", "d a e"], (4, *shape))
            x = tf.constant(text)
        else:
            x = tf.ones((4, *shape), spec.dtype)
        self.assertAllClose(model(x), plain(x))


if __name__ == "__main__":
    tf.test.main()
