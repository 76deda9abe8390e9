"""Programs whose worker is hurt at a certain moment, for `faults_test`.

Run as `python -m tests.tf_gpipe.devices.faults_client MOMENT HOW HEARTBEAT`.
A program starts two workers, and sends the worker of stage 1 a signal, `KILL`
or `STOP`. It prints the outcome as a line of JSON.
"""

import json
import os
import select
import signal
import sys
import tempfile
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L

import tf_gpipe
from tf_gpipe.commands import workers
from tf_gpipe.partition import measured_calls
from tf_gpipe.tuning import measured_layers
from tf_gpipe.tuning import trials

X = np.ones((8, 4), "float32")


class Hurting(L.Layer):
    """A layer that hurts the worker once, at a given moment, when armed."""

    def __init__(self, moment, hurt):
        super().__init__()
        self.moment, self.hurt = moment, hurt
        self.armed = moment == "while_built"

    def _at(self, moment):
        if self.armed and self.moment == moment:
            self.armed = False
            self.hurt()

    def build(self, input_shape):
        self._at("while_built")

    def call(self, x):
        self._at("while_traced")
        if self.moment == "in_step":
            shape = x.shape
            x = tf.numpy_function(self._pass_on, [x], x.dtype)
            x.set_shape(shape)
        return x + 0.0

    def _pass_on(self, x):
        self._at("in_step")
        return x


def make(devices, *within):
    model = tf_gpipe.PipelinedSequential(
        [keras.Input((4,)), L.Dense(4), *within, L.Dense(4), L.Dense(4)],
        num_stages=2,
        num_micro_batches=2,
        devices=devices,
    )
    model.compile("adam", "mse")
    return model


def fit(model, **kwargs):
    return model.fit(X, X, batch_size=4, verbose=0, **kwargs)


def whose_worker_is_hurt(moment, devices, hurt, directory):
    """Returns a model, or `None`, and a function that meets the fault."""
    layer = Hurting(moment, hurt)
    if moment == "before_model":
        hurt()
        return None, lambda: make(devices)
    if moment == "while_built":
        return None, lambda: make(devices, layer)
    in_tune = {
        "while_speeds_are_measured": (measured_calls, "overhead"),
        "while_layers_are_measured": (measured_layers, "measured"),
        "in_tune": (trials, "step_seconds"),
    }
    if moment in in_tune:
        # What is measured is measured on the worker that is hurt.
        where = devices if moment == "in_tune" else devices[1:] * 2
        return None, lambda: tuned(where, hurt, *in_tune[moment])
    if moment in ("while_traced", "in_step"):
        model = make(devices, layer)
        layer.armed = True
        return model, lambda: fit(model)
    model = make(devices)
    if moment == "before_fit":
        hurt()
        return model, lambda: fit(model)
    path = os.path.join(directory, "saved.weights.h5")
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    if moment == "between_epochs":
        at_end = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: hurt()
        )
        calls = [checkpoint, at_end]
        return model, lambda: fit(model, epochs=3, callbacks=calls)
    if moment == "in_timeline":
        timeline = tf_gpipe.callbacks.Timeline()
        at_end = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: hurt()
        )
        return model, lambda: fit(model, callbacks=[timeline, at_end])
    fit(model, callbacks=[checkpoint])
    weights = model.get_weights()
    calls = {
        "in_fit": lambda: fit(model),
        "in_evaluate": lambda: model.evaluate(X, X, verbose=0),
        "in_predict": lambda: model.predict(X, verbose=0),
        "in_train_on_batch": lambda: model.train_on_batch(X, X),
        "in_get_weights": model.get_weights,
        "in_set_weights": lambda: model.set_weights(weights),
        "in_save_weights": lambda: model.save_weights(
            os.path.join(directory, "other.weights.h5")
        ),
        "in_save_weights_again": lambda: model.save_weights(path),
        "in_save": lambda: model.save(os.path.join(directory, "model.keras")),
        "in_load_weights": lambda: model.load_weights(path),
        "in_call": lambda: model(X),
        "in_loss_and_gradients": lambda: model.loss_and_gradients(X, X),
        "in_rebalance": lambda: model.rebalance(
            [len(stage.layers) for stage in model.stages][::-1]
        ),
        "in_verify": lambda: tf_gpipe.verify(model, X, X),
        "in_optimizer": lambda: [x.numpy() for x in model.optimizer.variables],
    }
    hurt()
    return model, calls[moment]


def tuned(devices, hurt, module, name):
    """Tunes a model, and hurts the worker as a function is called.

    For the second time, if there is one.
    """
    function = getattr(module, name)
    called = name == "measured"

    def hurting(*args):
        nonlocal called
        if called:
            hurt()
        called = True
        return function(*args)

    with mock.patch.object(module, name, hurting):
        layers = [keras.Input((4,)), *(L.Dense(4) for _ in range(4))]
        tf_gpipe.tune(keras.Sequential(layers), (8, 4), devices=devices)


def outcome(call, hurt_at=()):
    """Returns how a call ends, and the seconds since it met the fault.

    Args:
        call: Function.
        hurt_at: List of the times when the worker was hurt, if within the call.
    """
    start = time.monotonic()
    try:
        call()
        error = None
    except Exception as raised:
        error = raised
    return {
        "seconds": time.monotonic() - max(start, *hurt_at[:1], 0.0),
        "unavailable": isinstance(error, tf.errors.UnavailableError),
        "message": f"{type(error).__name__}: {error}",
    }


def busy(devices):
    """Trains with a layer that computes for longer than the heartbeat."""

    class Busy(L.Layer):
        def call(self, x):
            end = tf.timestamp() + 2 * float(sys.argv[3])
            (product,) = tf.while_loop(
                lambda y: tf.timestamp() < end,
                lambda y: (tf.tanh(y @ y),),
                (tf.ones((256, 256)),),
            )
            return x + 0.0 * tf.reduce_sum(product)

    model = make(devices, Busy())
    return np.isfinite(fit(model, steps_per_epoch=1).history["loss"]).all()


def interrupted(devices, hurt):
    """Trains until Ctrl-C, after a worker has gone silent."""
    # Shells let programs in the background ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = make(devices)
    fit(model)
    hurt()
    try:
        # Whenever the signal comes from here on, it is caught.
        print("stopped", flush=True)
        fit(model)
    except (KeyboardInterrupt, tf.errors.UnavailableError):
        # Python forgets an interrupt while it deletes something. The call ends
        # all the same, since the worker is no longer waited for.
        return True
    return False


def stopped(devices, pids):
    """Trains until its input ends, while it may be stopped."""
    model = make(devices)
    fit(model)
    print(json.dumps([os.getpid(), *pids]), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        fit(model)
    return True


def main(moment, how, heartbeat):
    with (
        workers.started(2) as processes,
        tempfile.TemporaryDirectory() as directory,
    ):
        devices = tf_gpipe.connect(
            [x.address for x in processes],
            heartbeat=None if heartbeat == "None" else float(heartbeat),
        )
        number = getattr(signal, f"SIG{how}")
        hurt_at: list[float] = []

        def hurt():
            processes[1].process.send_signal(number)
            hurt_at.append(time.monotonic())

        programs = {
            "busy": lambda: busy(devices),
            "interrupted": lambda: interrupted(devices, hurt),
            "with_the_client": lambda: stopped(
                devices, [x.process.pid for x in processes]
            ),
        }
        if moment in programs:
            done = programs[moment]()
            print(json.dumps({"done": bool(done)}), flush=True)
            return
        model, call = whose_worker_is_hurt(moment, devices, hurt, directory)
        told = {
            "address": processes[1].address,
            "checkpoint": os.path.join(directory, "saved.weights.h5"),
            "outcome": outcome(call, hurt_at),
        }
        if model is not None:
            told["then"] = [
                outcome(lambda: fit(model)),
                outcome(model.get_weights),
                outcome(lambda: model.save(f"{directory}/model.keras")),
            ]
        # TensorFlow does not go on with the workers that are left either.
        told["other"] = outcome(lambda: fit(make(devices[:1] * 2)))
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
