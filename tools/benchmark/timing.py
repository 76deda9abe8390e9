"""Times training steps."""

import statistics
import time

import keras
import tensorflow as tf

from tf_gpipe import progress


class _Meter(keras.callbacks.Callback):
    """Reads numbers as the first batch begins and as the last one ends."""

    def __init__(self, read):
        super().__init__()
        self._read = read
        self.start = None

    def on_train_batch_begin(self, batch, logs=None):
        if self.start is None:
            self.start = self._read()

    def on_train_batch_end(self, batch, logs=None):
        self.end = self._read()


def step_seconds(model, x, y, num_steps):
    """Returns the mean seconds of a step of `fit`, over `num_steps` steps."""
    (seconds,) = used(model, x, y, num_steps, lambda: [time.perf_counter()])
    return seconds / num_steps


def used(model, x, y, num_steps, read):
    """Returns by how much numbers grow in the steps of `fit`.

    Without what `fit` does before the first step and after the last one.

    Args:
        model: A compiled model.
        x: Inputs of a batch.
        y: Labels of a batch.
        num_steps: Integer.
        read: Function without arguments that returns numbers, such as times.

    Returns:
        List of numbers.
    """
    meter = _Meter(read)
    fit(model, x, y, num_steps, [meter])
    return [b - a for a, b in zip(meter.start, meter.end, strict=True)]


def fit(model, x, y, num_steps, callbacks):
    """Trains a model on the same batch in every step."""
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(num_steps)
    model.fit(dataset, shuffle=False, verbose=0, callbacks=callbacks)


def interleaved(measures, num_repeats):
    """Measures several things in turn, so that drift affects all alike.

    Args:
        measures: Dict of functions without arguments that return seconds or
            other results.
        num_repeats: Integer.

    Returns:
        Dict of lists of `num_repeats` results.
    """
    results = {name: [] for name in measures}
    for _ in progress.track(range(num_repeats), "measuring"):
        for name, measure in measures.items():
            results[name].append(measure())
    return results


def median_ratio(numerators, denominators):
    """Returns the median of the ratios of measurements in the same turn."""
    return statistics.median(
        a / b for a, b in zip(numerators, denominators, strict=True)
    )
