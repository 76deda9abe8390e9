"""All that is done with a Keras model, with a pipeline and a plain model."""

import inspect
import itertools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests import pairwise
from tests.devices import KIND

BATCH = 8
ROWS = 20  # two full batches and one of 4


def make_layers(num_outputs=1, activation=None):
    return [
        keras.Input((5,)),
        keras.layers.Dense(8, activation="tanh", name="first"),
        keras.layers.Dense(6, activation="tanh", name="second"),
        keras.layers.Dense(num_outputs, activation=activation, name="third"),
    ]


def pipelined(layers, num_stages=2, cls=None, **kwargs):
    cls = cls or tf_gpipe.PipelinedSequential
    kwargs.setdefault("num_micro_batches", 3)
    kwargs.setdefault("devices", [f"CPU:{k}" for k in range(num_stages)])
    return cls(layers, num_stages=num_stages, **kwargs)


def make_pair(make=make_layers, cls=None, plain_cls=keras.Sequential, **kwargs):
    """Returns a plain model and a pipeline with equal weights."""
    plain = plain_cls(make())
    model = pipelined(make(), cls=cls, **kwargs)
    model.set_weights(plain.get_weights())
    return plain, model


def make_data(rows=ROWS, outputs=1):
    random = np.random.default_rng(1)
    x = random.normal(size=(rows, 5)).astype("float32")
    y = random.normal(size=(rows, outputs)).astype("float32")
    return x, y


def make_classes(rows=ROWS):
    x, _ = make_data(rows)
    return x, np.random.default_rng(2).integers(0, 3, size=(rows,))


class PlainDoubled(keras.Sequential):
    def call(self, inputs, training=None, mask=None):
        return 2.0 * super().call(inputs, training=training, mask=mask)


class Doubled(tf_gpipe.PipelinedSequential):
    def call(self, inputs, training=None, mask=None):
        return 2.0 * super().call(inputs, training=training, mask=mask)


class Heads(keras.layers.Layer):
    """Two outputs, by name."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.a = keras.layers.Dense(1)
        self.b = keras.layers.Dense(2)

    def build(self, shape):
        self.a.build(shape)
        self.b.build(shape)

    def call(self, x):
        return {"a": self.a(x), "b": self.b(x)}


class Counted(keras.layers.Dense):
    """Counts how often Python runs it."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return super().call(x)


class OnHost(keras.layers.Layer):
    """Calls NumPy on the host, which XLA cannot compile."""

    def call(self, x):
        y = tf.stop_gradient(x)
        y = tf.numpy_function(np.zeros_like, [y], y.dtype)
        return x + tf.ensure_shape(y, x.shape)


class LifeTest(tf.test.TestCase, parameterized.TestCase):
    """Compares a pipeline to a plain model."""

    def assert_same_numbers(self, a, b):
        self.assertAllClose(a, b, rtol=1e-4, atol=1e-5)

    def assert_same_history(self, plain, model):
        self.assertEqual(plain.epoch, model.epoch)
        self.assertEqual(plain.history.keys(), model.history.keys())
        for key, values in plain.history.items():
            self.assert_same_numbers(values, model.history[key])

    def assert_same_weights(self, plain, model):
        self.assertLen(model.weights, len(plain.weights))
        for a, b in zip(plain.weights, model.weights, strict=True):
            self.assert_same_numbers(a.numpy(), b.numpy())

    def assert_same_state(self, plain, model):
        self.assert_same_weights(plain, model)
        a, b = plain.optimizer.variables, model.optimizer.variables
        self.assertLen(b, len(a))
        for x, y in zip(a, b, strict=True):
            self.assert_same_numbers(x.numpy(), y.numpy())

    def assert_fit_same(self, plain, model, fit, **kwargs):
        """Compiles both models, trains each with `fit`, and compares them."""
        kwargs.setdefault("loss", "mse")
        make = kwargs.pop("optimizer", lambda: keras.optimizers.Adam(0.02))
        before = [w.numpy() for w in plain.weights]
        histories = []
        for m in (plain, model):
            m.compile(optimizer=make(), **kwargs)
            histories.append(fit(m))
        self.assertNotAllClose(before[0], plain.weights[0].numpy())
        self.assert_same_history(*histories)
        self.assert_same_state(plain, model)
        return histories[1]


class FitTest(LifeTest):
    @parameterized.parameters("1f1b", "gpipe")
    @pytest.mark.slow
    def test_arrays(self, schedule):
        x, y = make_data()
        vx, vy = make_data(7)
        plain, model = make_pair(schedule=schedule)
        history = self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(
                x,
                y,
                batch_size=BATCH,
                epochs=3,
                shuffle=False,
                validation_data=(vx, vy),
                validation_batch_size=4,
                verbose=0,
            ),
            metrics=["mae"],
        )
        self.assertSameElements(
            history.history, ["loss", "mae", "val_loss", "val_mae"]
        )

    def test_shuffled_arrays(self):
        x, y = make_data()
        plain, model = make_pair()

        def fit(m):
            keras.utils.set_random_seed(3)
            return m.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)

        self.assert_fit_same(plain, model, fit)

    def test_sample_weight(self):
        x, y = make_data()
        weight = np.linspace(0, 2, ROWS, dtype="float32")
        plain, model = make_pair()
        self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(
                x,
                y,
                sample_weight=weight,
                batch_size=BATCH,
                shuffle=False,
                verbose=0,
            ),
            weighted_metrics=["mae"],
        )

    def test_validation_split(self):
        x, y = make_data()
        plain, model = make_pair()
        history = self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(
                x,
                y,
                batch_size=BATCH,
                validation_split=0.25,
                shuffle=False,
                verbose=0,
            ),
        )
        self.assertIn("val_loss", history.history)

    def test_dataset(self):
        data = tf.data.Dataset.from_tensor_slices(make_data()).batch(BATCH)
        plain, model = make_pair()
        self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(data, epochs=2, validation_data=data, verbose=0),
        )

    def test_generator(self):
        x, y = make_data(BATCH * 6)

        def batches():
            for i in range(0, len(x), BATCH):
                yield x[i : i + BATCH], y[i : i + BATCH]

        plain, model = make_pair()
        history = self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(batches(), steps_per_epoch=3, epochs=2, verbose=0),
        )
        self.assertEqual(history.epoch, [0, 1])

    @parameterized.parameters("1f1b", "gpipe")
    def test_class_weight(self, schedule):
        x, y = make_classes()
        make = lambda: make_layers(3, "softmax")
        plain, model = make_pair(make, schedule=schedule)
        self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(
                x,
                y,
                batch_size=BATCH,
                class_weight={0: 0.5, 1: 3.0, 2: 1.0},
                shuffle=False,
                verbose=0,
            ),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )

    @parameterized.parameters(
        {"steps_per_execution": 3},
        {"steps_per_execution": 2},
        {"run_eagerly": True},
        {"jit_compile": True},
        {"jit_compile": False},
        {"auto_scale_loss": False},
    )
    @pytest.mark.slow_after(1)
    def test_compiled_with(self, **kwargs):
        x, y = make_data()
        plain, model = make_pair()
        for_plain = {k: v for k, v in kwargs.items() if k != "jit_compile"}
        histories = []
        for m, options in ((plain, for_plain), (model, kwargs)):
            m.compile(keras.optimizers.Adam(0.02), "mse", **options)
            histories.append(
                m.fit(
                    x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
                )
            )
        self.assert_same_history(*histories)
        self.assert_same_state(plain, model)
        self.assert_same_numbers(
            plain.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0)
        )
        self.assert_same_numbers(
            plain.predict(x, verbose=0), model.predict(x, verbose=0)
        )

    @parameterized.parameters("1f1b", "gpipe")
    def test_jit_compile_compiles_the_stages(self, schedule):
        x, y = make_data(6)
        layers = make_layers()
        layers.insert(2, OnHost())
        model = pipelined(layers, schedule=schedule)
        model.compile("sgd", "mse", jit_compile=False)
        model.train_on_batch(x, y)
        model.compile("sgd", "mse", jit_compile=True)
        with self.assertRaises(tf.errors.OpError):
            model.train_on_batch(x, y)

    @parameterized.named_parameters(
        ("clipnorm", lambda: keras.optimizers.SGD(0.1, clipnorm=0.05)),
        (
            "global_clipnorm",
            lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
        ),
        ("clipvalue", lambda: keras.optimizers.SGD(0.1, clipvalue=0.01)),
        (
            "ema",
            lambda: keras.optimizers.SGD(
                0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
            ),
        ),
        (
            "accumulation",
            lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        ),
        (
            "weight_decay",
            lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
        ),
        ("adamw", lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1)),
        (
            "momentum",
            lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        ),
        (
            "schedule",
            lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
            ),
        ),
        (
            "loss_scale",
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=64.0
            ),
        ),
        ("adamax", lambda: keras.optimizers.Adamax(0.01)),
    )
    def test_optimizer(self, make):
        x, y = make_data()
        for schedule in ("1f1b", "gpipe"):
            plain, model = make_pair(schedule=schedule)
            self.assert_fit_same(
                plain,
                model,
                lambda m: m.fit(
                    x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
                ),
                optimizer=make,
            )

    @parameterized.parameters("1f1b", "gpipe")
    @pytest.mark.slow
    def test_several_outputs(self, schedule):
        x, a = make_data()
        b = make_data(outputs=2)[1]
        make = lambda: [*make_layers()[:-1], Heads(name="heads")]
        plain, model = make_pair(make, schedule=schedule)
        history = self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(
                x,
                {"a": a, "b": b},
                batch_size=BATCH,
                epochs=2,
                shuffle=False,
                verbose=0,
            ),
            loss={"a": "mse", "b": "mae"},
            loss_weights={"a": 0.25, "b": 2.0},
            metrics={"a": ["mae"], "b": ["mse"]},
        )
        self.assertContainsSubset(["a_loss", "b_loss"], history.history)
        found = model.predict(x, verbose=0)
        for key, value in plain.predict(x, verbose=0).items():
            self.assert_same_numbers(value, found[key])

    def test_deferred_build(self):
        x, y = make_data()
        model = pipelined(make_layers()[1:])
        self.assertFalse(model.built)
        model.compile("sgd", "mse")
        history = model.fit(x, y, epochs=2, batch_size=BATCH, verbose=0)
        self.assertLen(model.weights, 6)
        self.assertLess(history.history["loss"][1], history.history["loss"][0])

    @parameterized.parameters(
        (None, "1f1b"), (None, "gpipe"), ((PlainDoubled, Doubled), "gpipe")
    )
    def test_loss_scale_of_a_deferred_build(self, classes, schedule):
        plain_cls, cls = classes or (keras.Sequential, None)
        x, y = make_data(24)
        models = []
        for make in (
            plain_cls,
            lambda x: pipelined(x, cls=cls, schedule=schedule),
        ):
            keras.utils.set_random_seed(1)
            model = make(make_layers()[1:])
            # The scale doubles at every step.
            model.compile(
                keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD(0.1),
                    initial_scale=2.0,
                    dynamic_growth_steps=1,
                ),
                "mse",
            )
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            models.append(model)
        self.assert_same_state(*models)

    def test_frozen_layer(self):
        x, y = make_data()
        plain, model = make_pair()
        for m in (plain, model):
            m.layers[1].trainable = False
        before = model.layers[1].kernel.numpy()
        self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(
                x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
            ),
        )
        self.assertAllEqual(before, model.layers[1].kernel.numpy())


class CallbackTest(LifeTest):
    def _fit(self, model, callbacks, rate=0.02, x=None, epochs=3):
        data, y = make_data()
        model.compile(keras.optimizers.SGD(rate), "mse")
        return model.fit(
            data if x is None else x,
            y,
            batch_size=BATCH,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )

    @parameterized.parameters(".keras", ".weights.h5")
    def test_model_checkpoint(self, suffix):
        path = os.path.join(self.get_temp_dir(), "best-{epoch}" + suffix)
        model = pipelined(make_layers())
        self._fit(
            model,
            [
                keras.callbacks.ModelCheckpoint(
                    path, save_weights_only=suffix == ".weights.h5"
                )
            ],
        )
        path = path.format(epoch=3)
        if suffix == ".keras":
            loaded = keras.models.load_model(path)
            self.assertIsInstance(loaded, tf_gpipe.PipelinedSequential)
        else:
            loaded = pipelined(make_layers())
            loaded.load_weights(path)
        self.assert_same_weights(model, loaded)

    def test_early_stopping(self):
        histories = []
        plain, model = make_pair()
        for m in (plain, model):
            stop = keras.callbacks.EarlyStopping(
                monitor="loss", patience=1, restore_best_weights=True
            )
            # A rate so large that the loss grows.
            histories.append(self._fit(m, [stop], rate=0.7, epochs=20))
            self.assertGreater(stop.stopped_epoch, 0)
        self.assert_same_history(*histories)
        self.assert_same_weights(plain, model)

    def test_tensorboard(self):
        path = os.path.join(self.get_temp_dir(), "logs")
        model = pipelined(make_layers())
        self._fit(
            model,
            [
                keras.callbacks.TensorBoard(
                    path, histogram_freq=1, write_graph=True
                )
            ],
        )
        tags = set()
        for event_file in tf.io.gfile.glob(f"{path}/train/events*"):
            for event in tf.compat.v1.train.summary_iterator(event_file):
                tags |= {value.tag for value in event.summary.value}
        self.assertIn("epoch_loss", tags)
        self.assertTrue(any("first/kernel" in tag for tag in tags), tags)

    @parameterized.parameters("1f1b", "gpipe")
    def test_terminate_on_nan(self, schedule):
        x, _ = make_data()
        x[-1] = np.nan  # in the last micro-batch of the last batch
        plain, model = make_pair(schedule=schedule)
        for m in (plain, model):
            history = self._fit(
                m, [keras.callbacks.TerminateOnNaN()], x=x, epochs=4
            )
            self.assertEqual(history.epoch, [0])
            self.assertTrue(np.isnan(history.history["loss"][0]))

    def test_terminate_on_nan_lets_finite_losses_pass(self):
        history = self._fit(
            pipelined(make_layers()), [keras.callbacks.TerminateOnNaN()]
        )
        self.assertEqual(history.epoch, [0, 1, 2])

    @pytest.mark.slow
    def test_backup_and_restore(self):
        path = os.path.join(self.get_temp_dir(), "backup")
        x, y = make_data()

        class Killed(Exception):
            pass

        def kill(epoch, logs):
            if epoch == 1:
                raise Killed

        def fit(m, callbacks):
            return m.fit(
                x,
                y,
                batch_size=BATCH,
                epochs=4,
                shuffle=False,
                verbose=0,
                callbacks=callbacks,
            )

        plain, model = make_pair()
        start = plain.get_weights()
        plain.compile(keras.optimizers.Adam(0.02), "mse")
        fit(plain, [])
        model.compile(keras.optimizers.Adam(0.02), "mse")
        with self.assertRaises(Killed):
            fit(
                model,
                [
                    keras.callbacks.LambdaCallback(on_epoch_begin=kill),
                    keras.callbacks.BackupAndRestore(path),
                ],
            )
        again = pipelined(make_layers(), num_stages=3)
        again.set_weights(start)
        again.compile(keras.optimizers.Adam(0.02), "mse")
        history = fit(again, [keras.callbacks.BackupAndRestore(path)])
        self.assertEqual(history.epoch, [1, 2, 3])
        self.assert_same_state(plain, again)


class StepTest(LifeTest):
    @parameterized.parameters("1f1b", "gpipe")
    @pytest.mark.slow_after(1)
    def test_train_on_batch(self, schedule):
        plain, model = make_pair(schedule=schedule)
        x, y = make_data(10)
        weight = np.linspace(0, 1, 10, dtype="float32")
        for m in (plain, model):
            m.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
        for rows in (10, 7, 2, 1):
            args = x[:rows], y[:rows], weight[:rows]
            self.assert_same_numbers(
                plain.train_on_batch(*args), model.train_on_batch(*args)
            )
            self.assert_same_state(plain, model)
        a = plain.train_on_batch(x, y, return_dict=True)
        b = model.train_on_batch(x, y, return_dict=True)
        self.assertEqual(a.keys(), b.keys())
        self.assert_same_numbers(list(a.values()), list(b.values()))

    def test_test_on_batch(self):
        plain, model = make_pair()
        x, y = make_data(7)
        for m in (plain, model):
            m.compile("sgd", "mse", metrics=["mae"])
        before = model.get_weights()
        for rows in (7, 6, 2):
            self.assert_same_numbers(
                plain.test_on_batch(x[:rows], y[:rows]),
                model.test_on_batch(x[:rows], y[:rows]),
            )
        for a, b in zip(before, model.get_weights(), strict=True):
            self.assertAllEqual(a, b)

    def test_predict_on_batch(self):
        plain, model = make_pair()
        x, _ = make_data(7)
        for rows in (7, 6, 2, 1):
            self.assert_same_numbers(
                plain.predict_on_batch(x[:rows]),
                model.predict_on_batch(x[:rows]),
            )

    @parameterized.parameters("1f1b", "gpipe")
    def test_evaluate(self, schedule):
        plain, model = make_pair(schedule=schedule)
        x, y = make_data()
        for m in (plain, model):
            m.compile("sgd", "mse", metrics=["mae", "mape"])
        for batch_size in (1, 2, 7, 20):
            a, b = (
                m.evaluate(
                    x, y, batch_size=batch_size, verbose=0, return_dict=True
                )
                for m in (plain, model)
            )
            self.assertEqual(a.keys(), b.keys())
            self.assert_same_numbers(list(a.values()), list(b.values()))

    @pytest.mark.slow
    def test_predict(self):
        plain, model = make_pair(num_micro_batches=4)
        for rows, batch_size in itertools.product((1, 2, 7, 20), (1, 4, 7, 32)):
            with self.subTest(rows=rows, batch_size=batch_size):
                x, _ = make_data(rows)
                found = model.predict(x, batch_size=batch_size, verbose=0)
                self.assertEqual(found.shape, (rows, 1))
                self.assert_same_numbers(
                    plain.predict(x, batch_size=batch_size, verbose=0), found
                )

    def test_call(self):
        plain, model = make_pair()
        x, _ = make_data(7)
        self.assert_same_numbers(plain(x), model(x))
        self.assert_same_numbers(plain(x), tf.function(model)(x))


class StructureTest(LifeTest):
    def test_add_and_pop(self):
        model = pipelined(None)
        for layer in make_layers():
            model.add(layer)
        self.assertTrue(model.built)
        self.assertEqual(
            [layer.name for layer in model.layers],
            ["first", "second", "third"],
        )
        self.assertLen(model.stages, 2)
        x, y = make_data()
        plain = keras.Sequential(make_layers())
        plain.set_weights(model.get_weights())
        self.assert_same_numbers(plain(x), model(x))

        for m in (plain, model):
            self.assertEqual(m.pop().name, "third")
            self.assertLen(m.layers, 2)
        self.assertEqual(
            [[layer.name for layer in s.layers] for s in model.stages],
            [["first"], ["second"]],
        )
        self.assert_same_numbers(plain(x), model(x))

        for m in (plain, model):
            m.add(keras.layers.Dense(1, name="other"))
        model.set_weights(plain.get_weights())
        self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0),
        )

    def test_pop_to_too_few_layers_and_back(self):
        model = pipelined(make_layers())
        model.pop()
        model.pop()
        self.assertLen(model.layers, 1)
        with self.assertRaisesRegex(ValueError, "num_stages"):
            _ = model.stages
        model.add(keras.layers.Dense(2))
        self.assertLen(model.stages, 2)
        self.assertEqual(model(make_data(4)[0]).shape, (4, 2))

    def test_from_sequential_shares_layers(self):
        plain = keras.Sequential(make_layers())
        model = pipelined(plain)
        self.assertTrue(model.built)
        for a, b in zip(plain.layers, model.layers, strict=True):
            self.assertIs(a, b)
        x, y = make_data()
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)
        self.assert_same_numbers(plain(x), model(x))

    @parameterized.parameters(
        {"schedule": "gpipe", "remat": "never", "balance": [2, 1]},
        {"schedule": "1f1b", "remat": "except_last", "balance": "parameters"},
        {
            "schedule": tf_gpipe.Schedule(
                [
                    ["F0.0", "F0.1", "F0.2", "B0.2", "B0.0", "B0.1"],
                    ["F1.0", "F1.1", "F1.2", "B1.2", "B1.0", "B1.1"],
                ],
                name="mine",
            )
        },
    )
    def test_config(self, **kwargs):
        model = pipelined(make_layers(), name="mine", **kwargs)
        config = model.get_config()
        copy = tf_gpipe.PipelinedSequential.from_config(config)
        self.assertEqual(copy.get_config(), config)
        self.assertEqual(copy.name, "mine")
        self.assertTrue(copy.built)
        for a, b in zip(model.stages, copy.stages, strict=True):
            self.assertEqual(a.device, b.device)
            self.assertEqual(
                [x.name for x in a.layers], [x.name for x in b.layers]
            )
            self.assertEmpty(set(a.layers) & set(b.layers))
        copy.set_weights(model.get_weights())
        x, y = make_data()
        for m in (model, copy):
            m.compile("sgd", "mse")
            m.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        self.assert_same_state(model, copy)

    def test_config_as_json(self):
        model = pipelined(make_layers(), balance=[2, 1], schedule="gpipe")
        copy = keras.models.model_from_json(model.to_json())
        self.assertIsInstance(copy, tf_gpipe.PipelinedSequential)
        self.assertEqual([len(s.layers) for s in copy.stages], [2, 1])
        self.assertEqual(
            [s.device for s in copy.stages], [s.device for s in model.stages]
        )

    def test_config_of_defaults_stays_open(self):
        model = tf_gpipe.PipelinedSequential(make_layers())
        config = model.get_config()
        for key in ("num_stages", "num_micro_batches", "devices"):
            self.assertIsNone(config[key], key)

    def test_clone_model(self):
        # Keras clones a model of any subclass of `Sequential` as a
        # `Sequential`.
        model = pipelined(make_layers())
        plain = keras.models.clone_model(model)
        self.assertIs(type(plain), keras.Sequential)
        self.assertEmpty(set(plain.layers) & set(model.layers))
        plain.set_weights(model.get_weights())
        x, _ = make_data(7)
        self.assert_same_numbers(model(x), plain(x))
        self.assert_same_numbers(model(x), pipelined(plain, 3)(x))

    def test_stages(self):
        model = pipelined(make_layers(), num_stages=3)
        stages = model.stages
        self.assertEqual([s.index for s in stages], [0, 1, 2])
        self.assertEqual(
            [[x.name for x in s.layers] for s in stages],
            [["first"], ["second"], ["third"]],
        )
        self.assertEqual([s.count_params() for s in stages], [48, 54, 7])
        for k, stage in enumerate(stages):
            self.assertEndsWith(stage.device, f"device:{KIND}:{k}")
            for layer in stage.layers:
                for variable in layer.variables:
                    self.assertEndsWith(variable.value.device, stage.device)

    def test_methods_have_the_arguments_of_keras(self):
        for name in ("fit", "train_on_batch", "predict", "save", "export"):
            self.assertEqual(
                inspect.signature(getattr(tf_gpipe.PipelinedModel, name)),
                inspect.signature(getattr(keras.Model, name)),
                name,
            )

    def test_optimizer_variables_live_with_their_weights(self):
        model = pipelined(make_layers(), num_stages=3)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(*make_data(), batch_size=BATCH, verbose=0)
        for weight, momentum in zip(
            model.trainable_variables, model.optimizer.momentums, strict=True
        ):
            self.assertEqual(momentum.value.device, weight.value.device)

    def test_summary(self):
        model = pipelined(make_layers(), schedule="gpipe", remat="never")
        lines = []
        model.summary(
            line_length=120, print_fn=lambda line, **_: lines.append(line)
        )
        text = "\n".join(lines)
        plain = []
        keras.Sequential(make_layers(), name=model.name).summary(
            line_length=120, print_fn=lambda line, **_: plain.append(line)
        )
        self.assertStartsWith(text, "\n".join(plain).strip("\n")[:200])
        for stage in model.stages:
            self.assertIn(stage.device.removeprefix("/device:"), text)
            self.assertIn(f"{stage.count_params():,}", text)
        self.assertIn("gpipe of 3 micro-batches", text)
        self.assertIn("never", text)

    def test_summary_before_the_build(self):
        lines = []
        pipelined(make_layers()[1:]).summary(
            print_fn=lambda line, **_: lines.append(line)
        )
        self.assertIn("first", "\n".join(lines))

    def test_summary_of_names_that_look_like_markup(self):
        names = ["[red]", "head[left]", "[b]x", ":key:"]
        layers = [keras.layers.Dense(2, name=name) for name in names]
        lines = []
        pipelined([keras.Input((2,)), *layers], num_stages=4).summary(
            200, print_fn=lambda line, **_: lines.append(line)
        )
        _, ours = "\n".join(lines).split("Stage", 1)
        for name in names:
            self.assertIn(f"1 ({name})", ours)


class SavingTest(LifeTest):
    def _make(self, kind):
        layers = make_layers()
        if kind == "plain":
            model = keras.Sequential(layers)
        else:
            model = pipelined(
                layers, num_stages=kind, schedule=("1f1b", "gpipe")[kind % 2]
            )
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
        return model

    def _fit(self, model):
        model.fit(
            *make_data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0
        )

    @parameterized.parameters(
        (2, 3, ".keras"),
        (3, 1, ".weights.h5"),
        (2, "plain", ".weights.h5"),
        ("plain", 2, ".keras"),
    )
    @pytest.mark.slow
    def test_goes_on_after_a_change(self, one, other, suffix):
        path = os.path.join(self.get_temp_dir(), f"file{suffix}")
        uninterrupted = self._make("plain")
        before = self._make(one)
        before.set_weights(uninterrupted.get_weights())
        self._fit(before)
        if suffix == ".keras":
            before.save(path)
        else:
            before.save_weights(path)
        after = self._make(other)
        if other == "plain":
            # Keras loads the state of an optimizer only if it is built.
            after.optimizer.build(after.trainable_variables)
        after.load_weights(path)
        self.assert_same_state(before, after)
        self.assertEqual(int(after.optimizer.iterations), 6)
        self._fit(after)
        self._fit(uninterrupted)
        self._fit(uninterrupted)
        self.assert_same_state(uninterrupted, after)

    @parameterized.parameters(2, 3)
    @pytest.mark.slow_after(1)
    def test_load_model(self, num_stages):
        path = os.path.join(self.get_temp_dir(), "file.keras")
        before, uninterrupted = self._make(num_stages), self._make("plain")
        before.set_weights(uninterrupted.get_weights())
        self._fit(before)
        before.save(path)
        after = keras.models.load_model(path)
        self.assertIsInstance(after, tf_gpipe.PipelinedSequential)
        for key, value in before.get_config().items():
            if key != "layers":
                self.assertEqual(after.get_config()[key], value, key)
        self.assertLen(after.stages, num_stages)
        self.assert_same_state(before, after)
        self._fit(after)
        self._fit(uninterrupted)
        self._fit(uninterrupted)
        self.assert_same_state(uninterrupted, after)

    @parameterized.parameters(True, False)
    def test_hdf5(self, functional):
        path = os.path.join(self.get_temp_dir(), "file.h5")
        if functional:
            plain = keras.Sequential(make_layers())
            before = tf_gpipe.PipelinedModel.from_model(
                plain, num_stages=2, devices=["CPU:0", "CPU:1"]
            )
        else:
            before = pipelined(make_layers(), num_stages=2)
        before.save(path)
        after = keras.models.load_model(path)
        self.assertIs(type(after), type(before))
        for key, value in before.get_config().items():
            if key != "layers":
                self.assertEqual(after.get_config()[key], value, key)
        for one, other in zip(before.variables, after.variables, strict=True):
            self.assertAllEqual(one, other)
            self.assertEqual(one.value.device, other.value.device)

    def test_loaded_weights_stay_on_their_stages(self):
        path = os.path.join(self.get_temp_dir(), "file.keras")
        self._make(3).save(path)
        for stage in keras.models.load_model(path).stages:
            for layer in stage.layers:
                for variable in layer.variables:
                    self.assertEndsWith(variable.value.device, stage.device)

    def test_saved_model(self):
        model = pipelined(make_layers())
        x, _ = make_data(7)
        path = os.path.join(self.get_temp_dir(), "saved_model")
        tf.saved_model.save(model, path)
        loaded = tf.saved_model.load(path)
        (found,) = loaded.signatures["serving_default"](tf.constant(x)).values()
        self.assertAllClose(model.predict(x, verbose=0), found)

    @parameterized.parameters(
        *(("gpipe", 3), ("1f1b", 1), ("1f1b", 3), ("zero_bubble", 3))
    )
    @pytest.mark.slow_after(2)
    def test_saved_in_training_mode(self, schedule, num_micro_batches):
        model = pipelined(
            make_layers(),
            schedule=schedule,
            num_micro_batches=num_micro_batches,
        )
        x, _ = make_data(7)
        saved = tf.Module()
        saved.model = model
        saved.call = tf.function(
            lambda x: model(x, training=True),
            input_signature=[tf.TensorSpec((None, 5), tf.float32)],
        )
        path = os.path.join(self.get_temp_dir(), "saved_model")
        tf.saved_model.save(saved, path)
        loaded = tf.saved_model.load(path)
        results = []
        for call in (saved.call, loaded.call):
            with tf.GradientTape() as tape:
                tape.watch(given := tf.constant(x))
                outputs = call(given)
                loss = tf.reduce_sum(outputs**2)
            variables = [
                v for v in tape.watched_variables() if v.dtype.is_floating
            ]
            gradients = tape.gradient(loss, [given, *variables])
            results.append((outputs, gradients[0], gradients[1:]))
        one, other = results
        self.assert_same_numbers(one[:2], other[:2])
        self.assertLen(one[2], 6)
        key = self._by_size
        self.assert_same_numbers(
            sorted(one[2], key=key), sorted(other[2], key=key)
        )

    @staticmethod
    def _by_size(gradient):
        return len(gradient.shape), gradient.shape.num_elements()

    def test_pipeline_of_a_loaded_model(self):
        path = os.path.join(self.get_temp_dir(), "file.keras")
        before = self._make(2)
        self._fit(before)
        before.save(path)
        after = pipelined(keras.models.load_model(path), num_stages=3)
        self.assertLen(after.stages, 3)
        x, _ = make_data()
        self.assert_same_numbers(before(x), after(x))

    def test_unbuilt(self):
        path = os.path.join(self.get_temp_dir(), "file.keras")
        pipelined(make_layers()[1:]).save(path)
        after = keras.models.load_model(path)
        self.assertFalse(after.built)
        self.assertEqual(after(make_data(4)[0]).shape, (4, 1))


class TracingTest(LifeTest):
    def _make(self, num_micro_batches=3, schedule="1f1b", remat="always"):
        layers = [
            keras.Input((5,)),
            Counted(8, activation="tanh"),
            keras.layers.Dense(1),
        ]
        model = pipelined(
            layers,
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            remat=remat,
        )
        model.compile("sgd", "mse")
        return model, layers[1]

    @parameterized.product(
        schedule=("1f1b", "gpipe"), remat=("always", "except_last", "never")
    )
    @pytest.mark.slow_after(1)
    def test_train_on_batch(self, schedule, remat):
        model, layer = self._make(schedule=schedule, remat=remat)
        x, y = make_data(9)
        start = layer.calls
        model.train_on_batch(x, y)
        once = layer.calls - start
        self.assertGreater(once, 0)
        model.train_on_batch(x, y)
        self.assertEqual(layer.calls, start + once)
        # At another batch size Keras traces the step for batches of any size.
        model.train_on_batch(x[:7], y[:7])
        self.assertLessEqual(layer.calls, start + 2 * once)
        calls = layer.calls
        for rows in (9, 8, 7, 5, 2, 1):
            model.train_on_batch(x[:rows], y[:rows])
        self.assertEqual(layer.calls, calls)

    @parameterized.parameters("1f1b", "gpipe")
    def test_fit(self, schedule):
        model, layer = self._make(schedule=schedule)
        x, y = make_data()
        fit = lambda epochs: model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=epochs,
            validation_data=(x, y),
            verbose=0,
        )
        fit(1)
        calls = layer.calls
        fit(3)
        self.assertEqual(layer.calls, calls)

    def test_second_epoch(self):
        model, layer = self._make()
        calls = []
        model.fit(
            *make_data(),
            batch_size=BATCH,
            epochs=3,
            verbose=0,
            callbacks=[
                keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda *_: calls.append(layer.calls)
                )
            ],
        )
        self.assertLen(set(calls), 1)

    def test_predict_and_evaluate(self):
        model, layer = self._make()
        x, y = make_data()
        model.predict(x, batch_size=BATCH, verbose=0)
        model.evaluate(x, y, batch_size=BATCH, verbose=0)
        calls = layer.calls
        model.predict(x, batch_size=BATCH, verbose=0)
        model.evaluate(x, y, batch_size=BATCH, verbose=0)
        self.assertEqual(layer.calls, calls)

    @parameterized.parameters("1f1b", "gpipe")
    def test_micro_batches_share_a_trace(self, schedule):
        counts = []
        for num_micro_batches, rows in ((2, 12), (6, 12), (5, 12), (6, 13)):
            model, layer = self._make(num_micro_batches, schedule)
            start = layer.calls
            model.train_on_batch(*make_data(rows))
            counts.append(layer.calls - start)
        self.assertLen(set(counts), 1, counts)

    @pairwise.product(
        schedule=("1f1b", "gpipe"),
        built=(True, False),
        evaluate_first=(True, False),
    )
    @pytest.mark.slow_after(1)
    def test_steps_that_create_variables(self, schedule, built, evaluate_first):
        traced = []

        class Traced(tf_gpipe.PipelinedSequential):
            def train_step(self, data):
                traced.append("train")
                return super().train_step(data)

            def test_step(self, data):
                traced.append("test")
                return super().test_step(data)

        model = Traced(
            make_layers()[0 if built else 1 :],
            num_stages=2,
            num_micro_batches=3,
            schedule=schedule,
            devices=["CPU:0", "CPU:1"],
        )
        model.compile("adam", "mse", metrics=["mae", keras.metrics.R2Score()])
        x, y = make_data(8)
        if evaluate_first:
            model.evaluate(x, y, batch_size=8, verbose=0)
        for _ in range(2):
            model.fit(x, y, batch_size=8, verbose=0)
        model.evaluate(x, y, batch_size=8, verbose=0)
        self.assertCountEqual(traced, ["train", "test"])
        self.assertEqual(
            [x.value.device for x in model.optimizer._momentums],
            [x.value.device for x in model.trainable_variables],
        )


class OwnTrainStep(tf_gpipe.PipelinedSequential):
    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, gradients, y_pred = self.loss_and_gradients(x, y, sample_weight)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return self.compute_metrics(x, y, y_pred, sample_weight)


class TapeMixin:
    """A train step as Keras documents it."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return self.compute_metrics(x, y, y_pred)


class PlainTape(TapeMixin, keras.Sequential):
    pass


class PipelinedTape(TapeMixin, tf_gpipe.PipelinedSequential):
    pass


class PenaltyMixin:
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        # Depends on the whole mini-batch: it is not the mean over
        # micro-batches.
        return loss + keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_pred)))


class PlainPenalty(PenaltyMixin, keras.Sequential):
    pass


class Penalty(PenaltyMixin, tf_gpipe.PipelinedSequential):
    pass


class SubclassTest(LifeTest):
    @parameterized.product(
        schedule=("1f1b", "gpipe"), optimizer=("adam", "loss_scale")
    )
    @pytest.mark.slow_after(1)
    def test_train_step(self, schedule, optimizer):
        plain, model = make_pair(cls=OwnTrainStep, schedule=schedule)
        x, y = make_data(8)
        weight = np.linspace(0, 1, 8, dtype="float32")
        for m in (plain, model):
            made = keras.optimizers.Adam(0.02)
            if optimizer == "loss_scale":
                made = keras.optimizers.LossScaleOptimizer(
                    made, initial_scale=64.0
                )
            m.compile(made, "mse", weighted_metrics=["mae"])
        # One batch an epoch: means over batches need no weights.
        a, b = (
            m.fit(
                x,
                y,
                sample_weight=weight,
                batch_size=8,
                epochs=3,
                shuffle=False,
                verbose=0,
            )
            for m in (plain, model)
        )
        self.assert_same_history(a, b)
        self.assert_same_state(plain, model)

    @parameterized.product(built=(True, False), loss_scale=(True, False))
    @pytest.mark.slow_after(1)
    def test_train_step_with_a_tape(self, built, loss_scale):
        x, y = make_data(24)
        models = []
        for make in (PlainTape, lambda x: pipelined(x, cls=PipelinedTape)):
            keras.utils.set_random_seed(1)
            model = make(make_layers()[0 if built else 1 :])
            optimizer = keras.optimizers.Adam(0.02)
            if loss_scale:
                optimizer = keras.optimizers.LossScaleOptimizer(
                    optimizer, initial_scale=2.0, dynamic_growth_steps=2
                )
            model.compile(optimizer, "mse")
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            models.append(model)
        self.assert_same_state(*models)

    @parameterized.parameters("1f1b", "gpipe")
    def test_gradients(self, schedule):
        plain, model = make_pair(schedule=schedule)
        x, y = make_data(7)
        for m in (plain, model):
            m.compile("sgd", "mse")
        with tf.GradientTape() as tape:
            expected = plain(x, training=True)
            expected_loss = tf.reduce_mean(tf.square(expected - y))
        expected_gradients = tape.gradient(
            expected_loss, plain.trainable_variables
        )
        for call in (
            model.loss_and_gradients,
            tf.function(model.loss_and_gradients),
        ):
            loss, gradients, outputs = call(tf.constant(x), tf.constant(y))
            self.assert_same_numbers(expected_loss, loss)
            self.assert_same_numbers(expected, outputs)
            for a, b in zip(expected_gradients, gradients, strict=True):
                self.assert_same_numbers(a, b)

    @parameterized.parameters((Doubled, PlainDoubled), (Penalty, PlainPenalty))
    @pytest.mark.slow
    def test_override_with_gpipe(self, cls, plain_cls):
        x, y = make_data()
        plain, model = make_pair(cls=cls, plain_cls=plain_cls, schedule="gpipe")
        self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(
                x,
                y,
                batch_size=BATCH,
                epochs=2,
                shuffle=False,
                validation_data=(x, y),
                verbose=0,
            ),
        )
        self.assert_same_numbers(
            plain.predict(x, verbose=0), model.predict(x, verbose=0)
        )

    @parameterized.parameters((Doubled, PlainDoubled), (Penalty, PlainPenalty))
    def test_override_with_one_micro_batch(self, cls, plain_cls):
        x, y = make_data()
        plain, model = make_pair(
            cls=cls,
            plain_cls=plain_cls,
            schedule="1f1b",
            num_micro_batches=1,
        )
        self.assert_fit_same(
            plain,
            model,
            lambda m: m.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0),
        )

    @parameterized.parameters((Doubled, "call"), (Penalty, "compute_loss"))
    def test_override_with_1f1b(self, cls, method):
        model = pipelined(make_layers(), cls=cls, schedule="1f1b")
        model.compile("sgd", "mse")
        with self.assertRaisesRegex(
            ValueError,
            f"(?s){cls.__name__} overrides `{method}`.*'1f1b'.*"
            "schedule='gpipe'",
        ):
            model.fit(*make_data(), verbose=0)


if __name__ == "__main__":
    tf.test.main()
