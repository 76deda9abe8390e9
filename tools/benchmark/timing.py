"""Times training steps, and prints what a benchmark has found."""

import json
import os
import platform
import statistics
import time

import keras
import rich.console
import rich.table
import tensorflow as tf


class _Clock(keras.callbacks.Callback):
    """From the first batch's begin to the last batch's end."""

    def on_epoch_begin(self, epoch, logs=None):
        self.start = None

    def on_train_batch_begin(self, batch, logs=None):
        if self.start is None:
            self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds = time.perf_counter() - self.start


def step_seconds(model, x, y, num_steps):
    """Returns the seconds that a step of `fit` takes, over `num_steps`."""
    clock = _Clock()
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(num_steps)
    model.fit(dataset, shuffle=False, verbose=0, callbacks=[clock])
    return clock.seconds / num_steps


def interleaved(measures, num_repeats):
    """Measures several things by turns, so that drift meets them alike.

    Args:
        measures: Dict of functions without arguments that return seconds.
        num_repeats: Integer.

    Returns:
        Dict of lists of `num_repeats` numbers.
    """
    results = {name: [] for name in measures}
    for _ in range(num_repeats):
        for name, measure in measures.items():
            results[name].append(measure())
    return results


def median_ratio(numerators, denominators):
    """Returns the median of the ratios of measurements of the same turn."""
    return statistics.median(
        a / b for a, b in zip(numerators, denominators, strict=True)
    )


def machine():
    """Returns what a figure depends on: machine and versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def report(title, rows, result, as_json):
    """Prints a table, the machine, and a JSON object where it is wanted.

    Args:
        title: String.
        rows: List of dicts with the same keys, the columns.
        result: Dict, what `--json` prints on the last line.
        as_json: Boolean.
    """
    table = rich.table.Table(title=title)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(
            *(
                f"{x:.3f}" if isinstance(x, float) else str(x)
                for x in row.values()
            )
        )
    console = rich.console.Console(highlight=False)
    console.print(table)
    about = machine()
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    if as_json:
        print(json.dumps({**result, "machine": about}))


def _processor():
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
