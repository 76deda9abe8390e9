"""`trace`: the time until the first step has run."""

import argparse
import json
import statistics
import time

import keras

import tf_gpipe
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import REMAT_MODES
from tools import command_line
from tools import local_devices
from tools.benchmark import fresh
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.benchmark.report import Report

_WORKLOADS = {
    **workloads.WORKLOADS,
    "dense": workloads.dense,
    "resnet50": workloads.resnet50,
}
_NUM_BLOCKS = 24


def add_arguments(parser):
    parser.add_argument("--workload", choices=_WORKLOADS, default="transformer")
    parser.add_argument(
        "--model",
        choices=("sequential", "functional"),
        default="sequential",
        help="what the layers are given to",
    )
    parser.add_argument("--num_stages", type=command_line.positive, default=4)
    parser.add_argument(
        "--num_micro_batches", type=command_line.positive, default=32
    )
    parser.add_argument(
        "--num_blocks",
        type=command_line.positive,
        help="layers, or blocks of them; not for resnet50; for others "
        f"{_NUM_BLOCKS} if not given",
    )
    parser.add_argument("--batch_size", type=command_line.positive, default=64)
    parser.add_argument("--schedule", choices=schedules.NAMES, default="1f1b")
    parser.add_argument("--remat", choices=REMAT_MODES, default="always")
    parser.add_argument("--num_repeats", type=command_line.positive, default=3)
    parser.add_argument(
        "--only", choices=("keras", "tf_gpipe"), help="measure this one only"
    )


def main(args):
    """Time to trace and run the first step, against plain Keras."""
    workloads.check_rows(args.batch_size, args.num_micro_batches)
    what = args.workload
    if what != "resnet50":
        what += f", {args.num_blocks or _NUM_BLOCKS} blocks"
    elif args.num_blocks:
        raise argparse.ArgumentError(
            None, f"--num_blocks is not for --workload={what}"
        )
    if args.only:
        print(json.dumps(_first_step(args)))
        return None
    seconds = timing.interleaved(
        {
            name: lambda name=name: fresh.measure(args, only=name)
            for name in ("keras", "tf_gpipe")
        },
        args.num_repeats,
    )
    ratio = timing.median_ratio(seconds["tf_gpipe"], seconds["keras"])
    medians = {k: statistics.median(v) for k, v in seconds.items()}
    return Report(
        f"Seconds to trace and run the first step: {what}, "
        f"K={args.num_stages}, M={args.num_micro_batches}, {args.schedule}, "
        f"remat {args.remat}",
        [
            {"": name, "seconds": medians[name], "of keras": of_keras}
            for name, of_keras in (("keras", 1.0), ("tf_gpipe", ratio))
        ],
        {**medians, "ratio": ratio},
        "seconds",
    )


def _first_step(args):
    """Returns the seconds of a model's first step in this process."""
    with command_line.checking():
        num_devices = schedules.num_devices_of(args.schedule, args.num_stages)
        devices, _ = local_devices.find(num_devices)
    make = _WORKLOADS[args.workload]
    num_blocks = args.num_blocks or _NUM_BLOCKS
    layers = make() if args.workload == "resnet50" else make(num_blocks)
    x, y = workloads.data(layers, args.batch_size)
    pipelined = {
        "num_stages": args.num_stages,
        "num_micro_batches": args.num_micro_batches,
        "schedule": args.schedule,
        "remat": args.remat,
        "devices": devices[:num_devices],
    }
    if args.model == "functional":
        outputs = inputs = layers[0]
        for layer in layers[1:]:
            outputs = layer(outputs)
        plain, pipeline = keras.Model, tf_gpipe.PipelinedModel
        made_of = [inputs, outputs]
    else:
        plain, pipeline = keras.Sequential, tf_gpipe.PipelinedSequential
        made_of = [layers]
    if args.only == "keras":
        model = plain(*made_of)
    else:
        with command_line.checking():
            model = pipeline(*made_of, **pipelined)
    model = workloads.compiled(model)
    ends = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )
    start = time.perf_counter()
    model.fit(x, y, batch_size=args.batch_size, verbose=0, callbacks=[clock])
    return ends[0] - start
