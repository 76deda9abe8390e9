"""`verify` finds what differs from the plain model, and changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tf_gpipe.verification import steps

DEVICES = [f"CPU:{i}" for i in range(4)]


def numbers(*shape, seed=0):
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return drawn.astype("float32")


class Fault(L.Layer):
    """A layer that computes something else on a smaller batch."""

    def compute_output_shape(self, input_shape):
        return input_shape


class SubtractsMean(Fault):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class AddsSumOfRows(Fault):
    def call(self, x):
        return x + 0.1 * ops.sum(x, axis=0, keepdims=True)


class StandardDeviation(Fault):
    def call(self, x):
        return x + ops.mean(ops.std(x, axis=0))


class ScalesByRows(Fault):
    def call(self, x):
        return x * ops.cast(ops.shape(x)[0], x.dtype) / 10


class AddsProductOfMeans(Fault):
    def call(self, x):
        self.add_loss(ops.mean(x[:, 0]) * ops.mean(x[:, 1] ** 2))
        return x


class WrongGradient(Fault):
    def call(self, x):
        @tf.custom_gradient
        def wrong(x):
            rows = tf.cast(tf.shape(x)[0], x.dtype)
            return tf.identity(x), lambda upstream: upstream * rows / 10

        return wrong(x)


class WrongGradientOfWeight(Fault):
    def build(self, input_shape):
        self.scale = self.add_weight(
            shape=(input_shape[-1],), initializer="ones"
        )

    def call(self, x):
        rows = tf.cast(tf.shape(x)[0], x.dtype)

        @tf.custom_gradient
        def wrong(w):
            return tf.identity(w), lambda upstream: upstream * rows / 10

        return x * wrong(tf.convert_to_tensor(self.scale))


class KeepsLargest(Fault):
    def build(self, input_shape):
        self.largest = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x))))
        return x


class TakesNeighbour(Fault):
    def call(self, x):
        return x + 0.5 * ops.roll(x, 1, axis=0)


class ReadsRows(Fault):
    def call(self, x, training=None):
        # Reads rows only in inference.
        if training:
            return x
        return x + 0.1 * ops.cast(ops.shape(x)[0], x.dtype)


FAULTS = [
    SubtractsMean,
    AddsSumOfRows,
    StandardDeviation,
    ScalesByRows,
    AddsProductOfMeans,
    WrongGradient,
    WrongGradientOfWeight,
    KeepsLargest,
    TakesNeighbour,
    ReadsRows,
]


def stack(between, cls=tf_gpipe.PipelinedSequential, **kwargs):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), L.Dense(6, "tanh", name="first")]
    for layer in between:
        layers += [layer, L.Dense(6, "tanh")]
    layers.append(L.Dense(2, name="last"))
    kwargs = {"num_stages": 2, "num_micro_batches": 3, **kwargs}
    return cls(layers, devices=DEVICES[: kwargs["num_stages"]], **kwargs)


def compiled(model, optimizer=None, loss="mse", **kwargs):
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **kwargs)
    return model


DATA = numbers(10, 6), numbers(10, 2, seed=1)


class VerifyTest(tf.test.TestCase, parameterized.TestCase):
    def assert_verified(self, model, *data):
        report = tf_gpipe.verify(model, *data)
        self.assertTrue(report.ok, str(report))
        self.assertIsNone(report.first_layer)
        self.assertEmpty([*report.layers, *report.problems])
        return report

    def test_a_report(self):
        model = compiled(stack([L.Dense(5)]), "adam", metrics=["mae"])
        report = self.assert_verified(model, *DATA)
        self.assertEqual(
            set(report.worst),
            {
                "loss",
                "metric",
                "gradient",
                "variable",
                "slot",
                "statistic",
                "prediction",
            },
        )
        for kind, (name, difference, tolerance) in report.worst.items():
            self.assertLessEqual(difference, tolerance, kind)
            self.assertIn(name, str(report))
        self.assertLess(len(str(report).splitlines()), 60)
        self.assertEmpty(report.notes)
        self.assertEqual(report.compared, ["training", "evaluation"])
        self.assertIn("has the plain model's numbers.", str(report))

    @pytest.mark.slow
    def test_ten_faults_in_ten_layers(self):
        faults = [x(name=x.__name__) for x in FAULTS]
        model = compiled(stack(faults, num_stages=4))
        report = tf_gpipe.verify(model, *DATA)
        self.assertFalse(report.ok)
        self.assertEqual(report.layers, [x.__name__ for x in FAULTS])
        self.assertEqual(report.first_layer, FAULTS[0].__name__)
        self.assertIn(FAULTS[-1].__name__, str(report))

    @parameterized.parameters(WrongGradient, AddsProductOfMeans)
    @pytest.mark.slow
    def test_a_fault(self, fault):
        self.assert_named(fault, "1f1b")

    @parameterized.parameters(
        *((fault, "gpipe", False) for fault in FAULTS[::2]),
        *((fault, "zero_bubble", True) for fault in FAULTS[1::2]),
    )
    @pytest.mark.slow
    def test_each_fault(self, fault, schedule, eagerly):
        self.assert_named(fault, schedule, run_eagerly=eagerly)

    def assert_named(self, fault, schedule, **kwargs):
        model = stack([fault(name="fault")], schedule=schedule)
        report = tf_gpipe.verify(compiled(model, **kwargs), *DATA)
        self.assertFalse(report.ok)
        self.assertEqual(report.first_layer, "fault", str(report))
        self.assertEqual(report.layers, ["fault"])

    @parameterized.parameters(None, 2)
    @pytest.mark.slow_after(1)
    def test_a_model_is_left_as_it_was(self, steps):
        layers = [L.BatchNormalization(), L.Dropout(0.5)]
        model = compiled(stack(layers), "adam", metrics=["mae"])
        if steps:
            model.fit(*DATA, batch_size=5, verbose=0)
        objects = [
            model,
            model.optimizer,
            model._compile_loss,
            model._compile_metrics,
            *model._flatten_layers(),
        ]

        def look():
            variables = [
                *model.variables,
                *model.optimizer.variables,
                *model.metrics_variables,
            ]
            return (
                [id(v) for v in variables],
                [v.numpy() for v in variables],
                [set(vars(x)) for x in objects],
                type(model),
                [id(x) for x in model.metrics],
                model.train_function,
            )

        before = look()
        report = self.assert_verified(model, *DATA)
        after = look()
        self.assertEqual(after[0], before[0])
        for a, b in zip(after[1], before[1], strict=True):
            self.assertAllEqual(a, b)
        self.assertEqual(after[2:], before[2:])
        self.assertIn("random numbers", str(report))
        self.assertIn("batch normalisation", str(report))

    @pytest.mark.slow
    def test_training_goes_on_as_without(self):
        found = []
        for verified in (False, True):
            model = compiled(stack([L.Dropout(0.5, seed=3)]), "adam")
            for _ in range(2):
                if verified:
                    self.assert_verified(model, *DATA)
                model.fit(*DATA, batch_size=5, shuffle=False, verbose=0)
            found.append([v.numpy() for v in model.variables])
        for a, b in zip(*found, strict=True):
            self.assertAllEqual(a, b)

    def test_the_plain_model_is_that_of_keras(self):
        layers = [keras.Input((6,)), L.Dense(6, "tanh"), L.Dense(2)]
        model = tf_gpipe.PipelinedSequential(
            layers, num_stages=2, num_micro_batches=2, devices=DEVICES[:2]
        )
        compiled(model, "adam")
        variables = steps.Variables(model)
        with steps.plain(model):
            step = steps.train(model, variables, DATA)
        variables.restore()
        plain = compiled(keras.Sequential(layers), "adam")
        loss = plain.train_on_batch(*DATA)
        self.assertAllClose(step.logs["loss"], loss)
        for i, v in enumerate(plain.trainable_variables):
            self.assertAllClose(step.variables[i], v, rtol=1e-6)

    def test_a_wrong_engine(self):
        class Wrong(tf_gpipe.PipelinedSequential):
            def loss_and_gradients(self, *args):
                loss, gradients, y_pred = super().loss_and_gradients(*args)
                return 2 * loss, [2 * x for x in gradients], y_pred

        report = tf_gpipe.verify(compiled(stack([], Wrong)), *DATA)
        self.assertFalse(report.ok)
        self.assertAlmostEqual(report.worst["loss"].difference, 1, places=4)
        self.assertIsNone(report.first_layer)
        self.assertIn("No layer differs by itself", str(report))

    def test_what_stages_lose(self):
        class Loses(tf_gpipe.PipelinedSequential):
            def _mini_batch(self, *args, **kwargs):
                run = super()._mini_batch(*args, **kwargs)
                put = run.exchange.put

                def zeros(k, m, outputs):
                    if k == 0:
                        *others, x = outputs.tensors
                        made = (*others, tf.zeros_like(x))
                        outputs = outputs._replace(tensors=made)
                    put(k, m, outputs)

                run.exchange.put = zeros
                return run

        model = stack([L.Dense(5)], Loses, balance=[2, 2])
        report = tf_gpipe.verify(compiled(model), *DATA)
        self.assertFalse(report.ok)
        self.assertEqual(report.first_layer, model.layers[1].name)
        self.assertEmpty(report.layers)

    @pytest.mark.slow
    def test_inputs_outputs_masks_and_weights(self):
        tokens = keras.Input((4,), name="tokens", dtype="int32")
        vector = keras.Input((3,), name="vector")
        x = L.Embedding(7, 4, mask_zero=True)(tokens)
        x = L.LSTM(4, return_sequences=True)(x)
        tags = L.Dense(3, name="tags")(x)
        x = L.Concatenate()([L.LSTM(3)(x), vector])
        plain = keras.Model(
            {"tokens": tokens, "vector": vector},
            {"tags": tags, "value": L.Dense(1, name="value")(x)},
        )
        model = tf_gpipe.PipelinedModel.from_model(
            plain,
            num_stages=3,
            num_micro_batches=2,
            schedule="gpipe",
            devices=DEVICES[:3],
        )
        sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        compiled(
            model,
            keras.optimizers.Adam(0.01, global_clipnorm=0.1),
            {"tags": sparse, "value": "mse"},
            weighted_metrics={"value": ["mae"], "tags": []},
        )
        random = np.random.default_rng(0)
        report = self.assert_verified(
            model,
            {"tokens": random.integers(0, 7, (5, 4)), "vector": numbers(5, 3)},
            {"tags": random.integers(0, 3, (5, 4)), "value": numbers(5, 1)},
            {"tags": np.ones((5, 4)), "value": np.arange(5.0)},
        )
        self.assertEqual(report.worst["metric"].ok, True)

    @pytest.mark.slow
    def test_steps_of_ones_own(self):
        class Signs(tf_gpipe.PipelinedSequential):
            def train_step(self, data):
                x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
                loss, gradients, _ = self.loss_and_gradients(x, y, weight)
                self.optimizer.apply(
                    [10 * g for g in gradients], self.trainable_variables
                )
                return {"loss": loss}

        class Offset(tf_gpipe.PipelinedSequential):
            def compute_loss(self, *args, **kwargs):
                return 1.0 + super().compute_loss(*args, **kwargs)

        class Doubled(tf_gpipe.PipelinedSequential):
            def call(self, inputs, training=None, mask=None):
                return 2.0 * super().call(inputs, training, mask)

        for cls in (Signs, Offset, Doubled):
            with self.subTest(cls.__name__):
                model = stack([], cls, schedule="gpipe")
                self.assert_verified(compiled(model), *DATA)

    def test_half_precision(self):
        policy = keras.DTypePolicy("mixed_bfloat16")
        model = stack([L.Dense(6, "tanh", dtype=policy)])
        report = self.assert_verified(compiled(model), *DATA)
        self.assertEqual(report.worst["gradient"].tolerance, 5e-2)

    @pytest.mark.slow
    def test_rounding_that_an_optimizer_magnifies(self):
        # The bias has a gradient of zero, but for rounding.
        layers = [L.Dense(6, name="zero"), L.LayerNormalization()]
        self.assert_verified(compiled(stack(layers), "adam"), *DATA)

    def test_a_statistic_that_is_zero_but_for_rounding(self):
        class Rounds(L.Layer):
            """Keeps a rounding error that depends on the number of rows."""

            def __init__(self):
                super().__init__()
                self.variable = tf.Variable(0.0, trainable=False)
                self.weight = self.add_weight((), "zeros", trainable=False)

            def call(self, x, training=None):
                if training:
                    rounding = 1e-9 * tf.cast(tf.shape(x)[0], "float32")
                    self.variable.assign(rounding)
                    self.weight.assign(rounding)
                return x

        self.assert_verified(compiled(stack([Rounds()])), *DATA)

    def test_random_numbers_that_are_not_those_of_keras(self):
        class Noise(L.Layer):
            def call(self, x, training=None):
                return x + tf.random.normal(tf.shape(x)) if training else x

        report = self.assert_verified(compiled(stack([Noise()])), *DATA)
        self.assertIn("does not repeat", str(report))
        self.assertEqual(report.compared, ["evaluation"])
        self.assertIn("numbers in evaluation, all that was", str(report))

    def test_random_numbers_in_all_steps(self):
        class Noise(L.Layer):
            def call(self, x):
                return x + tf.random.normal(tf.shape(x))

        report = tf_gpipe.verify(compiled(stack([Noise()])), *DATA)
        self.assertFalse(report.ok)
        self.assertEmpty([*report.compared, *report.layers, *report.problems])
        self.assertIn("could not be compared with the plain", str(report))
        self.assertIn("does not repeat", str(report))

    @pytest.mark.slow
    def test_random_numbers_of_xla(self):
        model = compiled(stack([L.Dropout(0.5)]), jit_compile=True)
        report = self.assert_verified(model, *DATA)
        self.assertEqual(report.compared, ["evaluation"])

    def test_a_model_too_large_for_one_device(self):
        rows = 10**11
        x = np.broadcast_to(np.zeros((1, 6), "float32"), (rows, 6))
        y = np.broadcast_to(np.zeros((1, 2), "float32"), (rows, 2))
        report = tf_gpipe.verify(compiled(stack([])), x, y)
        self.assertFalse(report.ok)
        self.assertIn("too large for one device", str(report))
        self.assertEmpty(report.worst)

    def test_what_cannot_be_compared_is_told(self):
        unbuilt = tf_gpipe.PipelinedSequential([L.Dense(2)], num_stages=1)

        class Fails(L.Layer):
            def call(self, x):
                if x.shape[0] not in (None, 10):
                    raise ValueError("not ten rows")
                return x

        for model, message in (
            (stack([]), "has not been compiled"),
            (compiled(unbuilt), "has not been built"),
            (keras.Sequential([L.Dense(1)]), "`model` must be a `Pipelined"),
            (None, "`model` must be a `Pipelined"),
            (compiled(stack([Fails()], num_micro_batches=2)), "not ten rows"),
        ):
            with self.subTest(message):
                report = tf_gpipe.verify(model, *DATA)
                self.assertFalse(report.ok)
                self.assertIn(message, " ".join(str(report).split()))

    def test_data_that_do_not_fit(self):
        report = tf_gpipe.verify(compiled(stack([])), numbers(4, 5), DATA[1])
        self.assertFalse(report.ok)
        self.assertNotEmpty(report.problems)

    @parameterized.parameters(
        (0, 1.0, "at least one row"),
        (4, np.nan, "In training the loss of the plain model is nan"),
        (4, np.inf, "In evaluation the loss of the plain model is inf"),
    )
    def test_data_that_tell_nothing(self, rows, factor, message):
        """Numbers that are no numbers are not called equal."""
        x, y = (value[:rows] for value in DATA)
        report = tf_gpipe.verify(compiled(stack([])), x, factor * y)
        self.assertFalse(report.ok)
        self.assertIn(message, " ".join(str(report).split()))

    def test_replicas(self):
        strategy = tf.distribute.MirroredStrategy(DEVICES[:1])
        with strategy.scope():
            model = compiled(stack([]))
        report = tf_gpipe.verify(model, *DATA)
        self.assertFalse(report.ok)
        self.assertIn("without the strategy", " ".join(str(report).split()))


if __name__ == "__main__":
    tf.test.main()
