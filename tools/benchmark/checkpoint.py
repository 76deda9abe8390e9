"""`checkpoint`: how much longer steps take when checkpoints are written."""

import pathlib
import statistics
import tempfile
import time

import keras
import numpy as np

import tf_gpipe
from tf_gpipe.commands import devices
from tools import command_line
from tools.benchmark import timing
from tools.benchmark.report import Report

_NUM_STAGES = 2
_WIDTH = 1000


def add_arguments(parser):
    parser.add_argument("--batch_size", type=command_line.positive, default=256)
    parser.add_argument("--num_layers", type=command_line.positive, default=8)
    parser.add_argument("--every_steps", type=command_line.positive, default=10)
    parser.add_argument("--num_steps", type=command_line.positive, default=31)
    parser.add_argument("--num_repeats", type=command_line.positive, default=9)


def main(args):
    """Step time of `fit` with and without `callbacks.Checkpoint`."""
    devices.ensure(_NUM_STAGES)
    keras.utils.set_random_seed(0)
    model = tf_gpipe.PipelinedSequential(
        [
            keras.Input((_WIDTH,)),
            *(
                keras.layers.Dense(_WIDTH, "relu")
                for _ in range(args.num_layers)
            ),
        ],
        num_stages=_NUM_STAGES,
        num_micro_batches=4,
    )
    model.compile("adam", "mse")
    x = np.random.normal(size=(args.batch_size, _WIDTH)).astype("float32")

    def run(with_checkpoints):
        with tempfile.TemporaryDirectory() as directory:
            callbacks = []
            if with_checkpoints:
                callbacks = [
                    tf_gpipe.callbacks.Checkpoint(
                        pathlib.Path(directory), every_steps=args.every_steps
                    )
                ]
            clock = _Clock()
            timing.fit(model, x, x, args.num_steps, [*callbacks, clock])
        return clock

    run(True)
    clocks = timing.interleaved(
        {
            "without": lambda: run(False),
            "with": lambda: run(True),
        },
        args.num_repeats,
    )
    ratios = {
        name: timing.median_ratio(
            *(
                [getattr(x, name) for x in clocks[y]]
                for y in ("with", "without")
            )
        )
        for name in ("seconds", "cpu_seconds")
    }
    rows = [
        {
            "checkpoints": name,
            "s a step": _median(found, "seconds") / args.num_steps,
            "CPU s a step": _median(found, "cpu_seconds") / args.num_steps,
            "longest step s": _median(found, "longest"),
        }
        for name, found in clocks.items()
    ]
    size = sum(
        v.dtype.size * np.prod(v.shape, dtype=int) / 2**20
        for v in map(
            lambda v: v.value, [*model.variables, *model.optimizer.variables]
        )
    )
    return Report(
        f"Steps with a checkpoint of {size:.0f} MiB every {args.every_steps}",
        rows,
        {"mib": float(size), "ratios": ratios, "rows": rows},
        "s a step",
        [
            "with / without, the median of pairs: "
            + ", ".join(f"{x} {ratio:.3f}" for x, ratio in ratios.items())
        ],
    )


def _median(clocks, name):
    return statistics.median(getattr(x, name) for x in clocks)


class _Clock(keras.callbacks.Callback):
    """Measures an epoch's wall and CPU seconds and its longest step."""

    def on_epoch_begin(self, epoch, logs=None):
        self._start = self._last = time.perf_counter()
        self._start_cpu = time.process_time()
        self.longest = 0.0

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self.seconds = now - self._start
        self.cpu_seconds = time.process_time() - self._start_cpu
