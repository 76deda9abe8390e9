"""A run that died goes on to the same bits as one that did not."""

import contextlib
import copy
import errno
import functools
import gc
import io
import json
import os
import pathlib
import random
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise
from tests import quick_python
from tf_gpipe import random_numbers
from tf_gpipe import upstream
from tf_gpipe.callbacks import Checkpoint
from tf_gpipe.checkpoints import model_variables
from tf_gpipe.checkpoints import state
from tf_gpipe.checkpoints import store
from tf_gpipe.checkpoints.store import CheckpointError
from tf_gpipe.checkpoints.store import Position
from tf_gpipe.checkpoints.store import Store
from tf_gpipe.checkpoints.writer import Writer
from tools import child_process

X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
EPOCHS = 3
# Steps of an epoch.
STEPS = 5


def make(cls=tf_gpipe.PipelinedSequential, optimizer=None, **kwargs):
    """Returns a pipeline whose steps change all kinds of variables."""
    keras.utils.set_random_seed(3)
    kwargs = {"num_stages": 2, "num_micro_batches": 2, **kwargs}
    layers = [
        L.Dense(8, "relu"),
        L.Dropout(0.3),
        L.BatchNormalization(),
        L.Dense(8),
        L.GaussianNoise(0.1, seed=5),
        L.Dense(4),
    ]
    inputs = keras.Input((4,))
    if cls is tf_gpipe.PipelinedSequential:
        model = cls([inputs, *layers], **kwargs)
    else:
        x = inputs
        for layer in layers:
            x = layer(x)
        model = cls(inputs, x, **kwargs)
    model.compile(
        optimizer() if optimizer else keras.optimizers.Adam(0.01),
        "mse",
        metrics=["mae", keras.metrics.R2Score()],
    )
    return model


def small(optimizer=None, steps_per_execution=1):
    """Returns a pipeline that is traced in half the time."""
    keras.utils.set_random_seed(3)
    model = tf_gpipe.PipelinedSequential(
        [keras.Input((4,)), L.Dense(8), L.Dropout(0.3), L.Dense(4)],
        num_stages=2,
        num_micro_batches=2,
    )
    model.compile(
        optimizer or keras.optimizers.Adam(0.01),
        "mse",
        metrics=["mae"],
        steps_per_execution=steps_per_execution,
    )
    return model


def values(model):
    return [
        v.numpy()
        for kind, variables in model_variables.variables_of(model).items()
        if kind != model_variables.METRICS
        for v in variables
    ]


class Died(Exception):
    pass


class Dying(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        self.steps -= 1
        if not self.steps:
            raise Died


class Decaying(keras.callbacks.Callback):
    """Halves the learning rate as an epoch begins."""

    def on_epoch_begin(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate / 2)


class DecayingBySteps(keras.callbacks.Callback):
    """Lowers the learning rate as a step begins."""

    def on_train_batch_begin(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.9)


class Noisy(keras.optimizers.SGD):
    """Adds noise to gradients, less of it from update to update."""

    def __init__(self):
        super().__init__(0.1)
        self.numbers = keras.random.SeedGenerator(7)
        self.share = tf.Variable(1.0, trainable=False)

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(variable.shape, seed=self.numbers)
        self.share.assign(0.9 * self.share)
        super().update_step(
            gradient + self.share * noise, variable, learning_rate
        )


class Annealed(keras.losses.Loss):
    """Is halved by a callback as an epoch ends."""

    def __init__(self):
        super().__init__()
        self.factor = keras.Variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        return self.factor * keras.ops.mean((y_true - y_pred) ** 2, -1)


class Annealing(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        factor = self.model.loss.factor
        factor.assign(factor / 2)


class Dropping(keras.losses.Loss):
    """Draws random numbers by a layer, and by a generator of TensorFlow's."""

    def __init__(self):
        super().__init__()
        self.drop = L.Dropout(0.5, seed=4)
        self.numbers = tf.random.Generator.from_seed(3)

    def call(self, y_true, y_pred):
        y_pred *= self.numbers.uniform(tf.shape(y_pred))
        y_pred = self.drop(y_pred, training=True)
        return keras.ops.mean((y_true - y_pred) ** 2, -1)


class Normalized(keras.losses.Loss):
    """Compares what is normalised by statistics of earlier steps."""

    def __init__(self):
        super().__init__()
        self.parts = [L.BatchNormalization(momentum=0.5)]
        self.parts[0].build((None, 4))

    def call(self, y_true, y_pred):
        self.parts[0](y_true + y_pred, training=True)
        a, b = (self.parts[0](x, training=False) for x in (y_true, y_pred))
        return keras.ops.mean((a - b) ** 2, -1)


class Criticised(tf_gpipe.PipelinedSequential):
    """Trains a model that it has, with the optimizer of that."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.critic = keras.Sequential([keras.Input((4,)), L.Dense(1)])
        self.critic.compile(keras.optimizers.Adam(0.01))

    def train_step(self, data):
        x, y = data
        loss, gradients, y_pred = self.loss_and_gradients(x, y)
        self.optimizer.apply(gradients, self.trainable_variables)
        with tf.GradientTape() as tape:
            score = keras.ops.mean(self.critic(y_pred) - self.critic(y))
        weights = self.critic.trainable_variables
        self.critic.optimizer.apply(tape.gradient(score, weights), weights)
        return self.compute_metrics(x, y, y_pred)


class Several(tf_gpipe.PipelinedSequential):
    """Has optimizers of its own, in a list and in an attribute."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.others = [keras.optimizers.Adam(0.01)]
        self.last = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9)
        )

    def train_step(self, data):
        x, y = data
        loss, gradients, outputs = self.loss_and_gradients(x, y)
        weights = self.trainable_variables
        of_last = [g * self.last.scale_loss(1.0) for g in gradients[3:]]
        if self.optimizer is not None:
            self.optimizer.apply(gradients[:1], weights[:1])
        self.others[0].apply(gradients[1:3], weights[1:3])
        self.last.apply(of_last, weights[3:])
        return self.compute_metrics(x, y, outputs)


class Rows(keras.utils.PyDataset):
    """Shuffles at the end of an epoch, as Keras's guide shows it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.order = np.arange(len(X))
        self.numbers = np.random.default_rng(1)

    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        rows = self.order[8 * i : 8 * i + 8]
        return X[rows], X[rows]

    def on_epoch_end(self):
        self.numbers.shuffle(self.order)


class Shuffling(Rows):
    """Shuffles by the generator that NumPy's functions share."""

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class InOrder(keras.utils.PyDataset):
    """Is the same in each epoch."""

    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        return X[8 * i : 8 * i + 8], X[8 * i : 8 * i + 8]


class NoisyRows(InOrder):
    """Adds noise from the generator that NumPy's functions share."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + np.random.normal(size=x.shape).astype("float32"), y


class Flipped(InOrder):
    """Draws from the generator that Python's functions share."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x * random.choice([-1, 1]), y


class OwnNoise(InOrder):
    """Adds noise from a generator that it has."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.numbers = np.random.default_rng(2)

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + self.numbers.normal(size=x.shape).astype("float32"), y


class NoiseByAnObject(InOrder):
    """Adds noise from a generator that an attribute has."""

    class Augmenting:
        def __init__(self):
            self.numbers = random.Random(3)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.augmenting = self.Augmenting()

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x * self.augmenting.numbers.choice([-1, 1]), y


class NoiseByAFunction(InOrder):
    """Adds noise from generators in a list that a function holds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        each = [{"numbers": np.random.default_rng(i)} for i in range(2)]

        def add(x, i):
            numbers = each[i % 2]["numbers"]
            return x + numbers.normal(size=x.shape).astype("float32")

        self.functions = functools.partial(add), add

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return self.functions[i % 2](x, i), y


class NoiseByALayer(InOrder):
    """Adds noise by a layer that it has."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.noise = L.GaussianNoise(0.1, seed=4)

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return np.asarray(self.noise(x, training=True)), y


class Endless(Rows):
    """Has no last batch."""

    @property
    def num_batches(self):
        return None

    def __getitem__(self, i):
        return super().__getitem__(i % STEPS)


class Calls(keras.layers.Layer):
    """Writes down its calls, in a string."""

    def build(self, input_shape):
        self.text = tf.Variable("", trainable=False)

    def call(self, inputs):
        self.text.assign(tf.strings.join([self.text, "x"]))
        return inputs


class Scaled(keras.losses.Loss):
    """Is scaled by the mean of all steps before, which a metric holds."""

    def __init__(self, within):
        super().__init__()
        mean = keras.metrics.Mean()
        self.part = {"a list": [mean], "a metric": mean}[within]
        self.mean = mean

    def call(self, y_true, y_pred):
        values = keras.ops.mean((y_true - y_pred) ** 2, -1)
        self.mean.update_state(values)
        return values * self.mean.result()


class Late(keras.metrics.Mean):
    """A metric whose second variable is made when it is first updated."""

    def update_state(self, values, sample_weight=None):
        if not hasattr(self, "calls"):
            self.calls = self.add_variable((), "zeros", name="calls")
        self.calls.assign_add(1.0)
        return super().update_state(values, sample_weight)


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, X)).shuffle(40, seed=2)


DATA = {
    "arrays": lambda: {"x": X, "y": X, "batch_size": 8},
    "arrays in order": lambda: {
        "x": X,
        "y": X,
        "batch_size": 8,
        "shuffle": False,
    },
    "PyDataset": lambda: {"x": Rows()},
    "PyDataset of shared numbers": lambda: {"x": NoisyRows()},
    "PyDataset of its own numbers": lambda: {"x": OwnNoise()},
    "PyDataset by threads": lambda: {"x": Rows(workers=2)},
    "tf.data": lambda: {"x": dataset().batch(8), "shuffle": False},
    "tf.data without end": lambda: {
        "x": dataset().batch(8).repeat(),
        "steps_per_epoch": STEPS,
        "shuffle": False,
    },
    "tf.data of a generator": lambda: {
        "x": tf.data.Dataset.from_generator(
            lambda: ((x, x) for x in X),
            output_signature=(tf.TensorSpec((4,)), tf.TensorSpec((4,))),
        )
        .batch(8)
        .repeat(),
        "steps_per_epoch": STEPS,
        "shuffle": False,
    },
}


@functools.lru_cache(maxsize=8)
def uninterrupted(make, data, callbacks, epochs):
    """Returns the values of a model after a whole run, and the history."""
    model = make()
    history = model.fit(
        **data(), epochs=epochs, verbose=0, callbacks=[*callbacks()]
    )
    return values(model), history


# A checkpoint is due after each step: all take longer.
EACH_STEP = {"every_steps": None, "every_seconds": 1e-9}


class TestCase(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.workdir = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

    def fit(self, model, data, *callbacks, every_steps=2, epochs=EPOCHS, **how):
        checkpoint = Checkpoint(self.workdir, every_steps=every_steps, **how)
        return model.fit(
            **data(),
            epochs=epochs,
            verbose=0,
            callbacks=[*callbacks, checkpoint],
        )

    def with_deaths(self, make, data, deaths, callbacks=tuple, **kwargs):
        """Trains, dying after some steps, and returns model and history."""
        for steps in deaths:
            dying = Dying(steps)
            with self.assertRaises(Died):
                self.fit(make(), data, *callbacks(), dying, **kwargs)
        model = make()
        return model, self.fit(model, data, *callbacks(), **kwargs)

    def assert_same(self, a, b):
        for x, y in zip(values(a), values(b), strict=True):
            self.assertAllEqual(x, y)

    def compare(self, make, data, deaths, callbacks=tuple, **kwargs):
        expected, before = uninterrupted(make, data, callbacks, EPOCHS)
        parts, after = self.with_deaths(
            make, data, deaths, callbacks=callbacks, **kwargs
        )
        for x, y in zip(values(parts), expected, strict=True):
            self.assertAllEqual(x, y)
        for name, logs in after.history.items():
            self.assertEqual(logs, before.history[name][-len(logs) :], name)
        return before, after


class ResumptionTest(TestCase):
    @parameterized.parameters(*DATA)
    @pytest.mark.slow_after(1)
    def test_data(self, name):
        data = DATA[name]
        # In the first epoch and in the second, once with all data twice each.
        deaths = (4, 2, 5, 1) if name == "arrays" else (4, 5)
        before, after = self.compare(make, data, deaths)
        self.assertNotEmpty(after.history)

    @parameterized.parameters(
        ({"cls": tf_gpipe.PipelinedModel},),
        ({"schedule": "gpipe", "num_stages": 3},),
        ({"optimizer": lambda: keras.optimizers.SGD(0.1, 0.9, use_ema=True)},),
        (
            {
                "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.Adam(0.01), 4.0, dynamic_growth_steps=3
                )
            },
        ),
    )
    @pytest.mark.slow_after(1)
    def test_models(self, arguments):
        self.compare(lambda: make(**arguments), DATA["arrays"], (4, 5))

    @parameterized.parameters(16, 100)
    @pytest.mark.slow_after(1)
    def test_arrays_in_pieces(self, size):
        self.enterContext(mock.patch.object(store, "PIECE_BYTES", size))
        self.compare(make, DATA["arrays"], (4, 5))

    @pytest.mark.slow
    def test_replicas(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:2"])

        def under_strategy():
            with strategy.scope():
                return make(devices=[["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]])

        self.compare(under_strategy, DATA["arrays"], (4, 5))

    @pytest.mark.slow
    def test_other_stages(self):
        """A checkpoint does not depend on how the model is cut."""
        with self.assertRaises(Died):
            self.fit(make(), DATA["arrays"], Dying(8))
        model = make(num_stages=3)
        self.fit(model, DATA["arrays"])
        whole = make()
        self.fit(whole, DATA["arrays"])
        for x, y in zip(values(model), values(whole), strict=True):
            self.assertAllClose(x, y, atol=1e-5)

    @pytest.mark.slow
    def test_several_steps_an_execution(self):
        def several():
            return small(steps_per_execution=2)

        # A checkpoint is due after 3, 6, 9 steps, and written after 4, 6, 10.
        for how in ({"every_steps": 3}, EACH_STEP):
            self.workdir = pathlib.Path(tempfile.mkdtemp(dir=self.workdir))
            self.compare(several, DATA["tf.data without end"], (2, 3), **how)
        # The last step of an epoch is an execution of its own.
        for name, deaths in (
            ("arrays", (2,)),
            ("PyDataset", (4,)),
            ("tf.data", (2, 4)),
        ):
            self.workdir = pathlib.Path(tempfile.mkdtemp(dir=self.workdir))
            self.compare(several, DATA[name], deaths, **EACH_STEP)
        with self.assertRaises(Died):
            self.fit(
                small(), DATA["tf.data"], Dying(4), every_steps=3, epochs=9
            )
        with self.assertRaisesRegex(ValueError, "no multiple of steps_per_ex"):
            self.fit(several(), DATA["tf.data"], epochs=9)

    @pytest.mark.slow
    def test_without_a_seed(self):
        """Python's random state, by which batches are shuffled, is restored."""

        class Batches(keras.utils.PyDataset):
            drawn = []

            def __len__(self):
                return STEPS

            def __getitem__(self, i):
                self.drawn.append(i)
                return X[:8], X[:8]

        def order():
            Batches.drawn = []
            random.seed()
            return {"x": Batches(), "shuffle": True}

        # It dies in the last step, when a thread has drawn all batches.
        with self.assertRaises(Died):
            self.fit(small(), order, Dying(STEPS))
        first = Batches.drawn[-STEPS:]
        self.fit(small(), order, epochs=1)
        self.assertEqual(Batches.drawn[-STEPS:], first)

    def test_state_that_keras_does_not_know(self):
        class Counting(L.Layer):
            def __init__(self):
                super().__init__()
                self.count = tf.Variable(0.0, trainable=False)
                self.numbers = tf.random.Generator.from_seed(4)

            def call(self, x, training=None):
                if training:
                    self.count.assign_add(1.0)
                return x + self.numbers.normal(tf.shape(x)[1:])

        def counting():
            keras.utils.set_random_seed(0)
            model = tf_gpipe.PipelinedSequential(
                [keras.Input((4,)), L.Dense(4), Counting(), L.Dense(4)],
                num_stages=2,
                num_micro_batches=1,
            )
            model.compile("sgd", "mse")
            return model

        self.compare(counting, DATA["arrays"], (4,))

    @parameterized.parameters((5, "adam"), (6, "adam"), (6, None))
    @pytest.mark.slow_after(1)
    def test_optimizers_of_the_model(self, steps, optimizer):
        """Also where no step has built them: as an epoch begins."""

        def several():
            keras.utils.set_random_seed(3)
            model = Several(
                [keras.Input((4,)), L.Dense(8, "tanh"), L.Dense(4)],
                num_stages=2,
                num_micro_batches=2,
            )
            model.compile(optimizer, "mse", metrics=["mae"])
            return model

        def slots(model):
            optimizers = [*model.others, model.last]
            return [v.numpy() for x in optimizers for v in x.variables]

        whole = several()
        whole.fit(**DATA["arrays"](), epochs=EPOCHS, verbose=0)
        parts, _ = self.with_deaths(several, DATA["arrays"], (steps,))
        self.assert_same(whole, parts)
        self.assertNotEmpty(slots(whole))
        for x, y in zip(slots(whole), slots(parts), strict=True):
            self.assertAllEqual(x, y)

    def test_state_of_losses_and_optimizers(self):
        def model():
            made = small(Noisy())
            made.compile(made.optimizer, Annealed())
            return made

        def callbacks():
            return [Annealing()]

        # Within the second epoch, and as the third one has begun.
        self.compare(model, DATA["arrays"], (8, 3), callbacks)

    @parameterized.parameters(
        Dropping,
        Normalized,
        lambda: Scaled("a metric"),
        lambda: Scaled("a list"),
    )
    @pytest.mark.slow_after(1)
    def test_parts_of_losses(self, loss):
        def model():
            keras.utils.set_random_seed(3)
            made = tf_gpipe.PipelinedSequential(
                [keras.Input((4,)), L.Dense(8, "tanh"), L.Dense(4)],
                num_stages=2,
                num_micro_batches=2,
                schedule="gpipe",
            )
            made.compile(keras.optimizers.Adam(0.01), loss())
            return made

        self.compare(model, DATA["arrays"], (8, 3))

    @parameterized.parameters(5, 6)
    @pytest.mark.slow_after(1)
    def test_optimizer_of_a_model_that_is_an_attribute(self, steps):
        def model():
            keras.utils.set_random_seed(3)
            made = Criticised(
                [keras.Input((4,)), L.Dense(8, "tanh"), L.Dense(4)],
                num_stages=2,
                num_micro_batches=2,
            )
            made.compile(keras.optimizers.Adam(0.01), "mse")
            return made

        def trained(model):
            critic = model.critic
            return [
                v.numpy() for v in critic.variables + critic.optimizer.variables
            ]

        whole = model()
        whole.fit(**DATA["arrays"](), epochs=EPOCHS, verbose=0)
        parts, _ = self.with_deaths(model, DATA["arrays"], (steps,))
        self.assert_same(whole, parts)
        for x, y in zip(trained(whole), trained(parts), strict=True):
            self.assertAllEqual(x, y)

    @pytest.mark.slow
    def test_callbacks_that_watch(self):
        def callbacks():
            watching = {"monitor": "loss", "min_delta": 10.0, "mode": "min"}
            return [
                keras.callbacks.ReduceLROnPlateau(patience=2, **watching),
                keras.callbacks.EarlyStopping(
                    patience=4, restore_best_weights=True, **watching
                ),
            ]

        def data():
            return {**DATA["arrays"](), "validation_data": (X, X)}

        global EPOCHS
        before_epochs, EPOCHS = EPOCHS, 9
        self.addCleanup(lambda: globals().update(EPOCHS=before_epochs))
        before, after = self.compare(
            small, data, (7, 5, 6), callbacks, epochs=9
        )
        self.assertLess(len(before.history["loss"]), 9)
        # A callback had ended the run.
        model, again = self.with_deaths(small, data, (), callbacks, epochs=9)
        self.assertEmpty(again.history)

    @parameterized.parameters(
        (
            keras.callbacks.LearningRateScheduler(
                lambda epoch, rate: rate * 0.5
            ),
        ),
        (
            keras.callbacks.LearningRateScheduler(
                lambda epoch, rate: 0.1 / (epoch + 1)
            ),
        ),
        (
            keras.callbacks.ReduceLROnPlateau(
                monitor="loss", patience=1, min_delta=10.0
            ),
        ),
        (Decaying(),),
        (keras.callbacks.SwapEMAWeights(swap_on_epoch=True), {"use_ema": True}),
    )
    @pytest.mark.slow_after(1)
    def test_callbacks_as_an_epoch_begins(self, callback, optimizer=None):
        def model():
            return small(keras.optimizers.SGD(0.1, **optimizer or {}))

        def callbacks():
            return [copy.copy(callback)]

        # As an epoch has begun, then in the midst of it.
        self.compare(model, DATA["arrays"], (6, 3), callbacks, every_steps=1)

    @parameterized.parameters("arrays", "tf.data without end")
    @pytest.mark.slow_after(1)
    def test_callbacks_as_a_step_begins(self, data):
        """What they do then was done before the checkpoint was written."""

        def callbacks():
            return [DecayingBySteps()]

        self.compare(small, DATA[data], (6, 3), callbacks, every_steps=2)

    @parameterized.product(
        first=[True, False],
        callback=[
            Decaying(),
            keras.callbacks.ReduceLROnPlateau(
                monitor="loss", patience=1, min_delta=10.0, mode="min"
            ),
        ],
    )
    @pytest.mark.slow_after(1)
    def test_more_epochs(self, first, callback):
        """An epoch that the first `fit` has not begun begins in the next."""
        whole = small()
        whole.fit(
            **DATA["arrays"](),
            epochs=EPOCHS,
            verbose=0,
            callbacks=[copy.copy(callback)],
        )
        for epochs in (2, EPOCHS):
            parts = small()
            checkpoint = Checkpoint(self.workdir)
            callbacks = [copy.copy(callback), checkpoint]
            parts.fit(
                **DATA["arrays"](),
                epochs=epochs,
                verbose=0,
                callbacks=callbacks if first else callbacks[::-1],
            )
        self.assert_same(whole, parts)

    @parameterized.parameters(
        (2, {}),
        (2, {"use_ema": True}),
        # `EarlyStopping` ends it before.
        (EPOCHS, {}),
    )
    @pytest.mark.slow_after(1)
    def test_callback_that_fails_as_training_ends(self, epochs, optimizer):
        """Such as one that writes where there is no place left."""

        class Failing(keras.callbacks.Callback):
            def on_train_end(self, logs=None):
                raise Died

        class Scaling(keras.callbacks.Callback):
            """Leaves weights from which training cannot go on."""

            def on_train_end(self, logs=None):
                self.model.set_weights(
                    [2 * x for x in self.model.get_weights()]
                )

        def model():
            return small(keras.optimizers.SGD(0.1, **optimizer))

        def callbacks():
            watching = {"monitor": "loss", "min_delta": 10.0, "mode": "min"}
            return [
                keras.callbacks.EarlyStopping(patience=1, **watching),
                Scaling(),
            ]

        if epochs < EPOCHS:
            callbacks = tuple
        with self.assertRaises(Died):
            self.fit(
                model(),
                DATA["arrays"],
                *callbacks(),
                Failing(),
                every_steps=None,
                epochs=epochs,
            )
        self.assertEqual(
            Store(self.workdir).positions(), [Position(1), Position(2)]
        )
        self.compare(model, DATA["arrays"], (), callbacks)

    @parameterized.parameters(STEPS, 2)
    @pytest.mark.slow_after(1)
    def test_stopped_with_averages_as_weights(self, steps):
        class Stopping(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = batch == steps - 1

        def averaging():
            return small(keras.optimizers.SGD(0.1, use_ema=True))

        def callbacks():
            return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]

        self.fit(averaging(), DATA["arrays"], *callbacks(), Stopping())
        self.compare(averaging, DATA["arrays"], (4,), callbacks)
        # The weights are lost that would be trained further.
        with self.assertRaisesRegex(CheckpointError, "epoch_00003 .*averages"):
            self.fit(averaging(), DATA["arrays"], *callbacks(), epochs=4)
        shutil.rmtree(self.workdir / "epoch_00003")
        self.fit(averaging(), DATA["arrays"], *callbacks(), epochs=4)

    @pytest.mark.slow
    def test_stopped_within_an_epoch(self):
        class Stopping(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = batch == 2

        whole = small()
        whole.fit(**DATA["arrays"](), epochs=EPOCHS, verbose=0)
        self.fit(small(), DATA["arrays"], Stopping(), every_steps=None)
        self.assertEqual(Store(self.workdir).positions(), [Position(0, 3)])
        parts, _ = self.with_deaths(small, DATA["arrays"], ())
        self.assert_same(whole, parts)

    @parameterized.parameters(
        ("on_train_batch_end", 2),
        ("on_train_batch_end", 1),
        ("on_test_end", 1),
        ("on_epoch_end", 1),
    )
    @pytest.mark.slow
    def test_stopped_as_an_epoch_ends(self, when, steps_per_execution):
        """As by a handler of SIGTERM: the epoch is done, and the run is not."""

        class Stopping(keras.callbacks.Callback):
            def stop(self, number, logs=None):
                if when != "on_train_batch_end" or number >= STEPS - 1:
                    self.model.stop_training = True

        setattr(Stopping, when, Stopping.stop)

        def several():
            return small(steps_per_execution=steps_per_execution)

        def data():
            return {**DATA["arrays"](), "validation_data": (X, X)}

        def callbacks():
            return [
                keras.callbacks.ReduceLROnPlateau(
                    patience=1, min_delta=10.0, mode="min"
                )
            ]

        self.fit(several(), data, *callbacks(), Stopping(), every_steps=None)
        self.assertEqual(Store(self.workdir).positions()[-1], Position(1))
        self.compare(several, data, (), callbacks)

    @parameterized.parameters((STEPS, False), (2 * STEPS, True))
    @pytest.mark.slow_after(1)
    def test_stopped_where_nobody_knows_that_an_epoch_ends(self, steps, tests):
        """What watches metrics sees those of this epoch."""

        class Stopping(keras.callbacks.Callback):
            left = steps

            def on_train_batch_end(self, batch, logs=None):
                self.left -= 1
                self.model.stop_training = not self.left

        def data():
            some = {"validation_data": (X, X)} if tests else {}
            return {"x": dataset().filter(lambda x, y: True).batch(8), **some}

        def callbacks():
            return [
                keras.callbacks.ReduceLROnPlateau(
                    monitor="loss", patience=1, min_delta=10.0, mode="min"
                )
            ]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The data have no known end.
            self.fit(small(), data, *callbacks(), Stopping(), every_steps=None)
            self.assertEqual(
                Store(self.workdir).positions()[-1],
                Position(steps // STEPS - 1, STEPS),
            )
            self.compare(small, data, (), callbacks)

    @pytest.mark.slow
    def test_killed_in_the_validation_after_it_was_stopped(self):
        class Stopping(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = batch == STEPS - 1

            def on_test_begin(self, logs=None):
                raise Died

        def data():
            return {**DATA["arrays"](), "validation_data": (X, X)}

        with self.assertRaises(Died):
            self.fit(small(), data, Stopping(), every_steps=None)
        self.assertEqual(Store(self.workdir).positions(), [Position(0, STEPS)])
        self.compare(small, data, ())

    @pytest.mark.slow
    def test_metrics_of_validation_alone(self):
        def late():
            model = small()
            model.late = Late(name="late")
            test_step = model.test_step

            def tested(data):
                model.late.update_state(tf.reduce_mean(data[0]))
                return test_step(data)

            model.test_step = tested
            return model

        def data():
            return {**DATA["arrays"](), "validation_data": (X, X)}

        # In the second epoch: the model has validated, and a new one has not.
        self.compare(late, data, (7,))

    @parameterized.parameters(True, False)
    @pytest.mark.slow
    def test_order_of_shared_generators(self, seeded):
        def data():
            if not seeded:
                np.random.seed()
            return {"x": Shuffling()}

        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            if seeded:
                self.compare(small, data, (12,))
            else:
                self.with_deaths(small, data, (12,))
        self.assertEqual(
            "comes in another order" in told.getvalue(), not seeded
        )

    @parameterized.parameters(
        lambda: np.random.default_rng(),
        lambda: np.random.RandomState(),
        lambda: random.Random(),
        lambda: tf.random.Generator.from_non_deterministic_state(),
    )
    @pytest.mark.slow_after(1)
    def test_own_generators_without_a_seed(self, numbers):
        """A `PyDataset` that would draw other numbers is refused."""

        class Scaled(InOrder):
            def __init__(self):
                super().__init__()
                self.numbers = numbers()

            def __getitem__(self, i):
                x, y = super().__getitem__(i)
                draw = getattr(self.numbers, "random", None)
                if draw is None:
                    draw = lambda: self.numbers.uniform(())  # noqa: E731
                return x * np.float32(draw()), y

        def data():
            return {"x": Scaled()}

        with self.assertRaises(Died):
            self.fit(small(), data, Dying(3))
        with self.assertRaisesRegex(
            ValueError, "another seed of the generators that a PyDataset has"
        ):
            self.fit(small(), data)

    @pytest.mark.slow
    def test_own_generators_of_a_run_that_has_ended(self):
        """It needs no data, nor that its numbers can be drawn again."""

        class Unseeded(OwnNoise):
            def __init__(self):
                super().__init__()
                self.numbers = np.random.default_rng()

        model = small()
        self.fit(model, lambda: {"x": Unseeded()})
        again = small()
        self.fit(again, lambda: {"x": Unseeded()})
        self.assert_same(model, again)

    @parameterized.parameters("drawn", "held")
    @pytest.mark.slow_after(1)
    def test_generators_that_have_no_state_or_draw_nothing(self, use):
        """`fit` takes them, with a `Checkpoint` and validation data."""

        class Local(random.Random):
            def getstate(self):
                return 3, object()

        class Augmenting:
            numbers = random.Random(1)
            dropout = keras.layers.Dropout(0.5)

        augmenting = Augmenting()
        augmenting.own = random.Random(2)
        dropout = keras.layers.Dropout(0.5)

        class Batches(InOrder):
            def __init__(self):
                super().__init__()
                self.module = np.random
                self.system = random.SystemRandom()
                self.local = Local()
                self.augmenting = augmenting
                self.dropout = dropout

            def __getitem__(self, i):
                if use == "drawn":
                    self.system.random()
                    self.augmenting.own.random()
                return super().__getitem__(i)

        data = {"x": Batches(), "validation_data": Batches()}
        self.fit(small(), lambda: data)

    @pytest.mark.slow
    def test_initial_epoch(self):
        """The data begins with the `initial_epoch` of `fit`."""
        whole = small()
        whole.fit(**DATA["arrays in order"](), epochs=3, verbose=0)
        with self.assertRaises(Died):
            self.fit(small(), DATA["arrays in order"], Dying(13))
        with self.assertRaisesRegex(ValueError, "begin after 3.*epoch=3"):
            self.fit(
                small(),
                lambda: {**DATA["arrays in order"](), "initial_epoch": 3},
                epochs=5,
            )
        parts = small()
        self.fit(
            parts, lambda: {**DATA["arrays in order"](), "initial_epoch": 2}
        )
        self.assert_same(whole, parts)
        # Training goes on in the same process.
        self.fit(parts, DATA["arrays in order"], epochs=4)
        whole.fit(
            **DATA["arrays in order"](), initial_epoch=3, epochs=4, verbose=0
        )
        self.assert_same(whole, parts)

    def test_restore(self):
        checkpoint = Checkpoint(self.workdir)
        self.assertEqual(checkpoint.restore(make()), (0, 0))
        trained = make()
        self.fit(trained, DATA["arrays"], epochs=1)
        other = make()
        self.assertEqual(checkpoint.restore(other), (1, 0))
        self.assert_same(trained, other)
        self.assertEqual(checkpoint.newest(), self.workdir / "epoch_00001")


class WritingTest(TestCase):
    def test_positions(self):
        self.fit(make(), DATA["arrays"], every_steps=2, keep=3)
        self.assertEqual(
            Store(self.workdir).positions(),
            [Position(2, 2), Position(2, 4), Position(3)],
        )

    def test_relative_path(self):
        """It is one for all of a run, wherever the program goes meanwhile."""

        class Going(keras.callbacks.Callback):
            def on_epoch_begin(_, epoch, logs=None):
                os.chdir(self.get_temp_dir())

        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.workdir)
        checkpoint = Checkpoint("run", every_steps=2)
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            small().fit(
                **DATA["arrays"](), verbose=0, callbacks=[Going(), checkpoint]
            )
        self.assertEmpty(told.getvalue())
        self.assertEqual(checkpoint.newest(), self.workdir / "run/epoch_00001")

    def test_by_time(self):
        self.fit(make(), DATA["arrays"], epochs=1, keep=9, **EACH_STEP)
        self.assertEqual(
            Store(self.workdir).positions(),
            [*(Position(0, i) for i in range(1, STEPS)), Position(1)],
        )

    def test_what_is_not_a_number_is_not_written(self):
        """The loss of the step that makes weights infinite is still finite."""
        model = make(optimizer=lambda: keras.optimizers.SGD(1e38))
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            self.fit(
                model,
                lambda: {**DATA["arrays"](), "y": 1e3 * X},
                keep=99,
                **EACH_STEP,
            )
        self.assertEqual(told.getvalue().count("not finite numbers"), 1)
        for position in Store(self.workdir).positions():
            saved = store.read(Store(self.workdir).path(position))
            for i, array in enumerate(saved.arrays):
                if array.name.endswith("kernel") and array.kind == "weights":
                    self.assertTrue(np.isfinite(saved.value(i)).all())

    def test_loss_that_is_not_a_number(self):
        """A mean over an epoch with one bad batch, which changes no weights."""
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), L.Dense(4), L.Dense(4)], num_stages=2
        )
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        model.compile(optimizer, "mse")
        x = np.where(np.arange(40) < 8, np.nan, 1.0)[:, np.newaxis] * X
        history = self.fit(
            model,
            lambda: {"x": x, "y": X, "batch_size": 8, "shuffle": False},
            epochs=1,
        )
        self.assertAllEqual(np.isnan(history.history["loss"]), [True])
        self.assertIn(Position(1), Store(self.workdir).positions())

    @pytest.mark.slow
    def test_memory(self):
        """Old copies and variables that have moved are not kept."""
        model = make(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True))
        # It copies before the steps 2 and 4.
        checkpoint = Checkpoint(self.workdir, every_steps=2)
        before, left = [], []

        class Looking(keras.callbacks.Callback):
            def on_train_batch_end(_, batch, logs=None):
                if batch == 2 and not before:
                    for v in model.trainable_variables:
                        v = upstream.tensorflow_variable(v)
                        before.append(weakref.ref(v.handle))
                    model.rebalance([1, 5])
                if batch == 3 and not left:
                    gc.collect()
                    left.extend(x() is not None for x in before)

        model.fit(
            **DATA["arrays"](),
            epochs=2,
            verbose=0,
            callbacks=[Looking(), checkpoint],
        )
        self.assertIn(False, left)

    def test_killed_while_writing(self):
        (self.workdir / "partial").mkdir()
        (self.workdir / "partial" / "part_00000.bin").write_bytes(b"1")
        self.fit(make(), DATA["arrays"], epochs=1, keep=1)
        self.assertEqual(os.listdir(self.workdir), ["epoch_00001"])

    def test_copies_are_of_one_moment(self):
        model = make()
        model.fit(**DATA["arrays"](), verbose=0)
        before = values(model)
        parts = state.Copier(model).copy()
        model.fit(**DATA["arrays"](), verbose=0)
        copies = {
            (array.kind, array.number): np.concatenate(
                [np.ravel(piece) for piece in pieces]
            ).reshape(array.shape)
            for part in parts
            for array, pieces in state.values(part)
        }
        # One part a stage, as in the checkpoint.
        self.assertLen(parts, 2)
        i = 0
        for kind, variables in model_variables.variables_of(model).items():
            if kind == model_variables.METRICS:
                continue
            for k, _ in enumerate(variables):
                self.assertAllEqual(copies[kind, k], before[i])
                i += 1
        self.assertLen(before, i)


class StoreTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.store = Store(tempfile.mkdtemp(dir=self.get_temp_dir()))

    def write(self, epochs, keep=9, **content):
        content = {"position": [epochs, 0], **content}
        return self.store.write(Position(epochs), [], content, keep)

    def test_keep(self):
        for keep in (1, 2, 4):
            self.write(0, keep=1)
            for n in range(1, 7):
                self.write(n, keep=keep)
                kept = range(max(0, n - keep + 1), n + 1)
                self.assertEqual(self.store.positions(), [*map(Position, kept)])

    def test_numbers_of_numpy(self):
        """As of fit(steps_per_epoch=np.int64(3))."""
        path = self.write(1, a=np.int64(3), b=[np.float32(0.5), np.bool_(True)])
        content = store.read(path).content
        self.assertEqual((content["a"], content["b"]), (3, [0.5, True]))

    def test_replaced(self):
        """The old one is there until the new one is."""
        self.write(1)
        rename = pathlib.Path.rename
        seen = []

        def renaming(path, target):
            seen.append(
                [
                    p.name
                    for p in path.parent.iterdir()
                    if (p / "index.json").exists()
                ]
            )
            return rename(path, target)

        with mock.patch.object(pathlib.Path, "rename", renaming):
            self.write(1)
        for names in seen:
            self.assertLen(names, 2)
        self.assertEqual(os.listdir(self.store.directory), ["epoch_00001"])

    def test_that_could_not_be_replaced(self):
        """The old one comes back, also after a kill between two renamings."""
        rename = pathlib.Path.rename

        def failing(path, target):
            if path.name == "partial":
                raise OSError(errno.EIO, "no")
            return rename(path, target)

        self.write(1, a="old")
        with (
            mock.patch.object(pathlib.Path, "rename", failing),
            self.assertRaises(OSError),
        ):
            self.write(1, a="new")
        path = self.store.path(Position(1))
        self.assertEqual(store.read(path).content["a"], "old")
        path.rename(path.with_name("epoch_00001.replaced"))
        writer = Writer(self.store.directory, 2)
        writer.lock()
        self.assertEqual(writer.read().content["a"], "old")
        writer.end()

    def test_directory_of_another_user(self):
        """It is read, and only training needs to write there."""
        self.write(1)
        refused = PermissionError(errno.EACCES, "Permission denied")
        writer = Writer(self.store.directory, 2)
        with mock.patch.object(pathlib.Path, "mkdir", side_effect=refused):
            writer.lock()
        self.assertEqual(writer.read().content["position"], [1, 0])
        with self.assertRaisesRegex(
            OSError, r"Cannot write to .*: Permission denied$"
        ):
            writer.check()
        # Once that is mended, the same callback is used again.
        writer.lock()
        writer.check()
        writer.end()

    def test_that_cannot_be_read(self):
        """It is not damaged, and is not passed by."""
        path = self.write(1)
        _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            with self.assertRaisesRegex(OSError, "Too many open files"):
                store.read(path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def test_of_another_version(self):
        self.write(1)
        with mock.patch.object(store, "_FORMAT", 2):
            self.write(2)
        with self.assertRaisesRegex(
            CheckpointError, "has format 2.*reads form"
        ):
            Writer(self.store.directory, 2).read()

    def test_file_system_without_fsync_of_directories(self):
        fsync = os.fsync

        def of_files(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "Invalid argument")
            fsync(descriptor)

        with mock.patch.object(os, "fsync", of_files):
            store.read(self.write(1))

    def test_read_while_another_process_writes(self):
        self.write(1)
        read = store.read

        def late(path):
            # A process that trains writes the next one, and deletes this.
            if path == self.store.path(Position(1)):
                self.write(2, keep=1)
            return read(path)

        told = io.StringIO()
        with (
            mock.patch.object(store, "read", late),
            contextlib.redirect_stderr(told),
        ):
            saved = Writer(self.store.directory, 2).read()
        self.assertEqual(saved.content["position"], [2, 0])
        self.assertEmpty(told.getvalue())


class DamageTest(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.written = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.written)
        cls.model = small()
        checkpoint = Checkpoint(cls.written, every_steps=2)
        cls.model.fit(**DATA["arrays"](), verbose=0, callbacks=[checkpoint])

    def setUp(self):
        super().setUp()
        keras.utils.set_random_seed(3)
        shutil.copytree(self.written, self.workdir, dirs_exist_ok=True)
        self.newest = self.workdir / "epoch_00001"

    def damage(self, name, how):
        path = self.newest / name
        data = bytearray(path.read_bytes())
        if how == "bit":
            data[len(data) // 2] ^= 4
        elif how == "short":
            del data[-9:]
        elif how == "long":
            data.append(0)
        elif how == "empty":
            data.clear()
        path.write_bytes(data)
        if how in ("missing", "directory", "pipe"):
            path.unlink()
        if how == "directory":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)

    @pairwise.each(
        name=("part_00000.bin", "part_00001.bin", "index.json", "CRC32SUMS"),
        how=(
            *("bit", "short", "long", "empty", "missing"),
            *("directory", "pipe"),
        ),
    )
    @pytest.mark.slow_after(1)
    def test_the_one_before_is_taken(self, name, how):
        self.damage(name, how)
        checkpoint = Checkpoint(self.workdir)
        self.assertEqual(checkpoint.restore(small()), (0, 4))

    @pytest.mark.slow
    def test_exactly(self):
        self.damage("part_00001.bin", "bit")
        model = small()
        self.fit(model, DATA["arrays"], epochs=1)
        self.assert_same(model, self.model)
        self.assertEqual(Checkpoint(self.workdir).restore(small()), (1, 0))

    @parameterized.parameters("file", "link")
    @pytest.mark.slow
    def test_something_else_in_place_of_a_checkpoint(self, kind):
        shutil.rmtree(self.newest)
        if kind == "file":
            self.newest.touch()
        else:
            self.newest.symlink_to(self.workdir / "nowhere")
        model = small()
        self.fit(model, DATA["arrays"], epochs=1)
        self.assert_same(model, self.model)
        self.assertEqual(Checkpoint(self.workdir).restore(small()), (1, 0))

    def test_all_are_damaged(self):
        self.damage("part_00000.bin", "bit")
        self.newest = self.workdir / "epoch_00000_step_000004"
        self.damage("part_00000.bin", "missing")
        with self.assertRaisesRegex(
            ValueError, "epoch_00001 is damaged: part_00000.*none before it"
        ):
            self.fit(small(), DATA["arrays"])

    @parameterized.parameters(
        ({"optimizer": lambda: keras.optimizers.AdamW(0.01)}, "with .'AdamW'"),
        ({"optimizer": lambda: keras.optimizers.SGD(0.01)}, "with .'SGD'"),
        (
            {"optimizer": lambda: keras.optimizers.Adam(0.1, use_ema=True)},
            "variables of optimizer",
        ),
    )
    def test_another_optimizer(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            self.fit(small(arguments["optimizer"]()), DATA["arrays"])

    @parameterized.parameters("adam", "sgd")
    @pytest.mark.slow_after(1)
    def test_other_weights_of_the_same_shapes(self, optimizer):
        """The slots of one layer would be those of another one."""

        def model(frozen):
            layers = [L.Dense(4, name=f"d{i}") for i in range(3)]
            layers[frozen].trainable = False
            found = tf_gpipe.PipelinedSequential(
                [keras.Input((4,)), *layers], num_stages=2
            )
            found.compile(optimizer, "mse")
            return found

        self.workdir /= optimizer
        self.fit(model(0), DATA["arrays"], epochs=1)
        with self.assertRaisesRegex(
            CheckpointError, "trained other weights.*d0/kernel.*d1/kernel"
        ):
            self.fit(model(1), DATA["arrays"], epochs=2)

    def test_another_model(self):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), L.Dense(4), L.Dense(4)], num_stages=2
        )
        model.compile("adam", "mse")
        before = model.get_weights()
        with self.assertRaisesRegex(
            ValueError, "not one of this model.*variables of weights"
        ):
            self.fit(model, DATA["arrays"])
        for x, y in zip(before, model.get_weights(), strict=True):
            self.assertAllEqual(x, y)

    def test_deleted_while_it_is_restored(self):
        """As by a process that trains, while another one evaluates."""
        restore = state.restore

        def late(model, saved, kinds):
            if saved.path == self.newest:
                self.newest.rename(self.workdir / "epoch_00002")
            restore(model, saved, kinds)

        model = small()
        with mock.patch.object(state, "restore", late):
            self.assertEqual(Checkpoint(self.workdir).restore(model), (1, 0))
        self.assert_same(model, self.model)

    @parameterized.parameters(
        ({"batch_size": 4}, "another steps of an epoch: 5, and now it is 10"),
        ({"shuffle": False}, "another seed: 3, and now it is None"),
    )
    def test_other_data(self, changes, message):
        self.damage("part_00000.bin", "bit")
        with self.assertRaisesRegex(ValueError, message):
            self.fit(small(), lambda: {**DATA["arrays"](), **changes})


class OtherDataTest(TestCase):
    @pytest.mark.slow
    def test_tf_data(self):
        def data(rows=40, seed=2, size=8):
            return lambda: {
                "x": tf.data.Dataset.from_tensor_slices((X[:rows], X[:rows]))
                .shuffle(40, seed)
                .repeat()
                .batch(size),
                "steps_per_epoch": STEPS,
                "shuffle": False,
            }

        with self.assertRaises(Died):
            self.fit(small(), data(), Dying(4))
        for changes, message in (
            ({"seed": 3}, r"another seed of the data.* 2\]\], .* 3\]\]"),
            ({"size": 7}, r"another batch size: \[8\], and now it is \[7\]"),
            ({"rows": 39}, r"another number of rows.*\[40\], .*\[39\]"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                self.fit(small(), data(**changes))


@pytest.mark.slow
class WorkersTest(TestCase):
    def run_client(self, what, *python):
        workdir = self.workdir / what
        workdir.mkdir()
        result = subprocess.run(
            [
                *(sys.executable, "-m", "tf_gpipe", "workers", "--restart"),
                *("4" if what == "size" else "2", *python, "-m"),
                *("tests.tf_gpipe.checkpoint_client", str(workdir), what),
            ],
            capture_output=True,
            text=True,
            timeout=500,
            preexec_fn=child_process.end_with_parent,
        )
        self.assertEqual(result.returncode, 0, result.stderr[-3000:])
        return result.stdout.splitlines()[-1]

    def test_killed_worker(self):
        """A callback, a supervisor and workers' --restart are enough."""
        python = quick_python.command()
        supervise = sys.executable, "-m", "tf_gpipe", "supervise"
        self.assertEqual(
            self.run_client("whole", *python),
            self.run_client("8", *supervise, *python),
        )

    def test_memory_of_the_client(self):
        told = json.loads(self.run_client("size", sys.executable))
        self.assertGreater(told["of_stage"], 60)
        # Though all four stages are written and restored.
        self.assertLess(told["more"], 2 * told["of_stage"])


def generator():
    while True:
        yield X[:8], X[:8]


class RefusedTest(TestCase):
    @parameterized.parameters(
        (lambda: {"x": generator()}, "GeneratorDataAdapter"),
        (
            lambda: {
                "x": tf.data.Dataset.from_tensor_slices((X, X))
                .map(lambda x, y: (x + tf.random.normal((4,)), y))
                .batch(8)
            },
            "MapDataset.*without a seed|without a seed.*MapDataset",
        ),
        (
            lambda: {
                "x": tf.data.Dataset.range(2).flat_map(
                    lambda _: (
                        tf.data.Dataset.from_tensor_slices((X, X))
                        .shuffle(9)
                        .batch(8)
                    )
                )
            },
            "without a seed .FlatMapDataset",
        ),
        (
            lambda: {
                "x": tf.data.Dataset.from_tensor_slices((X, X))
                .shuffle(9)
                .batch(8)
                .prefetch(1)
            },
            "without a seed .ShuffleDataset",
        ),
        (lambda: {"x": X, "y": X}, "no seed has been set"),
        (
            lambda: {
                "x": tf.data.Dataset.from_tensor_slices((X, X))
                .map(
                    lambda x, y: (x + tf.random.normal((4,), seed=1), y),
                    num_parallel_calls=2,
                )
                .batch(8)
            },
            "parallel calls .ParallelMapDataset",
        ),
    )
    def test_data(self, data, message):
        model = make()
        self.addCleanup(keras.utils.set_random_seed, 0)
        tf.compat.v1.set_random_seed(None)
        with self.assertRaisesRegex(ValueError, message):
            self.fit(
                model, lambda: {"steps_per_epoch": 2, "shuffle": True, **data()}
            )
        self.assertEmpty(os.listdir(self.workdir))

    @parameterized.parameters(
        (Rows, STEPS - 1, True),
        (Endless, STEPS, True),
        (NoisyRows, STEPS - 1, True),
        (Flipped, STEPS - 1, True),
        (Rows, STEPS, False),
        (Rows, None, False),
        (NoisyRows, STEPS, False),
        (InOrder, STEPS - 1, False),
    )
    def test_rows_drawn_before_an_epoch_ends(self, data, steps, refused):
        """Whether a shuffle then still concerns them is left to chance."""

        def fit():
            self.fit(
                small(),
                lambda: {
                    "x": data(),
                    "steps_per_epoch": steps,
                    "shuffle": False,
                },
                epochs=1,
            )

        if not refused:
            fit()
            return
        with self.assertRaisesRegex(
            ValueError, f"{data.__name__}.*steps_per_epoch={steps}"
        ):
            fit()
        self.assertEmpty(os.listdir(self.workdir))

    @parameterized.parameters(
        NoisyRows,
        Flipped,
        OwnNoise,
        NoiseByAnObject,
        NoiseByAFunction,
        NoiseByALayer,
    )
    def test_numbers_by_several_workers(self, data):
        with self.assertRaisesRegex(
            ValueError, f"{data.__name__} .*default_rng.*workers=2"
        ):
            self.fit(small(), lambda: {"x": data(workers=2)})
        self.assertEmpty(os.listdir(self.workdir))

    @parameterized.parameters(
        ("parts of a shuffle", "Shuffle.*reshuffle_each_iteration=False"),
        ("the same", "Shuffle"),
        ("a generator", "Map"),
        ("a layer", "Map"),
        ("parts of a shuffle that stays", None),
        ("two shuffles", None),
        ("a table", None),
        ("the same PyDataset", "Rows"),
        ("the same PyDataset in order", None),
        ("the generator of two PyDatasets", "Rows"),
        ("two PyDatasets", None),
    )
    def test_validation_that_draws_from_the_same(self, kind, message):
        """`fit` cannot draw again what validations have drawn."""

        def mapped(function):
            data = tf.data.Dataset.from_tensor_slices((X, X))
            return [data.map(lambda x, y: (function(x), y)) for _ in range(2)]

        if "parts" in kind:
            stays = "stays" in kind
            x = tf.data.Dataset.from_tensor_slices((X, X))
            x = x.shuffle(40, seed=2, reshuffle_each_iteration=not stays)
            train, test = x.skip(8), x.take(8)
        elif kind == "the same PyDataset":
            train = test = Rows()
        elif kind == "the same PyDataset in order":
            train = test = InOrder()
        elif "PyDatasets" in kind:
            train, test = Rows(), Rows()
            if "generator" in kind:
                test.numbers = train.numbers
        elif kind == "the same":
            train = test = dataset()
        elif kind == "two shuffles":
            train, test = dataset(), dataset()
        elif kind == "a generator":
            numbers = tf.random.Generator.from_seed(1)
            train, test = mapped(lambda x: x + numbers.normal((4,)))
        elif kind == "a layer":
            noise = L.GaussianNoise(0.1, seed=1)
            train, test = mapped(lambda x: noise(x, training=True))
        else:
            table = tf.constant(X)
            train, test = mapped(lambda x: x + tf.gather(table, 1))

        def fit():
            self.fit(
                small(),
                lambda: {
                    "x": train if "PyData" in kind else train.batch(8),
                    "validation_data": test
                    if "PyData" in kind
                    else test.batch(8),
                    "shuffle": False,
                },
                epochs=1,
            )

        if message is None:
            fit()
            return
        with self.assertRaisesRegex(ValueError, f"validation.*{message}"):
            fit()
        self.assertEmpty(os.listdir(self.workdir))

    @parameterized.parameters("MT19937", "PCG64", "Philox", "SFC64")
    def test_random_states(self, name):
        kept = np.random.get_bit_generator()
        np.random.set_bit_generator(getattr(np.random, name)(3))
        try:
            np.random.normal()
            states = json.loads(json.dumps(random_numbers.states()))
            expected = random.random(), np.random.normal(size=3)
            random_numbers.set_states(states)
            self.assertEqual(random_numbers.states(), states)
            received = random.random(), np.random.normal(size=3)
        finally:
            np.random.set_bit_generator(kept)
        self.assertEqual(expected[0], received[0])
        self.assertAllEqual(expected[1], received[1])

    def test_strings(self):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), L.Dense(4), Calls()],
            num_stages=2,
            num_micro_batches=1,
        )
        model.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "strings"):
            self.fit(model, DATA["arrays"])
        self.assertEmpty(os.listdir(self.workdir))

    def test_order_left_open(self):
        options = tf.data.Options()
        options.deterministic = False
        how = {"num_parallel_calls": 2, "deterministic": False}
        model = make()
        for data in (
            dataset().batch(8).with_options(options),
            dataset().map(lambda x, y: (x, y), **how).batch(8),
        ):
            with self.assertRaisesRegex(ValueError, "deterministic=False"):
                self.fit(model, lambda data=data: {"x": data})

    def test_optimizer_of_other_weights(self):
        other = keras.layers.Dense(2)
        other.build((None, 4))
        model = small()
        model.other = keras.optimizers.SGD(0.1)
        model.other.build(other.trainable_variables)
        with self.assertRaisesRegex(ValueError, "an attribute of the model"):
            self.fit(model, DATA["arrays"])
        # Where its weights are those of a model, it is restored with them.
        before = [x.numpy() for x in other.weights]
        model.part = other
        self.fit(model, DATA["arrays"], epochs=1)
        for x in (*other.weights, *model.other.variables):
            x.assign(x + 1)
        self.fit(model, DATA["arrays"], epochs=1)
        self.assertAllEqual(before[0], other.kernel)
        self.assertEqual(model.other.learning_rate, np.float32(0.1))

    @parameterized.parameters(True, False)
    def test_others_that_restore(self, first):
        for other, name in (
            (Checkpoint(self.workdir / "other"), "Checkpoint"),
            (
                keras.callbacks.BackupAndRestore(self.workdir / "other"),
                "BackupAndRestore",
            ),
        ):
            callbacks = [other, Checkpoint(self.workdir / "run")]
            with self.assertRaisesRegex(ValueError, f"two .*{name}"):
                small().fit(
                    **DATA["arrays"](),
                    verbose=0,
                    callbacks=callbacks if first else callbacks[::-1],
                )

    def test_models(self):
        plain = keras.Sequential([keras.Input((4,)), L.Dense(4)])
        plain.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "BackupAndRestore"):
            self.fit(plain, DATA["arrays"])
        for model in (plain, None):
            with self.assertRaisesRegex(ValueError, "BackupAndRestore"):
                Checkpoint(self.workdir).restore(model)
        unbuilt = tf_gpipe.PipelinedSequential(
            [L.Dense(4), L.Dense(4)], num_stages=2
        )
        unbuilt.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "needs a model that is built"):
            self.fit(unbuilt, DATA["arrays"])

    @parameterized.parameters(
        (TypeError, "workdir", 3),
        (ValueError, "workdir", ""),
        (ValueError, "every_steps", 1.5),
        (ValueError, "every_steps", True),
        (ValueError, "every_steps", 0),
        (TypeError, "every_seconds", "3"),
        (ValueError, "every_seconds", float("nan")),
        (ValueError, "every_seconds", float("inf")),
        (ValueError, "keep", None),
        (ValueError, "keep", -1),
    )
    def test_arguments(self, kind, name, value):
        with self.assertRaisesRegex(kind, f"Received: {name}="):
            Checkpoint(**{"workdir": self.workdir, name: value})

    def test_workdir_is_a_file(self):
        path = self.workdir / "file"
        path.touch()
        with self.assertRaisesRegex(ValueError, "path of a directory"):
            Checkpoint(path)


if __name__ == "__main__":
    tf.test.main()
