"""Pipelines as replicas of a `MirroredStrategy`."""

import contextlib
import functools
import gc
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests.devices import KIND
from tests.tf_gpipe import comparison
from tf_gpipe.devices import replicas

SOFTMAX = keras.losses.SparseCategoricalCrossentropy


def data(rows=48, features=6, seed=0):
    generator = np.random.default_rng(seed)
    return (
        generator.standard_normal((rows, features), dtype="float32"),
        generator.integers(0, 3, (rows,)),
        generator.uniform(0, 2, (rows,)).astype("float32"),
    )


def dense():
    return [
        keras.Input((6,)),
        L.Dense(8, activation="relu", kernel_regularizer="l2"),
        L.Dense(8, activity_regularizer="l2"),
        L.LayerNormalization(),
        L.Dense(8, activation="relu"),
        L.Dense(3),
    ]


def normalized():
    return [
        keras.Input((6,)),
        L.Dense(8),
        L.BatchNormalization(momentum=0.5),
        L.ReLU(),
        L.Dense(3),
    ]


@functools.cache
def mirrored(num_replicas):
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)]
    )


class _Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


def train(make, num_replicas=1, batch_size=16, optimizer=None, **kwargs):
    """Fits a model for one epoch; with `kwargs`, a pipeline."""
    keras.utils.set_random_seed(1)
    strategy = tf.distribute.get_strategy()
    if num_replicas > 1:
        strategy = mirrored(num_replicas)
    with strategy.scope():
        if kwargs:
            model = tf_gpipe.PipelinedSequential(make(), **kwargs)
        else:
            model = keras.Sequential(make())
        model.compile(
            optimizer() if optimizer else keras.optimizers.Adam(0.01),
            SOFTMAX(from_logits=True),
            metrics=["accuracy"],
        )
    x, y, weight = data()
    losses = _Losses()
    model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
        callbacks=[losses],
    )
    return model, losses.logs


@functools.cache
def plain_dense():
    """Returns the trained plain model, which tests leave as it is."""
    return train(dense)


def components(variable):
    value = getattr(variable, "value", variable)
    if isinstance(value, tf.distribute.DistributedValues):
        strategy = value.distribute_strategy
        return list(strategy.experimental_local_results(value))
    return [value]


def short(devices):
    return [device.rpartition("device:")[2] for device in devices]


class SumsTest(tf.test.TestCase):
    def test_the_users_way(self):
        class Own(tf.distribute.CrossDeviceOps):
            pass

        devices = ["CPU:0", "CPU:1"]
        for way in (
            Own(),
            tf.distribute.HierarchicalCopyAllReduce(),
            tf.distribute.NcclAllReduce(),
        ):
            strategy = tf.distribute.MirroredStrategy(devices, way)
            found = replicas._cross_device_ops(strategy, devices, tf.float32)
            self.assertIs(found, way)
        strategy = tf.distribute.MirroredStrategy(devices)
        found = replicas._cross_device_ops(strategy, devices, tf.float32)
        self.assertIsInstance(found, tf.distribute.ReductionToOneDevice)


class ReplicasTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.slow
    def test_equals_one_device(self):
        self.assert_equals_one_device((2, 2), "1f1b")

    @pytest.mark.slow
    def test_masks(self):
        # Both halves have the same mask: Keras takes the mean of both means.
        x = np.tile(np.arange(20).reshape((4, 5)) % 7, (2, 1))
        y = np.tile(np.arange(20).reshape((4, 5)) % 3, (2, 1))

        def trained(strategy, make):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = make(
                    [
                        keras.Input((5,), dtype="int32"),
                        L.Embedding(7, 4, mask_zero=True),
                        L.GRU(4, return_sequences=True),
                        L.Dense(3),
                    ]
                )
                model.compile("sgd", SOFTMAX(from_logits=True))
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            return model.get_weights()

        make = functools.partial(
            tf_gpipe.PipelinedSequential, num_stages=2, num_micro_batches=3
        )
        plain = trained(tf.distribute.get_strategy(), keras.Sequential)
        self.assertAllClose(trained(mirrored(2), make), plain)

    @parameterized.parameters(
        ((2, 2), "gpipe"),
        ((2, 3), "gpipe"),
        ((2, 3), "1f1b"),
        ((4, 2), "gpipe"),
        ((4, 2), "1f1b"),
    )
    @pytest.mark.slow
    def test_equals_one_device_on_more(self, grid, schedule):
        self.assert_equals_one_device(grid, schedule)

    def assert_equals_one_device(self, grid, schedule):
        num_replicas, num_stages = grid
        plain = plain_dense()
        pipelined = train(
            dense,
            num_replicas,
            num_stages=num_stages,
            num_micro_batches=3,
            schedule=schedule,
        )
        comparison.assert_same(self, plain, pipelined)
        x, y, weight = data(seed=1)
        np.testing.assert_allclose(
            pipelined[0].predict(x, batch_size=16, verbose=0),
            plain[0].predict(x, batch_size=16, verbose=0),
            rtol=1e-4,
            atol=1e-5,
        )
        np.testing.assert_allclose(
            pipelined[0].evaluate(
                x, y, sample_weight=weight, batch_size=16, verbose=0
            ),
            plain[0].evaluate(
                x, y, sample_weight=weight, batch_size=16, verbose=0
            ),
            rtol=1e-4,
            atol=1e-5,
        )

    @parameterized.parameters("always", "except_last", "never")
    @pytest.mark.slow_after(1)
    def test_remat(self, remat):
        comparison.assert_same(
            self,
            plain_dense(),
            train(dense, 2, num_stages=2, num_micro_batches=2, remat=remat),
        )

    @parameterized.parameters(
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.Adafactor(0.01),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=8.0
        ),
    )
    @pytest.mark.slow_after(1)
    def test_optimizers(self, optimizer):
        comparison.assert_same(
            self,
            train(dense, optimizer=optimizer),
            train(
                dense,
                2,
                optimizer=optimizer,
                num_stages=2,
                num_micro_batches=2,
            ),
            rtol=1e-4,
            atol=1e-5,
        )

    @pytest.mark.slow
    def test_interleaved(self):
        comparison.assert_same(
            self,
            plain_dense(),
            train(
                dense,
                2,
                num_stages=4,
                num_micro_batches=2,
                schedule="interleaved",
                devices=[["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]],
            ),
        )

    @parameterized.parameters(None, [[["CPU:1", "CPU:4"], ["CPU:6", "CPU:3"]]])
    @pytest.mark.slow_after(1)
    def test_each_component_is_on_its_replica_s_device_of_its_stage(
        self, devices=None
    ):
        model, _ = train(
            dense, 2, num_stages=2, num_micro_batches=2, devices=devices
        )
        grid = devices or [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]
        weights = model.trainable_variables
        slots = {}
        for slot in model.optimizer.variables[2:]:
            owner = next(
                w
                for w in weights
                if slot.path.endswith(w.path.replace("/", "_") + "_momentum")
                or slot.path.endswith(w.path.replace("/", "_") + "_velocity")
            )
            slots.setdefault(id(owner), []).append(slot)
        self.assertLen(slots, len(weights))
        for k, stage in enumerate(model.stages):
            wanted = [f"CPU:{row[k][-1]}" for row in grid]
            self.assertEqual(short(stage.devices), wanted)
            for variable in stage.variables:
                for x in [variable, *slots.get(id(variable), [])]:
                    self.assertEqual(
                        short(c.device for c in components(x)), wanted, x.path
                    )

    def test_components_stay_equal(self):
        model, _ = train(normalized, 2, num_stages=2, num_micro_batches=4)
        for variable in [*model.variables, *model.optimizer.variables]:
            first, second = components(variable)
            self.assertAllEqual(first, second)

    @pytest.mark.slow
    def test_batch_normalization_is_keras_s_with_one_micro_batch(self):
        plain, plain_logs = train(normalized, 2)
        model, logs = train(normalized, 2, num_stages=2, num_micro_batches=1)
        for variable, keras_s in zip(
            model.variables, plain.variables, strict=True
        ):
            # Keras's moving statistics drift apart. Ours are their mean.
            expected = np.mean(components(keras_s), axis=0)
            for x in components(variable):
                self.assertAllClose(x, expected, msg=variable.path)
        self.assertAllClose(
            [x["loss"] for x in logs], [x["loss"] for x in plain_logs]
        )

    @parameterized.parameters(1, 4)
    @pytest.mark.slow
    def test_synchronized_batch_normalization(self, num_micro_batches):
        def make():
            layers = normalized()
            layers[2] = L.BatchNormalization(momentum=0.5, synchronized=True)
            return layers

        def sgd():
            return keras.optimizers.SGD(0.1)

        plain = train(normalized, optimizer=sgd)
        pipelined = train(
            make,
            2,
            optimizer=sgd,
            num_stages=2,
            num_micro_batches=num_micro_batches,
        )
        if num_micro_batches == 1:
            comparison.assert_same(self, plain, pipelined, rtol=1e-4)
        for variable in pipelined[0].variables:
            first, second = components(variable)
            self.assertAllClose(first, second, msg=variable.path)

    def test_synchronized_batch_normalization_is_not_for_xla(self):
        with mirrored(2).scope():
            model = tf_gpipe.PipelinedSequential(
                [keras.Input((6,)), L.BatchNormalization(synchronized=True)],
                num_stages=1,
            )
            model.compile("sgd", "mse", jit_compile=True)
        x = data()[0]
        with self.assertRaisesRegex(ValueError, "several replicas"):
            model.fit(x, x, batch_size=16, verbose=0)

    @pytest.mark.slow
    def test_dropout_differs_between_replicas_and_repeats(self):
        def make():
            return [
                keras.Input((6,)),
                L.Dense(64),
                L.Dropout(0.5, seed=3),
                L.Dropout(0.5),
            ]

        strategy = mirrored(2)
        with strategy.scope():
            keras.utils.set_random_seed(2)
            model = tf_gpipe.PipelinedSequential(
                make(), num_stages=2, num_micro_batches=2
            )
        x = tf.ones((4, 6))
        run = tf.function(lambda: strategy.run(model, (x,), {"training": True}))
        masks = [
            tuple(row)
            for part in strategy.experimental_local_results(run())
            for row in (part.numpy() != 0)
        ]
        self.assertLen(set(masks), 8)
        for variable in model.non_trainable_variables:
            first, second = components(variable)
            self.assertAllEqual(first, second)

        def fit():
            return train(
                lambda: [*make(), L.Dense(3)],
                2,
                num_stages=2,
                num_micro_batches=2,
            )

        comparison.assert_same(self, fit(), fit(), rtol=0, atol=0)

    def test_noise_without_a_generator(self):
        class Shaken(L.Layer):
            def call(self, x):
                return x + keras.random.normal(keras.ops.shape(x))

        strategy = mirrored(2)
        with strategy.scope():
            keras.utils.set_random_seed(2)
            model = tf_gpipe.PipelinedSequential(
                [keras.Input((6,)), Shaken(), L.Identity()],
                num_stages=2,
                num_micro_batches=2,
            )
        x = tf.zeros((4, 6))
        run = tf.function(lambda: strategy.run(model, (x,), {"training": True}))
        rows = [
            tuple(row.numpy())
            for _ in range(2)
            for part in strategy.experimental_local_results(run())
            for row in part
        ]
        self.assertLen(set(rows), 2 * 2 * 4)

    @pytest.mark.slow
    def test_another_seed_between_two_fits(self):
        with mirrored(2).scope():
            model = tf_gpipe.PipelinedSequential(
                dense(), num_stages=2, num_micro_batches=2
            )
            model.compile(
                "sgd", SOFTMAX(from_logits=True), steps_per_execution=3
            )
        x, y, _ = data()
        model.fit(x, y, batch_size=16, verbose=0)
        # Drops Keras's generator, which the first step has read.
        keras.utils.set_random_seed(5)
        gc.collect()
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        model.fit(batches.repeat(), steps_per_epoch=3, verbose=0)
        self.assertEqual(model.optimizer.iterations, 6)

    def test_first_replica_draws_as_without_replicas(self):
        def outputs(strategy):
            with strategy.scope():
                keras.utils.set_random_seed(2)
                model = tf_gpipe.PipelinedSequential(
                    [keras.Input((6,)), L.Dropout(0.5), L.Dropout(0.5, seed=1)],
                    num_stages=2,
                    num_micro_batches=2,
                )
            x = tf.ones((4, 6))
            found = tf.function(
                lambda: strategy.run(model, (x,), {"training": True})
            )()
            return strategy.experimental_local_results(found)[0]

        self.assertAllEqual(
            outputs(mirrored(2)), outputs(tf.distribute.get_strategy())
        )

    def test_custom_loop_over_the_model_as_a_layer(self):
        strategy = mirrored(2)

        def build():
            keras.utils.set_random_seed(1)
            layers = dense()[1:]
            inputs = keras.Input((6,))
            return inputs, layers

        inputs, layers = build()
        plain = keras.Model(inputs, keras.Sequential(layers)(inputs))
        with strategy.scope():
            inputs, layers = build()
            stack = tf_gpipe.PipelinedSequential(
                layers, num_stages=2, num_micro_batches=2
            )
            model = keras.Model(inputs, stack(inputs))
        x, y, _ = data(rows=8)

        def gradients(model, x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(
                    keras.losses.sparse_categorical_crossentropy(
                        y, model(x, training=True), from_logits=True
                    )
                )
            return tape.gradient(loss, model.trainable_variables)

        @tf.function
        def step():
            def replica():
                context = tf.distribute.get_replica_context()
                i = context.replica_id_in_sync_group
                return context.all_reduce(
                    "sum",
                    gradients(
                        model, x[i * 4 : i * 4 + 4], y[i * 4 : i * 4 + 4]
                    ),
                )

            return strategy.run(replica)

        x, y = tf.constant(x), tf.constant(y)
        for expected, received in zip(
            gradients(plain, x, y), step(), strict=True
        ):
            for part in strategy.experimental_local_results(received):
                self.assertAllClose(part, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    def test_saved_in_a_strategy_loaded_without(self):
        model, _ = train(normalized, 2, num_stages=2, num_micro_batches=2)
        path = os.path.join(self.get_temp_dir(), "model.weights.h5")
        model.save_weights(path)
        plain = keras.Sequential(normalized())
        plain.load_weights(path)
        x, _, _ = data()
        self.assertAllClose(
            plain.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4
        )
        with mirrored(2).scope():
            other = tf_gpipe.PipelinedSequential(
                normalized(), num_stages=1, num_micro_batches=2
            )
            other.load_weights(path)
        for variable in other.variables:
            first, second = components(variable)
            self.assertAllEqual(first, second)

    @pytest.mark.slow
    def test_built_by_fit(self):
        keras.utils.set_random_seed(1)
        with mirrored(2).scope():
            model = tf_gpipe.PipelinedSequential(
                dense()[1:], num_stages=2, num_micro_batches=2
            )
            model.compile("adam", SOFTMAX(from_logits=True))
        x, y, _ = data()
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        for stage in model.stages:
            for variable in stage.variables:
                self.assertEqual(
                    short(x.device for x in components(variable)),
                    short(stage.devices),
                )

    @parameterized.parameters(True, False)
    @pytest.mark.slow
    def test_rebalance(self, in_scope):
        moved, _ = train(
            dense, 2, num_stages=2, num_micro_batches=2, balance=[4, 1]
        )
        stays, _ = train(
            dense, 2, num_stages=2, num_micro_batches=2, balance=[1, 4]
        )
        scope = mirrored(2).scope() if in_scope else contextlib.nullcontext()
        with scope:
            moved.rebalance([1, 4])
        for variable, other in zip(
            [*moved.variables, *moved.optimizer.variables],
            [*stays.variables, *stays.optimizer.variables],
            strict=True,
        ):
            self.assertAllClose(variable, other, rtol=1e-4, atol=1e-5)
            self.assertEqual(
                [x.device for x in components(variable)],
                [x.device for x in components(other)],
                variable.path,
            )
        x, y, _ = data()
        a = moved.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        b = stays.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        self.assertAllClose(a.history["loss"], b.history["loss"], rtol=1e-4)

    @pytest.mark.slow
    def test_weights_loaded_outside_the_scope(self):
        options = {"num_stages": 2, "num_micro_batches": 2}
        path = os.path.join(self.get_temp_dir(), "file.weights.h5")
        saved, _ = train(dense, 2, **options)
        saved.save_weights(path)
        with mirrored(2).scope():
            loaded = tf_gpipe.PipelinedSequential(dense(), **options)
            loaded.compile("adam", "mse")
        loaded.load_weights(path)
        for variable, other in zip(
            [*loaded.variables, *loaded.optimizer.variables],
            [*saved.variables, *saved.optimizer.variables],
            strict=True,
        ):
            self.assertAllEqual(variable, other)
            self.assertEqual(
                [x.device for x in components(variable)],
                [x.device for x in components(other)],
                variable.path,
            )

    @pytest.mark.slow
    def test_timeline_is_the_first_replica_s(self):
        model, _ = train(dense, 2, num_stages=2, num_micro_batches=4)
        recorder = tf_gpipe.callbacks.Timeline()
        x, y, _ = data()
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[recorder])
        self.assertEqual(short(recorder.devices), [f"{KIND}:0", f"{KIND}:1"])
        tasks = {str(s.task) for s in recorder.spans if s.task.kind in "FB"}
        self.assertLen(tasks, 16)

    @pytest.mark.slow
    def test_summary_shows_all_devices(self):
        model, _ = train(dense, 2, num_stages=2, num_micro_batches=4)
        lines = []
        model.summary(print_fn=lines.append, line_length=120)
        for device in ("CPU:0", "CPU:1", "CPU:2", "CPU:3"):
            self.assertIn(device, lines[-1])


class ErrorsTest(tf.test.TestCase, parameterized.TestCase):
    def test_too_few_devices_shows_the_grid(self):
        with mirrored(4).scope():
            with self.assertRaisesRegex(
                ValueError,
                r"4 replicas of 3 stages need 12 devices. Visible: 8 \("
                rf"(.|\n)*replica 2: .*{KIND}:6, .*{KIND}:7, missing\n"
                r" *replica 3: missing, missing, missing\n",
            ):
                tf_gpipe.PipelinedSequential(dense(), num_stages=3)

    def test_rows_of_another_number(self):
        with mirrored(4).scope():
            with self.assertRaisesRegex(
                ValueError, "each of the 4 replicas of the strategy"
            ):
                tf_gpipe.PipelinedSequential(
                    dense(), num_stages=2, devices=["CPU:0", "CPU:1"]
                )

    def test_row_without_strategy(self):
        model = tf_gpipe.PipelinedSequential(
            dense(), num_stages=2, devices=[["CPU:3", "CPU:1"]]
        )
        self.assertEqual(
            short(stage.device for stage in model.stages), ["CPU:3", "CPU:1"]
        )

    def test_other_strategies(self):
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            with self.assertRaisesRegex(ValueError, "OneDeviceStrategy"):
                tf_gpipe.PipelinedSequential(dense(), num_stages=1)

    def test_built_within_a_replica(self):
        strategy = mirrored(2)
        with strategy.scope():
            model = tf_gpipe.PipelinedSequential(dense()[1:], num_stages=2)
        with self.assertRaisesRegex(RuntimeError, "within a replica"):
            strategy.run(lambda: model(tf.ones((4, 6))))


if __name__ == "__main__":
    tf.test.main()
