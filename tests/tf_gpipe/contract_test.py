"""The numerical contract: a pipeline computes what the plain model does."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison

SOFTMAX = keras.losses.SparseCategoricalCrossentropy


def batches(sizes, features=6, seed=0):
    generator = np.random.default_rng(seed)
    return [
        (
            generator.standard_normal((size, features), dtype="float32"),
            generator.integers(0, 3, (size,)),
            generator.uniform(0, 2, (size,)).astype("float32"),
        )
        for size in sizes
    ]


def tokens(sizes, length=5, seed=0):
    generator = np.random.default_rng(seed)
    result = []
    for size in sizes:
        x = generator.integers(1, 9, (size, length))
        for row, padding in zip(x, range(size), strict=True):
            row[length - padding % length :] = 0
        result.append((x, generator.integers(0, 3, (size, length))))
    return result


def dense():
    return [
        keras.Input((6,)),
        L.Dense(8, activation="relu", kernel_regularizer="l2"),
        L.Dense(8, activity_regularizer="l2"),
        L.LayerNormalization(),
        L.ReLU(),
        L.Dense(3),
    ]


@keras.saving.register_keras_serializable(package="contract_test")
class SelfAttention(L.Layer):
    def build(self, input_shape):
        self.attention = L.MultiHeadAttention(2, 4)
        self.attention.build(input_shape, input_shape)
        self.supports_masking = True

    def call(self, x):
        return x + self.attention(x, x)

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable(package="contract_test")
class Narrowed(L.Layer):
    """Rounds what goes through it, and the gradients that come back."""

    def __init__(self, dtype_name, **kwargs):
        super().__init__(**kwargs)
        self.dtype_name = dtype_name

    def call(self, x):
        def rounded(y):
            return tf.cast(tf.cast(y, self.dtype_name), y.dtype)

        return tf.custom_gradient(lambda y: (rounded(y), rounded))(x)


CLASSIFIES = {"loss": SOFTMAX(from_logits=True), "metrics": ["accuracy"]}


@functools.cache
def plain_dense(rows):
    """Returns the trained plain model, one for all cells of a grid."""
    return comparison.train(dense, batches([rows]), **CLASSIFIES)


class ContractTest(tf.test.TestCase, parameterized.TestCase):
    @pairwise.product(
        num_stages=(1, 2, 4),
        num_micro_batches=(1, 4, 7),
        schedule=("gpipe", "1f1b", "zero_bubble", "eager_zero_bubble"),
        remat=("always", "except_last", "never"),
    )
    @pytest.mark.slow_after(1)
    def test_grid(self, **kwargs):
        pipelined = comparison.train(
            dense, batches([8]), **CLASSIFIES, **kwargs
        )
        comparison.assert_same(self, plain_dense(8), pipelined)

    @parameterized.parameters(
        (2, 4, "always", 8), (4, 7, "except_last", 8), (4, 8, "never", 7)
    )
    @pytest.mark.slow_after(1)
    def test_eager_1f1b(self, num_stages, num_micro_batches, remat, rows):
        pipelined = comparison.train(
            dense,
            batches([rows]),
            **CLASSIFIES,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            schedule="eager_1f1b",
            remat=remat,
        )
        comparison.assert_same(self, plain_dense(rows), pipelined)

    @pairwise.product(
        num_stages=(2, 4),
        num_micro_batches=(2, 4),
        remat=("always", "except_last", "never"),
        rows=(8, 7),
    )
    @pytest.mark.slow
    def test_interleaved(self, rows, **kwargs):
        pipelined = comparison.train(
            dense,
            batches([rows]),
            **CLASSIFIES,
            **kwargs,
            schedule="interleaved",
            devices=["CPU:0", "CPU:1"],
        )
        comparison.assert_same(self, plain_dense(rows), pipelined)

    @pairwise.product(
        tasks=(
            # The last micro-batch first.
            ("F0.1 F0.0 B0.1 B0.0", "F1.1 B1.1 F1.0 B1.0"),
            # Some backward passes are split.
            (
                "F0.0 F0.1 F0.2 B0.0 W0.0 B0.1 B0.2",
                "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 W1.1",
            ),
        ),
        remat=("always", "never"),
        rows=(8, 7),
    )
    @pytest.mark.slow_after(1)
    def test_schedule_of_your_own(self, tasks, remat, rows):
        schedule = tf_gpipe.Schedule([row.split() for row in tasks])
        pipelined = comparison.train(
            dense, batches([rows]), **CLASSIFIES, schedule=schedule, remat=remat
        )
        comparison.assert_same(self, plain_dense(rows), pipelined)

    @parameterized.parameters(
        {"schedule": "gpipe", "remat": "except_last"},
        {"schedule": "eager_zero_bubble", "remat": "always"},
        {"schedule": "1f1b", "remat": "always"},
        {"schedule": "zero_bubble", "remat": "except_last"},
    )
    @pytest.mark.slow_after(1)
    def test_uneven_batches(self, **kwargs):
        data = batches([8, 7, 5, 3])
        arguments = {"loss": SOFTMAX(from_logits=True), "metrics": ["accuracy"]}
        plain = comparison.train(dense, data, **arguments)
        pipelined = comparison.train(
            dense,
            data,
            **arguments,
            **kwargs,
            num_stages=3,
            num_micro_batches=4,
        )
        comparison.assert_same(self, plain, pipelined)

    @pairwise.product(
        reduction=("sum", "mean", "mean_with_sample_weight"),
        schedule=("gpipe", "1f1b"),
        num_rows=(7, 2),
    )
    @pytest.mark.slow
    def test_reductions(self, reduction, schedule, num_rows):
        data = batches([num_rows])
        loss = SOFTMAX(from_logits=True, reduction=reduction)
        plain = comparison.train(dense, data, loss=loss)
        pipelined = comparison.train(
            dense,
            data,
            loss=loss,
            num_stages=2,
            num_micro_batches=3,
            schedule=schedule,
        )
        comparison.assert_same(self, plain, pipelined)

    @parameterized.parameters("1f1b", "zero_bubble")
    def test_values_that_are_not_reduced(self, schedule):
        """Keras shows their mean, and differentiates their sum."""

        def make():
            return [
                keras.Input((5,), dtype="int32"),
                L.Embedding(9, 8, mask_zero=True),
                L.Dense(6, "tanh"),
                L.Dense(3),
            ]

        def optimizer():
            return keras.optimizers.SGD(0.01)

        data = tokens([7, 2])
        loss = SOFTMAX(from_logits=True, reduction=None)
        plain, pipelined = (
            comparison.train(make, data, loss=loss, optimizer=optimizer, **x)
            for x in (
                {},
                dict(num_stages=2, num_micro_batches=3, schedule=schedule),
            )
        )
        comparison.assert_same(self, plain, pipelined)

    @pairwise.product(
        case=("masked", "unmasked", "ignore_class"),
        reduction=("sum_over_batch_size", "mean_with_sample_weight"),
        schedule=("gpipe", "1f1b"),
    )
    @pytest.mark.slow_after(1)
    def test_embeddings_and_attention(self, case, reduction, schedule):
        def make():
            return [
                keras.Input((5,), dtype="int32"),
                L.Embedding(9, 8, mask_zero=case == "masked"),
                SelfAttention(),
                SelfAttention(),
                L.Dense(3),
            ]

        loss = SOFTMAX(
            from_logits=True,
            reduction=reduction,
            ignore_class=0 if case == "ignore_class" else None,
        )
        data = tokens([7])

        # Not Adam: attention has biases whose gradient is all rounding, which
        # Adam would blow up to a full step.
        def optimizer():
            return keras.optimizers.SGD(0.1, momentum=0.9)

        plain = comparison.train(make, data, loss=loss, optimizer=optimizer)
        pipelined = comparison.train(
            make,
            data,
            loss=loss,
            optimizer=optimizer,
            num_stages=3,
            num_micro_batches=3,
            schedule=schedule,
        )
        comparison.assert_same(self, plain, pipelined, rtol=1e-4, atol=1e-5)

    @parameterized.parameters("gpipe", "1f1b")
    def test_shared_and_frozen_layers(self, schedule):
        def make():
            shared = L.Dense(6)
            frozen = L.Dense(6)
            frozen.trainable = False
            return [
                keras.Input((6,)),
                shared,
                L.ReLU(),
                frozen,
                shared,
                L.Activation("tanh"),
                L.Dense(3),
            ]

        data = batches([8])
        loss = SOFTMAX(from_logits=True)
        plain = comparison.train(make, data, loss=loss)
        # The activation in the middle is a stage without weights.
        pipelined = comparison.train(
            make,
            data,
            loss=loss,
            balance=[1, 1, 2, 2],
            num_micro_batches=2,
            schedule=schedule,
        )
        comparison.assert_same(self, plain, pipelined)

    @parameterized.parameters(
        ("bfloat16", "gpipe"), ("float16", "1f1b"), ("bfloat16", "zero_bubble")
    )
    @pytest.mark.slow_after(1)
    def test_boundary_dtype(self, boundary_dtype, schedule):
        def make():
            return [keras.Input((6,)), L.Dense(8, "tanh"), L.Dense(3)]

        def make_rounded():
            first, *rest, last = make()
            return [first, *rest, Narrowed(boundary_dtype), last]

        data = batches([8, 7])
        loss = SOFTMAX(from_logits=True)
        arguments = {
            "num_micro_batches": 2,
            "schedule": schedule,
            "boundary_dtype": boundary_dtype,
        }
        rounded, exact, narrow, here = (
            comparison.train(layers, data, loss=loss, **kwargs)
            for layers, kwargs in (
                (make_rounded, {}),
                (make, {}),
                (make, {"num_stages": 2, **arguments}),
                # What does not travel is not rounded.
                (make, {"devices": ["CPU:0", "CPU:0"], **arguments}),
            )
        )
        comparison.assert_same(self, rounded, narrow)
        comparison.assert_same(self, exact, here)
        with self.assertRaises(AssertionError):
            comparison.assert_same(self, exact, narrow)

    @parameterized.parameters("mixed_bfloat16", "mixed_float16")
    @pytest.mark.slow
    def test_mixed_precision(self, policy):
        self.addCleanup(keras.config.set_dtype_policy, "float32")
        keras.config.set_dtype_policy(policy)

        def make():
            # Plain Keras cannot add an activity regulariser's float16.
            return [keras.Input((6,)), L.Dense(8, "relu"), L.Dense(3)]

        data = batches([8])
        for schedule in ("gpipe", "1f1b", "zero_bubble"):
            loss = SOFTMAX(from_logits=True)
            plain = comparison.train(make, data, loss=loss)
            pipelined = comparison.train(
                make,
                data,
                loss=loss,
                num_stages=2,
                num_micro_batches=4,
                schedule=schedule,
            )
            self.assertEqual(
                isinstance(
                    pipelined[0].optimizer, keras.optimizers.LossScaleOptimizer
                ),
                policy == "mixed_float16",
            )
            comparison.assert_same(self, plain, pipelined, rtol=0.1, atol=0.03)

    @parameterized.parameters("mixed_bfloat16", "mixed_float16")
    def test_calls_in_mixed_precision(self, policy):
        self.addCleanup(keras.config.set_dtype_policy, "float32")
        keras.config.set_dtype_policy(policy)
        x, y, _ = batches([8])[0]
        found = []
        for make in (
            keras.Sequential,
            lambda x: tf_gpipe.PipelinedSequential(
                x, num_stages=2, num_micro_batches=1
            ),
        ):
            keras.utils.set_random_seed(1)
            inner = make(
                [
                    keras.Input((6,)),
                    L.Dense(8),
                    L.BatchNormalization(),
                    L.Dense(3),
                ]
            )
            inputs = keras.Input((6,))
            model = keras.Model(inputs, inner(L.Dense(6)(inputs)))
            inner.compile(loss=SOFTMAX(from_logits=True))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True))
            gradients = tape.gradient(
                loss, [v.value for v in model.trainable_variables]
            )
            found.append(
                [
                    inner.predict(x, verbose=0),
                    inner.evaluate(x, y, verbose=0),
                    *gradients,
                    *(v.numpy() for v in model.variables),
                ]
            )
        for plain, pipelined in zip(*found, strict=True):
            dtypes = [getattr(z, "dtype", None) for z in (plain, pipelined)]
            self.assertEqual(dtypes[0], dtypes[1])
            self.assertAllClose(
                np.asarray(plain, "float32"),
                np.asarray(pipelined, "float32"),
                rtol=0.02,
                atol=0.02,
            )

    @pytest.mark.slow
    def test_dropout_depends_on_the_seed_alone(self):
        def make():
            return [
                keras.Input((6,)),
                L.Dense(8),
                L.Dropout(0.5, seed=1),
                L.Dense(8),
                L.Dropout(0.5, seed=2),
                L.Dense(3),
            ]

        data = batches([8])
        loss = SOFTMAX(from_logits=True)
        plain = comparison.train(make, data, loss=loss)
        one = comparison.train(
            make, data, loss=loss, num_stages=3, num_micro_batches=1
        )
        comparison.assert_same(self, plain, one)
        first = comparison.train(
            make, data, loss=loss, num_stages=1, num_micro_batches=4
        )
        for kwargs in (
            {"num_stages": 4},
            {"num_stages": 3, "schedule": "gpipe"},
            {"num_stages": 3, "schedule": "zero_bubble"},
            {"num_stages": 2, "remat": "never"},
            {"num_stages": 1},
        ):
            other = comparison.train(
                make, data, loss=loss, num_micro_batches=4, **kwargs
            )
            comparison.assert_same(self, first, other)

    def test_micro_batches_draw_different_masks(self):
        model, _ = comparison.train(
            lambda: [keras.Input((50,)), L.Dropout(0.5, seed=1), L.Dense(3)],
            [],
            loss="mse",
            num_stages=1,
            num_micro_batches=2,
        )
        model.pop()
        mask = model(np.ones((2, 50), "float32"), training=True).numpy() > 0
        self.assertNotAllEqual(mask[0], mask[1])

    @pairwise.product(
        schedule=("gpipe", "1f1b"), remat=("always", "never"), rows=(8, 7)
    )
    def test_batch_normalization(self, schedule, remat, rows):
        def make():
            return [
                keras.Input((6,)),
                L.BatchNormalization(momentum=0.8),
                L.Dense(3),
            ]

        data = batches([rows])
        loss = SOFTMAX(from_logits=True)
        plain, _ = comparison.train(make, data, loss=loss, epochs=3)
        pipelined, _ = comparison.train(
            make,
            data,
            loss=loss,
            epochs=3,
            num_stages=2,
            num_micro_batches=3,
            schedule=schedule,
            remat=remat,
        )
        # The layer comes first, so what it sees does not depend on training.
        for name in ("moving_mean", "moving_variance"):
            self.assertAllClose(
                getattr(pipelined.layers[0], name),
                getattr(plain.layers[0], name),
                rtol=1e-5,
                atol=1e-6,
            )

    def test_batch_normalization_with_one_micro_batch(self):
        def make():
            return [
                keras.Input((6,)),
                L.Dense(4),
                L.BatchNormalization(),
                L.Dense(3),
            ]

        data = batches([8, 7])
        loss = SOFTMAX(from_logits=True)
        plain = comparison.train(make, data, loss=loss)
        pipelined = comparison.train(
            make, data, loss=loss, num_stages=3, num_micro_batches=1
        )
        comparison.assert_same(self, plain, pipelined)

    @parameterized.parameters(
        ("gpipe", "always", 0, 8),
        ("gpipe", "always", 1, 8),
        ("gpipe", "except_last", 1, 7),
        ("gpipe", "never", 1, 4),
        ("1f1b", "always", 0, 8),
        ("1f1b", "except_last", 0, 7),
        ("1f1b", "never", 0, 4),
        # The backward pass follows at once, so that nothing is recomputed.
        ("1f1b", "always", 1, 4),
        ("eager_1f1b", "always", 0, 8),
        ("eager_1f1b", "always", 1, 4),
        ("zero_bubble", "always", 0, 8),
        ("zero_bubble", "never", 0, 4),
        ("zero_bubble", "always", 1, 4),
    )
    @pytest.mark.slow_after(1)
    def test_computes_as_often_as_asked(self, schedule, remat, stage, runs):
        calls = collections.Counter()

        def count(kind):
            def run(x):
                calls[kind] += 1
                return x

            return run

        @tf.custom_gradient
        def counted(x):
            # Stateless, so graph optimisation may merge two of them.
            def counted(kind, x):
                y = tf.numpy_function(
                    count(kind), [x], tf.float32, stateful=False
                )
                return tf.ensure_shape(y, x.shape)

            y = counted("forward", x)
            return y, lambda upstream: counted(
                "backward", upstream * tf.sign(tf.abs(y) + 1)
            )

        def make():
            layers = [L.Dense(4) for _ in range(4)]
            layers[2 * stage + 1] = L.Lambda(counted)
            return [keras.Input((6,)), *layers]

        comparison.train(
            make,
            batches([8]),
            loss=SOFTMAX(from_logits=True),
            epochs=1,
            num_stages=2,
            balance=[2, 2],
            num_micro_batches=4,
            schedule=schedule,
            remat=remat,
        )
        # One backward call serves the gradients by weights and by inputs.
        self.assertEqual(calls, {"forward": runs, "backward": 4})


if __name__ == "__main__":
    tf.test.main()
