"""`one_device`: what trains within a device's memory, by tf_gpipe and Keras."""

import argparse
import json
import math

import keras

import tf_gpipe
from tf_gpipe.commands import models
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tools import command_line
from tools import worker_usage
from tools.benchmark import device_step
from tools.benchmark import fresh
from tools.benchmark.report import Report

# A search ends when a size that fits is within this factor of one that does
# not, or its memory within this factor of the limit.
_EXACT = 1.1
# The share of the limit at which the next try aims.
_AIM = 0.97
# The limit in MiB for timing plain Keras at a size that does not fit.
_BEYOND = 3072


def add_arguments(parser):
    fresh.add_arguments(parser, device_step.CASES, "build/one_device.json")
    parser.add_argument(
        "--limit",
        type=command_line.positive,
        default=256,
        help="MiB for weights, slots, gradients, activations and operations",
    )
    parser.add_argument(
        "--num_micro_batches",
        type=command_line.positive,
        default=8,
        help="of a step of tf_gpipe, and steps that Keras accumulates",
    )
    parser.add_argument(
        "--kernels",
        choices=worker_usage.KERNELS,
        default="tensorflow",
        help="library of kernels: oneDNN's do not unfold images for the "
        "gradients of convolutions; with them TensorFlow 2.21 crashes in "
        "AmoebaNet-D",
    )
    parser.add_argument(
        "--ways",
        type=command_line.choices(device_step.WAYS),
        default=",".join(device_step.WAYS),
        help="which ways, beside plain Keras, to which others are compared",
    )
    parser.add_argument(
        "--way", choices=device_step.WAYS, help="with --only: which way"
    )
    parser.add_argument(
        "--share",
        type=command_line.positive_number,
        help="with --only: share of --limit to plan, "
        f"{device_step.SHARE} if not given",
    )
    parser.add_argument(
        "--size",
        type=command_line.positive,
        help="with --only: rows of the batch, or input size",
    )


def main(args):
    """The largest batch, image or sequence that trains in a device's memory.

    The ways are plain Keras; `keras.RematScope` around the layers that allow
    it; `gradient_accumulation_steps`; both; and a pipeline of one stage with as
    many micro-batches, remat="auto" and a `memory_limit` of nine tenths of the
    memory, or less where operations need more. Sizes are searched to within a
    tenth: for the pipeline by plans, for the others by running steps. Each step
    runs in a process of its own.

    "MiB" is the peak of the process's resident memory in a step, above its
    memory between steps, plus weights and slots. A batch is the samples of one
    update of the weights. CPU seconds depend less than wall time on what else
    the machine does. A single image or sequence is a batch of one, which leaves
    nothing to accumulate.
    """
    given = [x for x in ("way", "size", "share") if getattr(args, x)]
    if args.only and not (args.way and args.size):
        raise argparse.ArgumentError(None, "--only needs --way and --size")
    if given and not args.only:
        raise argparse.ArgumentError(None, f"--{given[0]} needs --only")
    if args.only:
        print(
            json.dumps(device_step.needs(args, args.only, args.way, args.size))
        )
        return None
    rows = []
    for case in args.case:
        for way, x in _found(args, case).items():
            rows.append(
                {
                    "case": case,
                    "way": way,
                    "largest": x["size"],
                    "of plain": x["of plain"],
                    "MiB": x["bytes"] / 2**20,
                    "CPU s a sample": x["cpu"],
                    "of plain's": x["work"],
                    "s a sample": x["seconds"],
                }
            )
    return Report(
        f"what trains within {args.limit} MiB, M={args.num_micro_batches}",
        rows,
        {"rows": rows},
        "of plain",
    )


def _found(args, case):
    """Returns a dictionary from each way to its results in a case."""
    single = device_step.CASES[case][1] == device_step.SINGLE
    found = {}
    start = 4 * _unit(args, case)
    for way in dict.fromkeys(("plain", *args.ways)):
        if single and way in device_step.KERAS and device_step.KERAS[way][1]:
            # A batch of one row leaves nothing to accumulate.
            continue
        first = found["plain"]["size"] if found else start
        if way == device_step.GPIPE:
            found[way] = _largest_planned(args, case, first)
            continue
        if device_step.KERAS[way][1]:
            first *= args.num_micro_batches
        found[way] = _largest(args, case, way, first)
    plain = found["plain"]
    for x in found.values():
        x["of plain"] = x["size"] / plain["size"]
        other = plain
        if single and x["size"] != plain["size"]:
            # Plain Keras does not fit at this size: timed with more memory.
            other = _measured(args, case, "plain", x["size"], _BEYOND)
        x["work"] = x["cpu"] / other["cpu"] if other["cpu"] else math.nan
    return found


def _largest(args, case, way, start):
    """Searches for the largest size that fits by running steps.

    Args:
        args: Parsed arguments of the command.
        case: String, of `device_step.CASES`.
        way: String, of `device_step.WAYS`.
        start: Integer, the size to begin with.

    Returns:
        Dict of the `size` and what `device_step.needs` returned for it.
    """
    unit = _unit(args, case)
    low, high, most = 0, math.inf, args.limit * 2**20
    number = max(1, start // unit)
    while True:
        found = _measured(args, case, way, number * unit, args.limit)
        size = found["bytes"]
        if size is not None and size <= most:
            low, best = number, found
        else:
            high = number
        if high == 1:
            raise argparse.ArgumentError(
                None,
                f"Nothing of {case} fits by {way}. Received: --limit="
                f"{args.limit}",
            )
        near = low and best["bytes"] * _EXACT >= most
        if near or high <= max(low + 1, _EXACT * low):
            return {"size": low * unit, **best}
        if size is None:
            guess = math.sqrt(max(low, 1) * high)
        else:
            # All but the fixed part grows with the rows, or with the square
            # of the input size.
            room = (_AIM * most - found["fixed"]) / (size - found["fixed"])
            power = 1 if device_step.CASES[case][1] == device_step.BATCH else 2
            guess = number * max(room, 0) ** (1 / power)
        number = int(min(max(guess, low + 1), high - 1))


def _largest_planned(args, case, start):
    """Returns what `_largest` does, for a pipeline.

    Plans find the size. If its step exceeds the limit, because operations
    need memory while they run, the next plan gets a smaller share.
    """
    share = device_step.SHARE
    while share > 0:
        size = _planned(args, case, share, start)
        found = _measured(
            args, case, device_step.GPIPE, size, args.limit, share=share
        )
        used = (found["bytes"] or math.inf) / 2**20 / args.limit
        if used <= 1:
            return {"size": size, **found}
        share = round(share - max(0.1, min(0.3, used - 1)), 2)
    raise argparse.ArgumentError(
        None,
        f"Nothing of {case} fits by {device_step.GPIPE}. Received: "
        f"--limit={args.limit}",
    )


def _unit(args, case):
    """Returns the number of which all tried sizes are multiples."""
    model, what = device_step.CASES[case]
    return (
        args.num_micro_batches
        if what == device_step.BATCH
        else device_step.MODELS[model][2]
    )


def _planned(args, case, share, start):
    """Returns the largest size that fits by its plan."""
    unit = _unit(args, case)

    def fits(number):
        size, rows, count = device_step.sizes(args, case, number * unit)
        with keras.StatelessScope(initialize_variables=False):
            model = device_step.MODELS[device_step.CASES[case][0]][0](size)
        try:
            tf_gpipe.plan(
                model,
                models.batch(model, rows, size),
                **device_step.options(args, count, share),
            )
        except TooLittleMemoryError:
            return False
        return True

    # A size that fits plain Keras should fit a pipeline.
    low = max(1, start // unit)
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high > max(low + 1, _EXACT * low):
        number = (low + high) // 2
        low, high = (number, high) if fits(number) else (low, number)
    return low * unit


def _measured(args, case, way, size, limit, **more):
    """Returns what `device_step.needs` does, measured in a fresh process."""
    return fresh.once(
        args,
        worker_usage.KERNELS[args.kernels],
        case=case,
        only=case,
        ways=way,
        way=way,
        size=size,
        limit=limit,
        **more,
    )
