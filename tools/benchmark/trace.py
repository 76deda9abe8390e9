"""`trace`: how long it takes until the first step is done."""

import statistics
import time

import keras
import tensorflow as tf

import tf_gpipe
from tools.benchmark import timing
from tools.benchmark import workloads


def add_arguments(parser):
    parser.add_argument("--num_stages", type=int, default=4)
    parser.add_argument("--num_micro_batches", type=int, default=32)
    parser.add_argument("--num_blocks", type=int, default=24)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--remat", default="always")
    parser.add_argument("--num_repeats", type=int, default=3)


def main(args):
    """Tracing plus first step against plain Keras, on Transformer blocks."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * args.num_stages,
    )

    def layers():
        return workloads.transformer(args.num_blocks)

    x, y = workloads.data(layers(), args.batch_size)
    models = {
        "keras": lambda: keras.Sequential(layers()),
        "tf_gpipe": lambda: tf_gpipe.PipelinedSequential(
            layers(),
            num_stages=args.num_stages,
            num_micro_batches=args.num_micro_batches,
            schedule=args.schedule,
            remat=args.remat,
        ),
    }

    def first_step(make):
        keras.backend.clear_session()
        model = workloads.compiled(make())
        start = time.perf_counter()
        model.fit(x, y, batch_size=args.batch_size, verbose=0)
        return time.perf_counter() - start

    seconds = timing.interleaved(
        {
            name: lambda make=make: first_step(make)
            for name, make in models.items()
        },
        args.num_repeats,
    )
    ratio = timing.median_ratio(seconds["tf_gpipe"], seconds["keras"])
    medians = {k: statistics.median(v) for k, v in seconds.items()}
    timing.report(
        f"Seconds to trace and run the first step: {args.num_blocks} blocks, "
        f"K={args.num_stages}, M={args.num_micro_batches}, {args.schedule}, "
        f"remat {args.remat}",
        [{**medians, "ratio": ratio}],
        {**medians, "ratio": ratio},
        args.json,
    )
