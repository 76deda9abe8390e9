"""Trains a model for a few steps, and returns the times of one."""

import argparse
import statistics
import time

import keras

import tf_gpipe
from tf_gpipe import progress
from tf_gpipe.commands import devices
from tf_gpipe.commands import flags
from tf_gpipe.commands import models
from tf_gpipe.commands import workers
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.simulate import Execution


def measured(args: argparse.Namespace) -> tuple[dict[str, Execution], float]:
    """Returns a step, simulated and measured, and the overhead of recording.

    Args:
        args: The flags of `python -m tf_gpipe timeline`.

    Returns:
        Tuple of a dict from titles to `Execution`s, and the time of a step with
        the recorder divided by that of a step without it.
    """
    num_devices = schedules.num_devices_of(
        args.schedule, args.num_stages, args.num_devices
    )
    if not args.workers:
        devices.ensure(num_devices)
        return _measured(args, devices.first(args.num_devices))
    processes = workers.connected(num_devices, one_core=True)
    return _measured(args, [process.device for process in processes])


def _measured(args, names):
    model = models.pipelined(
        models.get(args.model, args.model_args),
        num_stages=args.num_stages,
        num_micro_batches=args.num_micro_batches,
        balance="flops",
        schedule=args.schedule,
        remat=args.remat,
        **flags.limit(args),
        devices=names,
    )
    model.compile("sgd", "mse")
    x, y = models.random_data(model, args.batch_size * args.num_steps)
    recorder = tf_gpipe.callbacks.Timeline()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in progress.track(range(3), "training"):
        for recorded in seconds:
            clock = _Clock()
            model.fit(
                x,
                y,
                batch_size=args.batch_size,
                verbose=0,
                callbacks=[clock, *([recorder] if recorded else [])],
            )
            seconds[recorded].append(clock.seconds())
    ratio = statistics.median(
        a / b for a, b in zip(seconds[True], seconds[False], strict=True)
    )
    return recorder._charts(), ratio


class _Clock(keras.callbacks.Callback):
    """Measures the time from the start of a step to that of the next one."""

    def on_train_begin(self, logs=None):
        self.times = []

    def on_train_batch_begin(self, batch, logs=None):
        self.times.append(time.perf_counter())

    def seconds(self):
        # Without the first step, which TensorFlow traces.
        times = self.times[1:]
        return statistics.median(
            b - a for a, b in zip(times, times[1:], strict=False)
        )
