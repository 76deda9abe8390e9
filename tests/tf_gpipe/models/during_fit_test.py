"""Callbacks that change a model while it runs; the model's arguments."""

import functools
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.tf_gpipe import comparison

_DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
_TRAIN_HOOKS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_test_end",
    "on_epoch_end",
)
_rng = np.random.default_rng(0)
_X = _rng.normal(size=(24, 6)).astype("float32")
_Y = _rng.normal(size=(24, 3)).astype("float32")


class _At(keras.callbacks.Callback):
    """Calls a function with the model, the n-th time a hook is called."""

    def __init__(self, hook, function, n=0):
        super().__init__()
        self.times = 0

        def call(*args, **kwargs):
            if self.times == n:
                function(self.model)
            self.times += 1

        setattr(self, hook, call)


def _layers():
    return [
        keras.Input((6,)),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(7, activation="tanh"),
        keras.layers.Dense(5, activation="tanh"),
        keras.layers.Dense(3),
    ]


def _make(pipelined=True, **kwargs):
    keras.utils.set_random_seed(1)
    if not pipelined:
        return keras.Sequential(_layers())
    arguments = {
        "num_stages": 2,
        "num_micro_batches": 2,
        "balance": [1, 3],
        "devices": _DEVICES,
        **kwargs,
    }
    return tf_gpipe.PipelinedSequential(_layers(), **arguments)


def _compile(model, rate=0.05, **kwargs):
    optimizer = keras.optimizers.Adam(rate)
    model.compile(optimizer, "mse", metrics=["mae"], **kwargs)


def _fit(model, callbacks=(), **kwargs):
    return model.fit(
        _X,
        _Y,
        batch_size=8,
        epochs=2,
        validation_data=(_X, _Y),
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **kwargs,
    ).history


@functools.cache
def _fitted_plain():
    """Returns the plain model, fitted, and its history."""
    plain = _make(False)
    _compile(plain)
    return plain, _fit(plain)


class DuringFitTest(parameterized.TestCase):
    def assert_same(self, model, plain):
        comparison.assert_same(self, (plain, []), (model, []), atol=1e-5)

    def assert_same_history(self, ours, theirs):
        self.assertEqual(set(ours), set(theirs))
        for name, values in theirs.items():
            np.testing.assert_allclose(
                ours[name], values, rtol=2e-5, atol=2e-6, err_msg=name
            )

    @parameterized.parameters(*_TRAIN_HOOKS)
    @pytest.mark.slow_after(1)
    def test_rebalance(self, hook):
        plain, expected = _fitted_plain()
        model = _make()
        _compile(model)
        moved = _At(hook, lambda m: m.rebalance([3, 1]))
        self.assert_same_history(_fit(model, [moved]), expected)
        self.assertGreater(moved.times, 0)
        self.assert_same(model, plain)
        self.assertEqual([len(s.layers) for s in model.stages], [3, 1])
        for stage in model.stages:
            for variable in stage.owned:
                self.assertEndsWith(variable.value.device, stage.device)
        weights = model.trainable_variables
        slots = model.optimizer.variables[2:]
        for i, weight in enumerate(weights):
            for slot in slots[2 * i : 2 * i + 2]:
                self.assertEqual(slot.value.device, weight.value.device)

    @parameterized.parameters(
        ("gpipe", False), ("zero_bubble", False), ("1f1b", True)
    )
    @pytest.mark.slow_after(1)
    def test_rebalance_at_each_step(self, schedule, eager):
        plain, expected = _fitted_plain()
        model = _make(schedule=schedule)
        _compile(model, run_eagerly=eager)
        cuts = iter([[1, 3], [3, 1], [2, 2], [1, 3], [2, 2], [3, 1]])

        class Moving(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                self.model.rebalance(next(cuts))

        self.assert_same_history(_fit(model, [Moving()]), expected)
        self.assert_same(model, plain)

    @parameterized.parameters(
        "on_predict_begin", "on_predict_batch_begin", "on_predict_batch_end"
    )
    def test_rebalance_while_predicting(self, hook):
        model = _make()
        expected = model.predict(_X, batch_size=8, verbose=0)
        moved = _At(hook, lambda m: m.rebalance([3, 1]))
        received = model.predict(_X, batch_size=8, verbose=0, callbacks=[moved])
        np.testing.assert_allclose(received, expected, rtol=1e-6)
        self.assertEqual([len(s.layers) for s in model.stages], [3, 1])

    def test_rebalance_that_is_refused_leaves_the_run_as_it_is(self):
        plain, expected = _fitted_plain()
        model = _make()
        _compile(model)

        def refused(m):
            with self.assertRaisesRegex(ValueError, "sum to 4"):
                m.rebalance([3, 3])

        received = _fit(model, [_At("on_train_batch_end", refused)])
        self.assert_same_history(received, expected)
        self.assert_same(model, plain)

    @parameterized.parameters(*_TRAIN_HOOKS[::3])
    @pytest.mark.slow_after(1)
    def test_compile_takes_effect_at_the_next_step(self, hook):
        # The plain model fails here: Keras calls `None` at the next step.
        model = _make()
        _compile(model)
        _fit(model, [_At(hook, lambda m: _compile(m, 0.0))])
        before = model.get_weights()
        self.assertEqual(model.optimizer.learning_rate, 0.0)
        _fit(model)
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)

    @parameterized.parameters(False, True)
    @pytest.mark.slow_after(1)
    def test_compile_between_steps(self, eager):
        plain, model = _make(False), _make()
        _compile(plain)
        _compile(model)
        for i in range(3):
            if i == 1:
                _compile(plain, 0.3)
            plain.train_on_batch(_X[8 * i : 8 * i + 8], _Y[8 * i : 8 * i + 8])
        change = _At(
            "on_train_batch_begin",
            lambda m: _compile(m, 0.3, run_eagerly=eager),
            n=1,
        )
        model.fit(
            _X, _Y, batch_size=8, shuffle=False, verbose=0, callbacks=[change]
        )
        self.assert_same(model, plain)

    @parameterized.parameters(False, True)
    @pytest.mark.slow
    def test_trainable(self, compiled):
        """It takes effect at the next `compile`, as in the plain model."""

        def freeze(m):
            m.layers[1].trainable = False
            if compiled:
                _compile(m)

        plain, model = _make(False), _make()
        for m in (plain, model):
            _compile(m)
        for i in range(3):
            if i == 1:
                freeze(plain)
            plain.train_on_batch(_X[8 * i : 8 * i + 8], _Y[8 * i : 8 * i + 8])
        model.fit(
            _X,
            _Y,
            batch_size=8,
            shuffle=False,
            verbose=0,
            callbacks=[_At("on_train_batch_begin", freeze, n=1)],
        )
        self.assert_same(model, plain)

    @parameterized.parameters(
        ("set_weights", "on_test_begin"),
        ("load_weights", "on_train_batch_begin"),
        ("layer", "on_epoch_end"),
    )
    @pytest.mark.slow_after(1)
    def test_weights(self, how, hook):
        plain, model = _make(False), _make()
        values = [_rng.normal(size=w.shape) for w in plain.weights]
        folder = self.enterContext(tempfile.TemporaryDirectory())
        path = f"{folder}/x.weights.h5"
        source = _make(False)
        source.set_weights(values)
        source.save_weights(path)

        def change(m):
            if how == "set_weights":
                m.set_weights(values)
            elif how == "load_weights":
                m.load_weights(path)
            else:
                m.layers[2].set_weights(values[4:6])

        _compile(plain)
        _compile(model)
        expected = _fit(plain, [_At(hook, change, n=1)])
        received = _fit(model, [_At(hook, change, n=1)])
        self.assert_same_history(received, expected)
        self.assert_same(model, plain)

    @pytest.mark.slow
    def test_steps_per_execution_cannot_change(self):
        model = _make()
        _compile(model)

        def change(m):
            _compile(m, steps_per_execution=2)

        with self.assertRaisesRegex(ValueError, "cannot change while"):
            _fit(model, [_At("on_train_batch_end", change)])
        _compile(model, steps_per_execution=2)
        _fit(model)

    def test_timeline_goes_on_after_a_rebalance(self):
        model = _make()
        _compile(model)
        timeline = tf_gpipe.callbacks.Timeline()
        _fit(
            model,
            [timeline, _At("on_epoch_end", lambda m: m.rebalance([3, 1]))],
        )
        self.assertNotEmpty(timeline.spans)
        self.assertIsNone(model._record_times)


class ArgumentsTest(parameterized.TestCase):
    def test_before_and_after_the_build(self):
        model = tf_gpipe.PipelinedSequential(
            _layers()[1:], num_stages=2, balance="flops", remat="never"
        )
        self.assertEqual(model.num_stages, 2)
        self.assertIsNone(model.num_micro_batches)
        self.assertEqual(model.balance, "flops")
        self.assertIsNone(model.devices)
        model.build((None, 6))
        self.assertEqual(model.num_micro_batches, 8)
        self.assertEqual(model.balance, [len(s.nodes) for s in model.stages])
        self.assertEqual(model.devices, [s.device for s in model.stages])
        self.assertEqual(model.schedule, "1f1b")
        self.assertEqual(model.remat, "never")
        self.assertIsNone(model.boundary_dtype)

    def test_they_make_the_same_pipeline(self):
        model = tf_gpipe.PipelinedSequential(
            _layers(),
            num_stages=4,
            num_micro_batches=2,
            schedule="interleaved",
            devices=["CPU:2", "CPU:1"],
            boundary_dtype="bfloat16",
        )
        names = [*vars(model._config)]
        self.assertLen(names, 10)
        copy = tf_gpipe.PipelinedSequential(
            model, **{name: getattr(model, name) for name in names}
        )
        self.assertEqual(
            [s.device for s in copy.stages], [s.device for s in model.stages]
        )
        for name in names:
            self.assertEqual(getattr(copy, name), getattr(model, name), name)

    def test_a_list_a_replica(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            model = _make(devices=[["CPU:0", "CPU:2"], ["CPU:1", "CPU:3"]])
        names = [x.name for x in tf.config.list_logical_devices("CPU")]
        self.assertEqual(
            model.devices, [[names[0], names[2]], [names[1], names[3]]]
        )

    @parameterized.parameters(
        ("num_stages", 3),
        ("num_micro_batches", 8),
        ("schedule", "gpipe"),
        ("remat", "never"),
        ("devices", ["CPU:3", "CPU:4"]),
        ("balance", "flops"),
        ("boundary_dtype", "bfloat16"),
    )
    def test_cannot_be_set(self, name, value):
        model = _make()
        before = getattr(model, name)
        repair = "rebalance" if name == "balance" else "PipelinedSequential"
        with self.assertRaisesRegex(AttributeError, f"`{name}`.*{repair}"):
            setattr(model, name, value)
        self.assertEqual(getattr(model, name), before)
        setattr(model, name, before)

    def test_set_too_early(self):
        class Own(tf_gpipe.PipelinedSequential):
            def __init__(self, layers):
                self.batch_size = 8
                super().__init__(layers, num_stages=1)

        with self.assertRaisesRegex(
            AttributeError, "`batch_size`.*before.*`batch_size = None`"
        ):
            Own(_layers())
        Own.batch_size = None
        self.assertEqual(Own(_layers()).batch_size, 8)

    def test_after_a_rebalance(self):
        model = _make()
        model.rebalance([2, 2])
        self.assertEqual(model.balance, [2, 2])

    def test_the_repair_that_the_error_names(self):
        model = _make()
        inputs = keras.Input((6,))
        other = tf_gpipe.PipelinedModel(
            inputs,
            keras.layers.Dense(3)(keras.layers.Dense(4)(inputs)),
            num_stages=2,
        )
        with self.assertRaisesRegex(AttributeError, "PipelinedModel.from_mod"):
            other.num_micro_batches = 4
        for made in (
            tf_gpipe.PipelinedSequential(
                model, num_stages=2, num_micro_batches=4
            ),
            tf_gpipe.PipelinedModel.from_model(
                other, num_stages=2, num_micro_batches=4
            ),
        ):
            self.assertEqual(made.num_micro_batches, 4)

    def test_subclass_that_stores_what_it_passes_on(self):
        class Stored(tf_gpipe.PipelinedSequential):
            def __init__(self, layers, num_stages, balance):
                super().__init__(layers, num_stages=num_stages, balance=balance)
                self.num_stages = num_stages
                self.balance = balance

        model = Stored(_layers(), 2, [1, 3])
        self.assertEqual(model.num_stages, 2)

    def test_subclass_with_a_name_of_its_own(self):
        class Own(tf_gpipe.PipelinedSequential):
            schedule = None

            def __init__(self, layers, rates):
                super().__init__(layers, num_stages=2, num_micro_batches=2)
                self.schedule = rates

        model = Own(_layers(), [0.1, 0.2])
        self.assertEqual(model.schedule, [0.1, 0.2])
        _compile(model)
        _fit(model)
