"""Programs that train over workers, for `cluster_test` and `errors_test`.

Run as `python -m tests.tf_gpipe.devices.cluster_client PROGRAM ADDRESS ...`.
The programs `sums` and `again` take no addresses: they start a worker.
"""

import functools
import os
import signal
import socket
import struct
import sys

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from keras import layers as L
from tensorflow.python.eager import context

import tf_gpipe
from tests.tf_gpipe import comparison
from tf_gpipe.commands import workers
from tf_gpipe.devices import cluster
from tf_gpipe.devices import watcher
from tf_gpipe.devices import worker_lost
from tools import worker_usage


def equal(devices):
    """Numbers are the plain model's, and variables are on their workers."""
    generator = np.random.default_rng(0)
    data = [
        (
            generator.standard_normal((size, 6), dtype="float32"),
            generator.integers(0, 3, (size,)),
        )
        for size in (8, 8, 5)
    ]

    def make():
        return [
            keras.Input((6,)),
            L.Dense(8, activation="relu", kernel_regularizer="l2"),
            L.LayerNormalization(),
            L.Dense(8),
            L.Dense(8, activation="relu"),
            L.Dense(3),
        ]

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain = comparison.train(make, data, loss=loss)
    for schedule, remat in (("1f1b", "always"), ("gpipe", "never")):
        model, logs = comparison.train(
            make,
            data,
            loss=loss,
            num_stages=len(devices),
            num_micro_batches=4,
            schedule=schedule,
            remat=remat,
            devices=devices,
        )
        comparison.assert_same(absltest.TestCase(), plain, (model, logs))
        for stage in model.stages:
            for variable in stage.variables:
                assert variable.value.device == stage.device
        owners = [v.value.device for v in model.trainable_variables]
        slots = [v.value.device for v in model.optimizer.variables[2:]]
        assert sorted(slots) == sorted(owners * 2), (slots, owners)


def skips(devices):
    """Skip connections from worker to worker."""

    def make():
        x = inputs = keras.Input((6,))
        x = first = L.Dense(6, activation="relu")(x)
        for _ in range(3):
            x = L.Add()([L.Dense(6, activation="relu")(x), first, inputs])
        return keras.Model(inputs, x)

    generator = np.random.default_rng(0)
    data = [
        tuple(generator.standard_normal((2, rows, 6), dtype="float32"))
        for rows in (8, 5)
    ]
    plain = comparison.train(make, data, loss="mse")
    for schedule in ("1f1b", "gpipe"):
        pipelined = comparison.train(
            make,
            data,
            loss="mse",
            num_stages=len(devices),
            num_micro_batches=4,
            schedule=schedule,
            devices=devices,
        )
        comparison.assert_same(absltest.TestCase(), plain, pipelined)


def masks(devices):
    """Losses leave out steps that inputs, or outputs of layers, mask."""
    generator = np.random.default_rng(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def of_tokens():
        return [
            keras.Input((5,), dtype="int32"),
            L.Embedding(9, 4, mask_zero=True),
            L.GRU(4, return_sequences=True),
            L.Dense(4),
            L.Dense(3),
        ]

    def of_activations():
        return [
            keras.Input((5, 2)),
            L.Dense(4, activation="relu"),
            L.Masking(),
            L.LSTM(4, return_sequences=True),
            L.Dense(3),
        ]

    for make, x in (
        (of_tokens, generator.integers(0, 3, (2, 8, 5))),
        (of_activations, generator.standard_normal((2, 8, 5, 2))),
    ):
        data = list(zip(x, generator.integers(0, 3, (2, 8, 5)), strict=True))
        options = {"loss": loss, "optimizer": keras.optimizers.SGD}
        plain = comparison.train(make, data, **options)
        pipelined = comparison.train(
            make,
            data,
            num_stages=len(devices),
            num_micro_batches=2,
            devices=devices,
            **options,
        )
        comparison.assert_same(absltest.TestCase(), plain, pipelined)


def boundary(devices):
    """Tensors between stages do not pass through this process."""
    width, rows, steps = 1024, 512, 10
    model = tf_gpipe.PipelinedSequential(
        [keras.Input((1,)), L.Dense(width), L.Dense(1)],
        num_stages=2,
        num_micro_batches=4,
        balance=[1, 1],
        devices=devices,
    )
    model.compile("sgd", "mse")
    x = np.ones((rows, 1), "float32")
    model.train_on_batch(x, x)
    before = _bytes_moved()
    for _ in range(steps):
        model.train_on_batch(x, x)
    moved = _bytes_moved() - before
    passed = steps * rows * width * 4 * 2
    assert 0 < moved < passed / 10, (moved, passed)


def failing(devices):
    """Errors of a stage reach this process; a Python function does not hang."""
    from tests.tf_gpipe.devices import errors_test as errors

    for kind in (errors.not_finite, errors.assertion):
        for schedule in ("1f1b", "zero_bubble"):
            model = errors.make(kind, 2, schedule=schedule, devices=devices)
            for step, error in errors.failures(model, ("fit", "predict")):
                assert isinstance(error, tf.errors.InvalidArgumentError), step
                assert errors.MESSAGE in str(error), (step, error)
                (note,) = error.__notes__
                assert "layer 'bad'" in note, note
                assert "/job:worker" in note, note

    # The function runs in this process, though its stage does not.
    def double(x):
        y = tf.numpy_function(lambda a: a * 2, [x], x.dtype)
        y.set_shape(x.shape)
        return y

    model = errors.make(double, 2, devices=devices)
    x = np.ones((16, 6), "float32")
    assert np.isfinite(model.fit(x, x, verbose=0).history["loss"]).all()
    assert np.isfinite(model.predict(x, verbose=0)).all()


def listening(devices):
    """Prints this process's port and its heartbeat's id, and waits."""
    del devices
    jobs = context.get_server_def().cluster.job
    (address,) = [x.tasks[0] for x in jobs if x.name == "localhost"]
    assert address.startswith("127.0.0.1:"), address
    print("port", address.rpartition(":")[2], flush=True)
    print("heartbeat", watcher.current.pid, flush=True)
    signal.pause()


def endless(devices):
    """Trains until it is killed or loses a worker."""
    model = tf_gpipe.PipelinedSequential(
        [keras.Input((8,)), *(L.Dense(64) for _ in range(4))],
        num_stages=len(devices),
        num_micro_batches=4,
        devices=devices,
    )
    model.compile("sgd", "mse")
    x = tf.ones((32, 8))
    dataset = tf.data.Dataset.from_tensors((x, tf.ones((32, 64)))).repeat()

    class Report(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 20:
                print("training", flush=True)

    try:
        model.fit(
            dataset, steps_per_epoch=10**9, verbose=0, callbacks=[Report()]
        )
    except tf.errors.UnavailableError as error:
        print(f"failed: {' '.join(error.message.split())}", flush=True)


def sums():
    """A worker holds one sum of gradients, and no copies of it."""

    def make():
        return [
            keras.Input((1024,)),
            *(L.Dense(1024, activation="tanh") for _ in range(16)),
        ]

    x = np.ones((16, 1024), "float32")
    processes = workers.connected(1, environment=worker_usage.GIVE_BACK)
    for schedule in ("1f1b", "zero_bubble"):
        options = {
            "num_stages": 1,
            "num_micro_batches": 4,
            "schedule": schedule,
        }
        plan = tf_gpipe.plan(make(), x.shape, optimizer="sgd", **options)
        model = tf_gpipe.PipelinedSequential(
            make(), devices=[processes[0].device], **options
        )
        model.compile("sgd", "mse")
        step = functools.partial(model.train_on_batch, x, x)
        (measured,) = worker_usage.peak_memory(processes, step)
        weights = 4 * model.count_params()
        planned = plan.stages[0].bytes - weights
        assert planned < 1.2 * weights
        assert 0.9 * planned < measured < 1.3 * planned, (measured, planned)


def again():
    """A worker ends while TensorFlow connects; a second attempt is refused."""
    with workers.started(1) as processes:
        address = processes[0].address
        place = worker_lost.places_of([address])
    for attempt, message in (
        (lambda: cluster._open(place, 30.0), "Cannot connect to workers at"),
        (lambda: tf_gpipe.connect([address]), "Start this program again"),
    ):
        with absltest.TestCase().assertRaisesRegex(
            worker_lost.WorkerLostError, message
        ):
            attempt()


def _bytes_moved():
    """Returns how many bytes this process has sent and received over TCP."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_INFO, 136
                )
            # `tcpi_bytes_acked` and `tcpi_bytes_received` of <linux/tcp.h>.
            total += sum(struct.unpack_from("QQ", info, 120))
        except (OSError, struct.error):
            continue
    return total


if __name__ == "__main__":
    program, *addresses = sys.argv[1:]
    globals()[program](*([tf_gpipe.connect(addresses)] if addresses else []))
    print("done", flush=True)
