"""Times training steps."""

import statistics
import time

import keras
import tensorflow as tf

from tf_gpipe import progress


class _Clock(keras.callbacks.Callback):
    """Measures from the first batch's start to the last batch's end."""

    def on_epoch_begin(self, epoch, logs=None):
        self.start = None

    def on_train_batch_begin(self, batch, logs=None):
        if self.start is None:
            self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds = time.perf_counter() - self.start


def step_seconds(model, x, y, num_steps):
    """Returns the mean seconds of a step of `fit`, over `num_steps` steps."""
    clock = _Clock()
    fit(model, x, y, num_steps, [clock])
    return clock.seconds / num_steps


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
