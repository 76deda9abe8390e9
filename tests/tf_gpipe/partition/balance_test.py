"""Costs that `balance` names or computes, and the state `rebalance` keeps."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.tf_gpipe import comparison
from tests.tf_gpipe.partition.uncountable import Endless
from tf_gpipe.devices import slots
from tf_gpipe.partition import measured_calls

LAYERS = keras.layers


def make_images():
    """Convolutions: few weights and much work. Dense layers: the reverse."""
    return [
        keras.Input((16, 16, 3)),
        LAYERS.Conv2D(8, 3, padding="same"),
        LAYERS.BatchNormalization(),
        LAYERS.Conv2D(8, 3, padding="same"),
        LAYERS.Dropout(0.3),
        LAYERS.Conv2D(8, 3, strides=4, padding="same"),
        LAYERS.Flatten(),
        LAYERS.Dense(64, activation="relu"),
        LAYERS.Dense(2),
    ]


def make_dense(num_layers=6):
    return [
        keras.Input((4,)),
        *(
            LAYERS.Dense(4, activation="tanh", name=f"dense_{i}")
            for i in range(num_layers)
        ),
    ]


@keras.saving.register_keras_serializable(package="balance_test")
class Doubled(LAYERS.Layer):
    """A composite layer: twice as wide inside, with noise of its own."""

    def build(self, input_shape):
        self.inner = LAYERS.Dense(2 * input_shape[-1])
        self.outer = LAYERS.Dense(input_shape[-1])
        self.inner.build(input_shape)
        self.outer.build((*input_shape[:-1], 2 * input_shape[-1]))

    def call(self, x, training=None):
        if training:
            # Drawn by Keras's own seed generator.
            x += keras.random.normal(keras.ops.shape(x), stddev=0.1)
        return x + self.outer(self.inner(x))


class Handed(LAYERS.Layer):
    """Returns its weight in the form that `read` returns."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def build(self, input_shape):
        self.weight = self.add_weight(shape=(3, 4), initializer="ones")
        self.fixed = tf.Variable([[1.0, 2.0, 3.0, 4.0]] * 3)

    def call(self, x):
        return self.read(self)

    def compute_output_spec(self, x):
        return keras.KerasTensor((3, 4), "float32")


def pipelined(layers, balance="parameters", num_stages=2, **kwargs):
    kwargs.setdefault("num_micro_batches", 2)
    return tf_gpipe.PipelinedSequential(
        layers,
        num_stages=num_stages,
        balance=balance,
        devices=[f"CPU:{k}" for k in range(num_stages)],
        **kwargs,
    )


def counts(model):
    return [len(stage.layers) for stage in model.stages]


class BalanceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        # Nearly all weights are in the first dense layer. The layer in front of
        # it has none.
        ("parameters", [5, 3]),
        # Nearly all work is in the second convolution.
        ("flops", [2, 6]),
        ([1, 7], [1, 7]),
        ((7, 1), [7, 1]),
        (np.array([3, 5]), [3, 5]),
        ([np.int64(4), np.int32(4)], [4, 4]),
    )
    def test_images(self, balance, expected):
        model = pipelined(make_images(), balance)
        self.assertEqual(counts(model), expected)
        self.assertEqual(model(tf.zeros((4, 16, 16, 3))).shape, (4, 2))

    @parameterized.parameters(("always", [2, 3]), ("never", [1, 4]))
    def test_memory(self, remat, expected):
        layers = [
            keras.Input((64, 8)),
            # All have 2 * 256 bytes of weights and gradients and 2,048 of
            # output; the activation keeps several times as much.
            LAYERS.Dense(8, use_bias=False, activation="gelu"),
            *(LAYERS.Dense(8, use_bias=False) for _ in range(4)),
        ]
        model = pipelined(layers, "memory", remat=remat)
        self.assertEqual(counts(model), expected)

    @pytest.mark.filterwarnings("ignore:Stage 1 of model")
    def test_time(self):
        # The third layer takes many times as long as all others together, so
        # that it is alone in its stage.
        widths = [8, 2000, 2000, 8, 8, 8]
        layers = [keras.Input((8,)), *(LAYERS.Dense(n) for n in widths)]
        model = pipelined(layers, "time", num_stages=3, remat="never")
        self.assertEqual(counts(model), [2, 1, 3])

    def test_time_of_layers_with_any_results(self):
        """Gradients that are slices or `None`, integers, and no elements."""

        def ends(x):
            return {
                "count": keras.ops.argmax(x, -1),
                "empty": x[:, :0],
                "mean": keras.ops.mean(x, -1),
            }

        tokens = keras.Input((3,), dtype="int32")
        x = LAYERS.Embedding(5, 4)(tokens)
        x = LAYERS.Flatten()(x)
        outputs = LAYERS.Lambda(ends)(LAYERS.Dropout(0.1)(x))
        model = tf_gpipe.PipelinedModel(
            tokens, outputs, num_stages=2, num_micro_batches=2, balance="time"
        )
        self.assertLen(model.stages, 2)

    def test_measured_is_a_number_that_needs_all_results(self):
        """Whole results would be sent here from the device."""
        results = {
            "slices": tf.IndexedSlices(tf.ones((2, 3)), tf.constant([0, 1])),
            "pair": [None, tf.fill((2, 4), 3.0)],
            "integers": tf.constant([[2, 2]]),
            "empty": tf.zeros((0, 2)),
        }
        found = measured_calls._number(results)
        self.assertEqual(found.shape, ())
        self.assertAllClose(found, 1.0 + 0.0 + 3.0 + 2.0)
        self.assertAllClose(measured_calls._number([None]), 0.0)

    @parameterized.parameters("time", "flops", "memory")
    def test_measuring_changes_nothing(self, balance):
        def make():
            dense = make_dense()
            return [
                *dense[:3],
                Doubled(),
                LAYERS.BatchNormalization(),
                LAYERS.Dropout(0.5),
                *dense[3:],
            ]

        models = []
        for name in ("parameters", balance):
            keras.backend.clear_session(free_memory=False)
            keras.utils.set_random_seed(7)
            models.append(pipelined(make(), name))
        expected, model = models
        # Weights, moving statistics and the state of seeds.
        self.assertGreater(len(model.variables), len(model.weights))
        for a, b in zip(model.variables, expected.variables, strict=True):
            self.assertAllEqual(a, b)

    def test_function_and_its_shapes(self):
        seen = {}

        def cost(layer, input_shape):
            seen[layer.name] = input_shape
            return np.float32(5) if layer.name == "dense_1" else 1

        model = pipelined(make_dense(), cost)
        # 1 + 5 and 4 rather than 1 and 5 + 4.
        self.assertEqual(counts(model), [2, 4])
        self.assertEqual(seen, {f"dense_{i}": (1, 4) for i in range(6)})

    def test_shapes_of_images(self):
        seen = []

        def cost(layer, input_shape):
            seen.append(input_shape)
            return 1

        layers = make_images()
        layers[0] = keras.Input((16, 16, 3), batch_size=4)
        pipelined(layers, cost)
        self.assertEqual(
            seen,
            [(4, 16, 16, 3)]
            + [(4, 16, 16, 8)] * 4
            + [(4, 4, 4, 8), (4, 128), (4, 64)],
        )

    def test_composite_and_custom_layers(self):
        layers = [
            keras.Input((4,)),
            *(LAYERS.Dense(4) for _ in range(3)),
            keras.Sequential([LAYERS.Dense(32), LAYERS.Dense(4)]),
            Doubled(),
        ]
        # The `Sequential` is two layers. Operations of a row: 36 each,
        # 2 * 4 * 32 + 32, 2 * 4 * 32 + 4, 2 * 4 * 8 * 2 + 16.
        # Parameters: 20 each, 160, 132 and 76.
        for balance in ("flops", "parameters"):
            model = pipelined(layers, balance, remat="never")
            self.assertEqual(counts(model), [4, 2])

    @parameterized.parameters(
        ("1f1b", "always", [3, 5]),
        ("zero_bubble", "always", [3, 5]),
        ("gpipe", "always", [4, 4]),
        ("1f1b", "never", [4, 4]),
    )
    def test_what_is_recomputed_counts(self, schedule, remat, expected):
        layers = [keras.Input((4,)), *(LAYERS.Dense(4) for _ in range(8))]
        for balance in ("flops", "parameters"):
            model = pipelined(layers, balance, schedule=schedule, remat=remat)
            # Recomputation does not change the number of parameters.
            counted = expected if balance == "flops" else [4, 4]
            self.assertEqual(counts(model), counted)

    def test_saved_with_a_function(self):
        model = pipelined(
            make_dense(), lambda layer, _: int(layer.name[-1]) ** 3
        )
        self.assertEqual(counts(model), [5, 1])
        path = os.path.join(self.get_temp_dir(), "a.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        self.assertEqual(counts(loaded), [5, 1])
        x = np.ones((4, 4), "float32")
        self.assertAllEqual(loaded.predict(x), model.predict(x))

    @parameterized.parameters("parameters", "flops", "time", "memory")
    @pytest.mark.slow_after(1)
    def test_layers_that_return_weights(self, balance):
        reads = (
            lambda layer: layer.weight,
            lambda layer: keras.ops.convert_to_tensor(layer.weight),
            lambda layer: layer.weight.value,
            lambda layer: layer.fixed,
        )
        layers = [Handed(read) for read in reads]
        x = keras.Input((4,), 8)
        hidden = LAYERS.Dense(4)(x)
        outputs = {layer.name: layer(hidden) for layer in layers}
        outputs["loss"] = LAYERS.Dense(2)(hidden)
        model = tf_gpipe.PipelinedModel(
            x, outputs, num_stages=2, num_micro_batches=2, balance=balance
        )
        model.compile("sgd", {"loss": "mse"})
        model.train_on_batch(np.ones((8, 4)), {"loss": np.ones((8, 2))})
        found = model.predict(np.ones((8, 4)), verbose=0)
        for read, layer in zip(reads, layers, strict=True):
            weight = keras.ops.convert_to_numpy(read(layer))
            self.assertAllEqual(found[layer.name], weight)

    def test_a_function_needs_no_operation_counts(self):
        # The error about an uncountable layer recommends a function.
        layers = [keras.Input((4,)), LAYERS.Dense(4), Endless()]
        model = pipelined(layers, lambda layer, shape: 1)
        self.assertEqual(counts(model), [1, 1])


class ErrorsTest(tf.test.TestCase, parameterized.TestCase):
    def test_unknown_name(self):
        with self.assertRaisesRegex(
            ValueError, "'parameters', 'flops', 'time', 'memory'.*'speed'"
        ):
            pipelined(make_dense(), "speed")

    @parameterized.parameters(-1, float("nan"), float("inf"), "1", None, 1j)
    def test_cost(self, cost):
        with self.assertRaisesRegex(
            ValueError, "non-negative number.*'dense_2'"
        ):
            pipelined(
                make_dense(),
                lambda layer, _: cost if layer.name == "dense_2" else 1,
            )

    @parameterized.parameters("flops", "memory")
    def test_uncountable_layer(self, balance):
        layers = [keras.Input((4,)), LAYERS.Dense(4), Endless(name="endless")]
        with self.assertRaisesRegex(
            ValueError, "cost of layer 'endless' .*Endless.*cannot be found"
        ):
            pipelined(layers, balance)

    def test_rebalance_before_build(self):
        model = pipelined(make_dense()[1:])
        with self.assertRaisesRegex(ValueError, "has not been built"):
            model.rebalance("flops")

    @parameterized.parameters("speed", [[1, 4]], [[1, 1, 4]], [[0, 6]], 3)
    def test_rebalance(self, *balance):
        balance = balance[0]
        model = pipelined(make_dense())
        with self.assertRaisesRegex(ValueError, "`balance`"):
            model.rebalance(balance)
        self.assertEqual(counts(model), [3, 3])

    def test_rebalance_that_fails_changes_nothing(self):
        model = pipelined(make_dense())
        with self.assertRaisesRegex(ValueError, "non-negative number"):
            model.rebalance(lambda layer, shape: -1)
        layers = [keras.Input((4,)), LAYERS.Dense(4), Endless()]
        model = pipelined(layers)
        with self.assertRaisesRegex(ValueError, "cannot be found"):
            model.rebalance("flops")
        # Else the model could be saved, but not loaded.
        self.assertEqual(model.get_config()["balance"], "parameters")


class RebalanceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"balance": [5, 1]},
        {"balance": "time"},
        {"balance": lambda layer, shape: int(layer.name[-1]) ** 3},
        {"balance": [1, 5], "schedule": "gpipe", "remat": "never"},
    )
    @pytest.mark.slow_after(1)
    def test_training_goes_on(self, balance, **options):
        random = np.random.default_rng(0)
        x, y = random.normal(size=(2, 8, 8, 4)).astype("float32")
        options = {
            "devices": ["CPU:0", "CPU:1"],
            "num_stages": 2,
            "num_micro_batches": 2,
            **options,
        }
        models = []
        for _ in range(2):
            keras.utils.set_random_seed(1)
            model = tf_gpipe.PipelinedSequential(make_dense(), **options)
            model.compile(keras.optimizers.Adam(0.01), "mse")
            history = model.fit(x[0], y[0], batch_size=4, verbose=0)
            models.append((model, [history.history]))
        (twin, twin_logs), (model, logs) = models
        before = [
            np.asarray(v) for v in model.variables + model.optimizer.variables
        ]
        model.rebalance(balance)
        after = [*model.variables, *model.optimizer.variables]
        for a, b in zip(after, before, strict=True):
            self.assertAllEqual(a, b)
        if isinstance(balance, list):
            self.assertEqual(counts(model), balance)
        self.assert_on_devices(model)
        for one, kept in ((twin, twin_logs), (model, logs)):
            for i in range(1, 8):
                kept.append(one.train_on_batch(x[i], y[i], return_dict=True))
            kept.append(one.evaluate(x[0], y[0], return_dict=True, verbose=0))
        comparison.assert_same(self, (twin, twin_logs), (model, logs))
        self.assertAllClose(model.predict(x[0]), twin.predict(x[0]))
        self.assert_on_devices(model)

    def assert_on_devices(self, model):
        weights = model.trainable_variables
        slots_of = slots.of_optimizer(model.optimizer, weights)
        own = {id(w): x for w, x in zip(weights, slots_of, strict=True)}
        for stage in model.stages:
            for weight in stage.owned:
                self.assertEndsWith(weight.value.device, stage.device)
                # Adam's two moments.
                self.assertLen(own[id(weight)], 2)
                for slot in own[id(weight)]:
                    self.assertEndsWith(slot.value.device, stage.device)

    def test_optimizer_without_variables(self):
        model = pipelined(make_dense())
        model.compile("adam", "mse")
        model.rebalance([1, 5])
        x = np.ones((4, 4), "float32")
        model.fit(x, x, verbose=0)
        self.assertEqual(counts(model), [1, 5])
        self.assert_on_devices(model)

    def test_layers_frozen_since(self):
        # The optimizer still has the slots of weights that no longer train.
        x = np.ones((4, 4), "float32")
        model = pipelined(make_dense())
        model.compile("adam", "mse")
        model.fit(x, x, verbose=0)
        slots_of = slots.of_optimizer(
            model.optimizer, model.trainable_variables
        )
        model.layers[0].trainable = False
        model.rebalance([1, 5])
        for weight, own in zip(model.weights[2:], slots_of[2:], strict=True):
            for slot in own:
                self.assertEqual(slot.value.device, weight.value.device)

    def test_loss_scale_optimizer(self):
        x = np.ones((4, 4), "float32")
        model = pipelined(make_dense())
        adam = keras.optimizers.Adam()
        model.compile(keras.optimizers.LossScaleOptimizer(adam), "mse")
        model.fit(x, x, verbose=0)
        model.rebalance([1, 5])
        model.fit(x, x, verbose=0)
        self.assert_on_devices(model)
        self.assertEqual(adam.iterations, 2)

    @pytest.mark.slow
    def test_multi_optimizer(self):
        # Layer 0 has one of its own.
        def make():
            return keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(
                    keras.optimizers.Adam(0.01),
                    {".*dense_0/.*": keras.optimizers.Adam(0.1)},
                )
            )

        x = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")
        trained = []
        for balances in ([1, 5], [5, 1]), ([5, 1],):
            keras.utils.set_random_seed(1)
            model = pipelined(make_dense(), balance=balances[0])
            model.compile(make(), "mse")
            logs = [model.train_on_batch(x, x, return_dict=True)]
            for balance in balances[1:]:
                model.rebalance(balance)
                self.assert_on_devices(model)
            logs.append(model.train_on_batch(x, x, return_dict=True))
            trained.append((model, logs))
        comparison.assert_same(self, *trained)

    def test_saved_after_a_rebalance(self):
        model = pipelined(make_dense())
        model.rebalance([1, 5])
        path = os.path.join(self.get_temp_dir(), "a.keras")
        model.save(path)
        self.assertEqual(counts(keras.saving.load_model(path)), [1, 5])


if __name__ == "__main__":
    tf.test.main()
