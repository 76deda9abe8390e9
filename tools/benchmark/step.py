"""`step`: the overhead of tf_gpipe where there is nothing to pipeline."""

import statistics

import keras

import tf_gpipe
from tools import command_line
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.benchmark.report import Report


def add_arguments(parser):
    parser.add_argument("--batch_size", type=command_line.positive, default=64)
    parser.add_argument("--num_steps", type=command_line.positive, default=5)
    parser.add_argument("--num_repeats", type=command_line.positive, default=9)


def main(args):
    """Step time of K=1, M=1 without remat against plain Keras `fit`."""
    rows, ratios = [], {}
    for name, make in workloads.WORKLOADS.items():
        x, y = workloads.data(make(), args.batch_size)
        models = {
            "keras": keras.Sequential(make()),
            "tf_gpipe": tf_gpipe.PipelinedSequential(
                make(), num_stages=1, num_micro_batches=1, remat="never"
            ),
        }
        for model in models.values():
            workloads.compiled(model)
            timing.step_seconds(model, x, y, 2)
        seconds = timing.interleaved(
            {
                key: lambda model=model, x=x, y=y: timing.step_seconds(
                    model, x, y, args.num_steps
                )
                for key, model in models.items()
            },
            args.num_repeats,
        )
        ratios[name] = timing.median_ratio(
            seconds["tf_gpipe"], seconds["keras"]
        )
        rows.append(
            {
                "workload": name,
                "keras s": statistics.median(seconds["keras"]),
                "tf_gpipe s": statistics.median(seconds["tf_gpipe"]),
                "ratio": ratios[name],
            }
        )
    return Report(
        "Seconds a step: K=1, M=1, remat never, against Keras fit",
        rows,
        {"ratios": ratios},
        "ratio",
    )
