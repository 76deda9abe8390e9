"""Checkpoints of several kinds, loaded into a model with other stages."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests.devices import KIND

DEVICES = [f"{KIND}:{i}" for i in range(4)]
X = np.random.default_rng(0).standard_normal((12, 4), dtype="float32")
Y = X[:, :2]
# The number of stages at saving and at loading, and whether the model is
# functional. With 0 it is a plain Keras model, with 4 each of two devices has
# two stages.
CASES = (
    ((4, 2), True),
    ((2, 4), False),
    ((3, 0), True),
    ((0, 2), True),
    ((2, 0), False),
)


def made(num_stages, functional=True, seed=0):
    """Returns a compiled model.

    It has BatchNormalization, optimizer slots and averages of the weights,
    with which `fit` replaces the weights at its end.
    """
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    layers = [L.Dense(4, "tanh") for _ in range(3)]
    layers += [L.BatchNormalization(), L.Dense(2)]
    if functional:
        x = y = keras.Input((4,))
        for layer in layers:
            y = layer(y)
        model = keras.Model(x, y)
    else:
        model = keras.Sequential([keras.Input((4,)), *layers])
    if num_stages:
        make = tf_gpipe.PipelinedSequential
        if functional:
            make = tf_gpipe.PipelinedModel.from_model
        model = make(
            model,
            num_stages=num_stages,
            num_micro_batches=1,
            schedule="zb_v" if num_stages == 4 else "1f1b",
            devices=DEVICES[: 2 if num_stages == 4 else num_stages],
        )
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, "mse")
    return model


def fit(model, epochs, callbacks=(), **kwargs):
    return model.fit(
        X,
        Y,
        batch_size=4,
        shuffle=False,
        verbose=0,
        epochs=epochs,
        callbacks=list(callbacks),
        **kwargs,
    )


class Stop(keras.callbacks.Callback):
    """Interrupts `fit` after the first epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


class CheckpointsTest(tf.test.TestCase, parameterized.TestCase):
    def assert_same(self, model, other):
        for a, b in (
            (model.variables, other.variables),
            (model.optimizer.variables, other.optimizer.variables),
        ):
            self.assertLen(a, len(b))
            for x, y in zip(a, b, strict=True):
                self.assertAllClose(x, y, rtol=1e-5, atol=1e-6, msg=x.path)

    @parameterized.parameters(*CASES)
    @pytest.mark.slow_after(1)
    def test_tensorflow(self, stages, functional):
        old, new = (made(k, functional, i) for i, k in enumerate(stages))
        fit(old, 1)
        path = self.get_temp_dir() + "/checkpoint"
        saved = tf.train.Checkpoint(model=old, optimizer=old.optimizer)
        path = saved.save(path)
        new.optimizer.build(new.trainable_variables)
        read = tf.train.Checkpoint(model=new, optimizer=new.optimizer)
        read.restore(path).assert_existing_objects_matched()
        self.assert_same(old, new)
        for model in (old, new):
            fit(model, 1)
        self.assert_same(old, new)

    @parameterized.parameters(*CASES)
    @pytest.mark.slow_after(1)
    def test_backup_and_restore(self, stages, functional):
        folder = self.get_temp_dir()
        old, new = (made(k, functional, i) for i, k in enumerate(stages))
        whole = made(stages[1], functional)
        fit(whole, 2)
        backup = keras.callbacks.BackupAndRestore(folder)
        with self.assertRaises(KeyboardInterrupt):
            fit(old, 2, [backup, Stop()])
        history = fit(new, 2, [keras.callbacks.BackupAndRestore(folder)])
        self.assertEqual(history.epoch, [1])
        self.assert_same(whole, new)

    @parameterized.parameters(*CASES)
    @pytest.mark.slow_after(1)
    def test_orbax(self, stages, functional):
        pytest.importorskip("orbax.checkpoint")
        folder = pathlib.Path(self.get_temp_dir(), "orbax")
        old, new = (made(k, functional, i) for i, k in enumerate(stages))
        callback = keras.callbacks.OrbaxCheckpoint(
            str(folder), save_on_background=False
        )
        saved = []
        keep = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: saved.extend(old.get_weights())
        )
        fit(old, 1, [callback, keep])
        new.load_weights(str(folder))
        self.assertAllClose(saved, new.get_weights())
        if not functional:
            return  # Keras loads no weights of a `Sequential` this way.
        loaded = keras.models.load_model(str(folder))
        self.assertIs(type(loaded), type(old))
        self.assertAllClose(saved, loaded.get_weights())
        # `fit` did the same at its end.
        loaded.optimizer.finalize_variable_values(loaded.trainable_variables)
        self.assert_same(old, loaded)


if __name__ == "__main__":
    tf.test.main()
