"""A pipeline on one device trains as plain Keras does, in less memory."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L  # noqa: N812

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison

ROWS = 11
ONE_STAGE = {"num_stages": 1, "devices": ["CPU:0"]}
STAGES = {"num_stages": 8, "devices": ["CPU:0"] * 8}


def attention(batch_size=None):
    """A model of tokens, with a mask, skips and weights that are decayed."""
    inputs = keras.Input((6,), batch_size, dtype="int32", name="tokens")
    x = L.Embedding(20, 8, mask_zero=True, name="embedding")(inputs)
    for i in range(3):
        y = L.LayerNormalization(name=f"norm_{i}")(x)
        y = L.MultiHeadAttention(2, 4, name=f"attention_{i}")(y, y)
        x = L.Add(name=f"sum_{i}")([x, y])
        y = L.Dense(
            16,
            "gelu",
            kernel_regularizer=keras.regularizers.L2(0.01),
            name=f"wide_{i}",
        )(x)
        x = L.Add(name=f"out_{i}")([x, L.Dense(8, name=f"narrow_{i}")(y)])
    return keras.Model(inputs, L.Dense(5, name="last")(x))


def images():
    """Layers for images, two of which are the same."""
    twice = L.Conv2D(4, 3, padding="same", activation="relu", name="twice")
    return [
        keras.Input((6, 6, 2)),
        L.Conv2D(4, 3, padding="same", name="first"),
        L.GroupNormalization(2, name="norm"),
        twice,
        L.Conv2D(4, 1, name="between"),
        twice,
        L.Conv2D(4, 3, activation="tanh", padding="same", name="second"),
        L.GlobalAveragePooling2D(name="mean"),
        L.Dense(8, "gelu", name="hidden"),
        L.Dense(5, name="last"),
    ]


def data(make, rows):
    rng = np.random.default_rng(0)
    if make is not images:
        x = rng.integers(0, 20, (rows, 6), dtype="int32")
        x[:, 0] = 1  # No row is padding alone.
        y = rng.integers(0, 5, (rows, 6), dtype="int32")
    else:
        x = rng.normal(size=(rows, 6, 6, 2)).astype("float32")
        y = rng.integers(0, 5, rows, dtype="int32")
    return [(x, y, rng.uniform(0.5, 1.5, y.shape).astype("float32"))]


def trained(make, rows, **kwargs):
    return comparison.train(
        make,
        data(make, rows),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=lambda: keras.optimizers.SGD(
            0.1, momentum=0.9, global_clipnorm=0.5
        ),
        metrics=["accuracy"],
        **kwargs,
    )


@functools.cache
def plain(make, rows):
    return trained(make, rows)


class OneDeviceTest(tf.test.TestCase, parameterized.TestCase):
    @pairwise.each(
        make=(attention, images),
        where=(ONE_STAGE, STAGES),
        remat=("always", "never", 0.6, "bytes"),
        schedule=("1f1b", "gpipe"),
        # M divides neither, and the second is smaller than M.
        rows=(ROWS, 3),
    )
    @pytest.mark.slow
    def test_trains_as_plain(self, make, where, remat, schedule, rows):
        kwargs = {"remat": remat}
        if remat == 0.6:
            kwargs = {"remat": "auto", "memory_limit": 0.6}
        elif remat == "bytes":
            kwargs = {
                "remat": "auto",
                "memory_limit": "1MB",
                "batch_size": rows,
            }
        pipeline = trained(
            make,
            rows,
            num_micro_batches=4,
            schedule=schedule,
            **where,
            **kwargs,
        )
        comparison.assert_same(self, plain(make, rows), pipeline)

    @pytest.mark.slow
    def test_one_row(self):
        # Nothing is split. Some of the layers are recomputed, part by part.
        pipeline = trained(
            attention,
            1,
            **ONE_STAGE,
            num_micro_batches=1,
            remat="auto",
            memory_limit=0.4,
        )
        self.assertGreater(len(pipeline[0]._pipeline.recomputed(0)), 1)
        comparison.assert_same(self, plain(attention, 1), pipeline)

    @pytest.mark.slow
    def test_tuned(self):
        model, spec = attention(), keras.KerasTensor((8, 6), "int32")
        needs = tf_gpipe.plan(
            model, spec, num_stages=1, num_micro_batches=1, remat="never"
        ).device_bytes[0]
        plan = tf_gpipe.tune(
            model, spec, ["CPU:0"], int(0.7 * needs), budget_seconds=0
        )
        self.assertLessEqual(plan.device_bytes[0], 0.7 * needs)
        self.assertNotEqual((plan.num_micro_batches, plan.remat), (1, "never"))
        pipeline = trained(attention, 8, plan=plan)
        comparison.assert_same(self, plain(attention, 8), pipeline)

    @pytest.mark.slow
    def test_auto(self):
        pipeline = trained(
            functools.partial(attention, 8),
            8,
            num_stages="auto",
            devices=["CPU:0"],
        )
        comparison.assert_same(self, plain(attention, 8), pipeline)


if __name__ == "__main__":
    tf.test.main()
