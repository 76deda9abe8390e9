"""Losses that use weights, and what losses divide by."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tests import pairwise

SCHEDULES = (
    *("1f1b", "zero_bubble", "eager_1f1b", "gpipe"),
    "eager_zero_bubble",
)
X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(24, 1)).astype("float32")
TOKENS, CLASSES = np.random.default_rng(0).integers(1, 20, (2, 24, 5))


class Scale(L.Layer):
    """Has a weight that only the loss uses."""

    def build(self, shape):
        self.s = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x


class WithHead(L.Layer):
    """Has a layer that only the loss calls."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = L.Dense(1)

    def build(self, shape):
        self.head.build((None, 4))

    def call(self, x):
        return x


@keras.saving.register_keras_serializable()
class RandomMask(L.Layer):
    """Gives its outputs a mask that may be another one each time."""

    def __init__(self, drawn_by="keras", **kwargs):
        super().__init__(**kwargs)
        self.drawn_by = drawn_by
        self.seed = keras.random.SeedGenerator(3)
        self.supports_masking = True

    def compute_mask(self, x, mask=None):
        if isinstance(x, keras.KerasTensor):
            return None
        if self.drawn_by == "tf":
            return tf.random.uniform(tf.shape(x)[:2]) < 0.5
        if self.drawn_by == "Python":
            return tf.py_function(lambda x: x[..., 0] > 0, [x], tf.bool)
        return keras.random.uniform(ops.shape(x)[:2], seed=self.seed) < 0.5

    def call(self, x):
        return x


@keras.saving.register_keras_serializable()
class FixedMask(L.Layer):
    """Gives its outputs the same mask for each row of a batch."""

    def __init__(self, has_row=True, **kwargs):
        super().__init__(**kwargs)
        self.has_row = has_row
        self.supports_masking = True

    def compute_mask(self, x, mask=None):
        fixed = tf.constant([True, False, True, True, False])
        return fixed[None] if self.has_row else fixed

    def call(self, x):
        return x


def learned_scale():
    """Returns a model, and a loss with a learned weight: exp(-s) e + s."""
    scale = Scale()
    model = keras.Sequential(
        [keras.Input((6,)), L.Dense(4, "tanh"), scale, L.Dense(1), L.Dense(1)]
    )

    def loss(y, p):
        return ops.exp(-scale.s) * ops.mean((y - p) ** 2, -1) + scale.s

    return model, loss, X, Y


def frozen_scale():
    model, loss, *data = learned_scale()
    model.layers[1].trainable = False
    return model, loss, *data


def tied_embeddings():
    """Returns a model whose output projection is in its loss."""
    table = L.Embedding(20, 6)
    i = keras.Input((5,), dtype="int32")
    model = keras.Model(i, L.Dense(6)(L.Dense(6, "tanh")(table(i))))

    def loss(y, p):
        logits = ops.matmul(p, ops.transpose(table.embeddings))
        return keras.losses.sparse_categorical_crossentropy(
            y, logits, from_logits=True
        )

    return model, loss, TOKENS, CLASSES


def sampled_softmax():
    """Returns a model whose loss looks up the rows of its labels."""
    table = L.Embedding(20, 6)
    i = keras.Input((5,), dtype="int32")
    model = keras.Model(i, L.Dense(6)(L.Dense(6, "tanh")(table(i))))

    def loss(y, p):
        return -ops.sum(p * table(ops.cast(y, "int32")), axis=-1)

    return model, loss, TOKENS, CLASSES


def head_in_the_loss():
    """Returns a model with a layer that only its loss calls."""
    first = WithHead()
    model = keras.Sequential(
        [keras.Input((6,)), first, L.Dense(4, "tanh"), L.Dense(4, "tanh")]
    )

    def loss(y, p):
        return ops.mean((y - first.head(p)) ** 2, -1)

    return model, loss, X, Y


def loss_object():
    scale = Scale()
    model = keras.Sequential(
        [keras.Input((6,)), scale, L.Dense(4, "tanh"), L.Dense(1)]
    )

    class Loss(keras.losses.Loss):
        def call(self, y, p):
            return ops.mean((y - p - scale.s) ** 2, -1)

    return model, Loss(reduction="sum"), X, Y


CASES = {
    x.__name__: x
    for x in (
        learned_scale,
        frozen_scale,
        tied_embeddings,
        sampled_softmax,
        head_in_the_loss,
        loss_object,
    )
}


def hard_values(y, p):
    v = ops.mean((y - p) ** 2, -1)
    return tf.boolean_mask(v, v > 0.3)


def labelled_values(y, p):
    y, p = (tf.boolean_mask(x, y[:, 0] > 0.0) for x in (y, p))
    return keras.losses.huber(y, p)


def hard_labelled_values(y, p):
    return hard_values(*(tf.boolean_mask(x, y[:, 0] > 0.0) for x in (y, p)))


def hardest_values(y, p):
    """The hardest values, as many as are hard."""
    v = ops.mean((y - p) ** 2, -1)
    number = tf.math.count_nonzero(v > 0.3, dtype="int32")
    return tf.sort(v, direction="DESCENDING")[:number]


def partition_of_labels(y, p):
    v = ops.mean((y - p) ** 2, -1)
    return tf.dynamic_partition(v, ops.cast(y[:, 0] > 0.0, "int32"), 2)[1]


def different_values(y, p):
    return tf.unique(ops.mean((y - p) ** 2, -1))[0]


def of_a_branch(y, p):
    """The hard values, chosen within a branch."""
    v = ops.mean((y - p) ** 2, -1)
    return tf.cond(y[0, 0] > 9.0, lambda: v, lambda: hard_values(y, p))


OF_OUTPUTS = (
    *(hard_values, hardest_values, hard_labelled_values, of_a_branch),
    tf.function(hard_values),
)
OF_LABELS = (
    *(labelled_values, partition_of_labels, tf.function(labelled_values)),
    tf.function(
        labelled_values,
        input_signature=[tf.TensorSpec([None, 1])] * 2,
    ),
)


class LossWeightsTest(tf.test.TestCase, parameterized.TestCase):
    @staticmethod
    @functools.cache
    def plain(case, batch_size=8):
        return LossWeightsTest.fitted(case, batch_size)

    @staticmethod
    def fitted(case, batch_size=8, **kwargs):
        keras.utils.set_random_seed(1)
        options = {"run_eagerly": kwargs.pop("run_eagerly", False)}
        model, loss, x, y = case()
        if kwargs:
            cut = (
                tf_gpipe.PipelinedSequential
                if isinstance(model, keras.Sequential)
                else tf_gpipe.PipelinedModel.from_model
            )
            model = cut(
                model, num_stages=2, devices=["CPU:0", "CPU:1"], **kwargs
            )
        model.compile(keras.optimizers.Adam(0.05), loss, **options)
        history = model.fit(
            x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0
        )
        return [*history.history["loss"], *model.get_weights()]

    @parameterized.parameters(
        *itertools.product(CASES, ("zero_bubble", "gpipe")),
        ("learned_scale", "1f1b"),
        ("tied_embeddings", "eager_1f1b"),
    )
    @pytest.mark.slow_after(1)
    def test_weights_of_a_loss(self, case, schedule):
        case = CASES[case]
        self.assertAllClose(
            self.plain(case),
            self.fitted(case, schedule=schedule, num_micro_batches=4),
            rtol=2e-5,
            atol=1e-5,
        )

    @parameterized.product(
        case=("learned_scale", "sampled_softmax"),
        kwargs=(
            {"remat": "never"},
            {"run_eagerly": True},
            {"batch_size": 7},
            {"num_micro_batches": 1},
            {"num_micro_batches": 11},
        ),
    )
    @pytest.mark.slow_after(1)
    def test_variants(self, case, kwargs):
        case = CASES[case]
        same = {k: v for k, v in kwargs.items() if k == "batch_size"}
        piped = self.fitted(case, **{"num_micro_batches": 3, **kwargs})
        self.assertAllClose(
            self.plain(case, **same), piped, rtol=2e-5, atol=1e-5
        )

    @parameterized.product(
        schedule=("1f1b", "zero_bubble", "gpipe"), dropout=(False, True)
    )
    @pytest.mark.slow_after(1)
    def test_random_mask(self, schedule, dropout):
        """The loss of each micro-batch uses the mask that its outputs have."""
        model = tf_gpipe.PipelinedSequential(
            [
                keras.Input((5, 3)),
                L.Dense(4),
                L.Dropout(0.5 if dropout else 0.0, seed=4),
                RandomMask(),
                L.Dense(1),
            ],
            num_stages=2,
            num_micro_batches=3,
            schedule=schedule,
            devices=["CPU:0", "CPU:1"],
        )

        def loss(y, p):
            return 1.0 + 0.0 * ops.mean(y - p, axis=-1)

        model.compile("sgd", loss)
        x = np.random.default_rng(0).normal(size=(8, 5, 3)).astype("float32")
        for _ in range(2):
            # A mean of ones is one, whatever the mask.
            value = model.train_on_batch(x, np.zeros((8, 5, 1)))
            self.assertAllClose(value, 1.0)

    @pairwise.product(
        schedule=("1f1b", "gpipe"),
        num_micro_batches=(2, 4),
        rows=(7, 8, 3),
        batch=(None, "static"),
        dropout=(False, True),
    )
    @pytest.mark.slow_after(3)
    def test_mask_of_one_row(self, rows, batch, dropout, **kwargs):
        """It counts for all rows, of micro-batches of any size."""
        x, y = (
            np.random.default_rng(i).normal(size=(rows, 5, 3)) for i in range(2)
        )
        found = []
        for plain in (True, False):
            keras.utils.set_random_seed(1)
            layers = [keras.Input((5, 3)), L.Dense(4), FixedMask()]
            if dropout:
                layers.append(L.Dropout(0.0))
            model = keras.Sequential([*layers, L.Dense(3)])
            if not plain:
                model = tf_gpipe.PipelinedSequential(
                    model,
                    num_stages=2,
                    devices=["CPU:0", "CPU:1"],
                    **kwargs,
                )
            model.compile("sgd", "mse", metrics=["mae"])
            if batch:
                logs = [model.train_on_batch(x, y) for _ in range(2)]
            else:
                history = model.fit(x, y, epochs=2, batch_size=rows, verbose=0)
                logs = list(history.history.values())
            logs.append(model.evaluate(x, y, verbose=0))
            found.append([*logs, *model.get_weights()])
        self.assertAllClose(*found, rtol=2e-5, atol=1e-5)

    @pairwise.product(
        schedule=("1f1b", "gpipe"), batch=(None, "static"), rows=(7, 8)
    )
    @pytest.mark.slow_after(2)
    def test_mask_without_rows_is_refused(self, schedule, batch, rows):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((5, 3)), L.Dense(4), FixedMask(False), L.Dense(1)],
            num_stages=2,
            num_micro_batches=2,
            schedule=schedule,
            devices=["CPU:0", "CPU:1"],
        )
        model.compile("sgd", "mse")
        x, y = np.zeros((rows, 5, 3)), np.zeros((rows, 5, 1))
        run = model.train_on_batch if batch else model.fit
        with self.assertRaisesRegex(ValueError, r"mask must have.*\(5,\)"):
            run(x, y)

    @parameterized.parameters("tf", "Python")
    def test_mask_that_may_be_another_one_is_refused(self, drawn_by):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((5, 3)), L.Dense(4), RandomMask(drawn_by), L.Dense(1)],
            num_stages=2,
            num_micro_batches=3,
            devices=["CPU:0", "CPU:1"],
        )
        model.compile("sgd", "mse")
        x = np.zeros((8, 5, 3), "float32")
        with self.assertRaisesRegex(
            ValueError, "may be another one when it is computed again"
        ):
            model.train_on_batch(x, np.zeros((8, 5, 1)))

    def test_mask_of_a_loss_that_takes_outputs_is_refused(self):
        def loss(y, p):
            value = ops.mean((y - p) ** 2, -1)
            value._keras_mask = ops.mean(p, -1) > 0.0
            return value

        def model(schedule):
            return tf_gpipe.PipelinedSequential(
                [keras.Input((6,)), L.Dense(4), L.Dense(1)],
                num_stages=2,
                num_micro_batches=3,
                schedule=schedule,
                devices=["CPU:0", "CPU:1"],
            )

        refused = model("1f1b")
        refused.compile("sgd", loss)
        with self.assertRaisesRegex(ValueError, "mask of the outputs"):
            refused.fit(X, Y, verbose=0)
        taken = model("gpipe")
        taken.compile("sgd", loss)
        taken.fit(X, Y, verbose=0)

    @staticmethod
    def trained(loss, reduction="sum_over_batch_size", **kwargs):
        """Returns the loss of a step, and the weights after it."""
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), L.Dense(4), L.Dense(1)])
        eagerly = kwargs.pop("run_eagerly", False)
        if kwargs:
            model = tf_gpipe.PipelinedSequential(
                model, num_stages=2, devices=["CPU:0", "CPU:1"], **kwargs
            )

        class Own(keras.losses.Loss):
            def call(self, y, p):
                return loss(y, p)

        own = Own(name="own", reduction=reduction)
        model.compile("sgd", own, run_eagerly=eagerly)
        return [model.train_on_batch(X, Y), *model.get_weights()]

    @pairwise.product(
        loss=(*OF_OUTPUTS, different_values),
        schedule=("1f1b", "zero_bubble"),
        num_micro_batches=(2, 5),
    )
    @pytest.mark.slow_after(3)
    def test_values_chosen_by_outputs_are_refused(self, loss, **kwargs):
        with self.assertRaisesRegex(ValueError, "'own' chooses.*'gpipe'"):
            self.trained(loss, **kwargs)

    @parameterized.product(
        loss=OF_OUTPUTS,
        kwargs=(
            {"schedule": "gpipe"},
            {"schedule": "1f1b", "reduction": "sum"},
            {"schedule": "1f1b", "run_eagerly": True},
            {"schedule": "gpipe", "num_micro_batches": 5},
        ),
    )
    @pytest.mark.slow_after(2)
    def test_values_chosen_by_outputs(self, loss, kwargs):
        kwargs = {"num_micro_batches": 4, **kwargs}
        own = {k: v for k, v in kwargs.items() if k == "reduction"}
        self.assertAllClose(
            self.trained(loss, **own),
            self.trained(loss, **kwargs),
            rtol=2e-5,
            atol=1e-5,
        )

    @pairwise.product(
        loss=OF_LABELS,
        schedule=("1f1b", "zero_bubble", "gpipe"),
        num_micro_batches=(4, 5),
    )
    @pytest.mark.slow_after(2)
    def test_values_chosen_by_labels(self, loss, **kwargs):
        self.assertAllClose(
            self.trained(loss),
            self.trained(loss, **kwargs),
            rtol=2e-5,
            atol=1e-5,
        )

    @parameterized.parameters(*SCHEDULES)
    @pytest.mark.slow_after(1)
    def test_random_mask_as_in_the_plain_model(self, schedule):
        """A single micro-batch draws the plain model's mask."""
        layers = [
            keras.Input((5, 3)),
            L.Dense(4),
            RandomMask(),
            L.Dense(1),
        ]
        plain = keras.Sequential(layers)
        x = np.random.default_rng(0).normal(size=(8, 5, 3)).astype("float32")
        start = plain.get_weights()
        found = []
        for model in (
            plain,
            tf_gpipe.PipelinedSequential(
                layers,
                num_stages=2,
                num_micro_batches=1,
                schedule=schedule,
                devices=["CPU:0", "CPU:1"],
            ),
        ):
            model.set_weights(start)
            layers[2].seed.state.assign([3, 0])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            history = model.fit(x, np.ones((8, 5, 1)), epochs=2, verbose=0)
            found.append([*history.history["loss"], *model.get_weights()])
        self.assertAllClose(*found)
