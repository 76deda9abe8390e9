"""`one_device`: what trains within a device's memory, by tf_gpipe and Keras."""

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

# How far what fits may be below what does not, or below the limit.
_EXACT = 1.1
# Of the memory, what a pipeline is told that it may take at first: operations
# need some while they run.
_SHARE = 0.9
# The share of the limit at which the next try aims.
_AIM = 0.97
# MiB, for the time of what does not fit.
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
        help="whose: oneDNN's do not unfold images for the gradients of "
        "convolutions; with them TensorFlow 2.21 crashes in AmoebaNet-D",
    )
    parser.add_argument(
        "--ways",
        type=command_line.choices(device_step.WAYS),
        default=",".join(device_step.WAYS),
        help="which ways; plain is the first, to which others are compared",
    )
    parser.add_argument(
        "--way", choices=device_step.WAYS, help="with --only: of this way"
    )
    parser.add_argument(
        "--share",
        type=command_line.positive_number,
        default=_SHARE,
        help="with --only: of the memory, what a pipeline may plan",
    )
    parser.add_argument(
        "--size",
        type=command_line.positive,
        help="with --only: of so many rows, or of inputs of this size",
    )


def main(args):
    """The largest batch, image or sequence that trains in a device's memory.

    By plain Keras; with `keras.RematScope` around its layers; with
    `gradient_accumulation_steps`; with both; and as a pipeline of one stage
    with as many micro-batches, remat="auto" and a `memory_limit` of nine
    tenths of the memory, or less where operations need more. For the pipeline
    a plan tells the largest size; for the others it is searched, to a tenth.
    Each try is a process of its own.

    Measured is what a step adds at its peak to the resident memory of the
    process, and to that the weights and slots between steps. The batch is
    that of an update of the weights. CPU seconds a sample depend less than the
    time on what else a machine does. A single image or sequence is a batch of
    one, for which there is nothing to accumulate.
    """
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
    """Returns what is measured in a case, by way."""
    single = device_step.CASES[case][1] == device_step.SINGLE
    found = {}
    start = 4 * _unit(args, case)
    for way in args.ways:
        if single and way in device_step.KERAS and device_step.KERAS[way][1]:
            # Of one row there is nothing to accumulate.
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
            # The time of what does not fit, with all the memory it takes.
            other = _kept(args, case, "plain", x["size"], _BEYOND)
        x["work"] = x["cpu"] / other["cpu"] if other["cpu"] else math.nan
    return found


def _largest(args, case, way, start):
    """Returns what is measured of the largest that fits, with its `size`.

    Args:
        args: What the command was called with.
        case: String, of `device_step.CASES`.
        way: String, of `device_step.WAYS`.
        start: Integer, the size to begin with.
    """
    unit = _unit(args, case)
    low, high, most = 0, math.inf, args.limit * 2**20
    number = max(1, start // unit)
    while True:
        found = _kept(args, case, way, number * unit, args.limit)
        size = found["bytes"]
        if size is not None and size <= most:
            low, best = number, found
        else:
            high = number
        if high == 1:
            raise ValueError(
                f"Nothing of {case} fits by {way}. Received: --limit="
                f"{args.limit}"
            )
        near = low and best["bytes"] * _EXACT >= most
        if near or high <= max(low + 1, _EXACT * low):
            return {"size": low * unit, **best}
        if size is None:
            guess = math.sqrt(max(low, 1) * high)
        else:
            # What is not fixed grows with the rows, or with the pixels.
            room = (_AIM * most - found["fixed"]) / (size - found["fixed"])
            power = 1 if device_step.CASES[case][1] == device_step.BATCH else 2
            guess = number * max(room, 0) ** (1 / power)
        number = int(min(max(guess, low + 1), high - 1))


def _largest_planned(args, case, start):
    """Returns the same of a pipeline, whose memory is what it is told to be.

    The more operations need, the less of the memory is planned.
    """
    share = _SHARE
    while share > 0:
        size = _planned(args, case, share, start)
        found = _kept(
            args, case, device_step.GPIPE, size, args.limit, share=share
        )
        used = (found["bytes"] or math.inf) / 2**20 / args.limit
        if used <= 1:
            return {"size": size, **found}
        share = round(share - max(0.1, min(0.3, used - 1)), 2)
    raise ValueError(
        f"Nothing of {case} fits by {device_step.GPIPE}. Received: "
        f"--limit={args.limit}"
    )


def _unit(args, case):
    """Returns the step in which a size is searched."""
    model, what = device_step.CASES[case]
    return (
        args.num_micro_batches
        if what == device_step.BATCH
        else device_step.MODELS[model][2]
    )


def _planned(args, case, share, start):
    """Returns the largest size that a plan says fits."""
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

    # What fits whole is there to begin with, and mostly more.
    low = max(1, start // unit)
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high > max(low + 1, _EXACT * low):
        number = (low + high) // 2
        low, high = (number, high) if fits(number) else (low, number)
    return low * unit


def _kept(args, case, way, size, limit, **more):
    """Returns what is measured of a size, by a process of its own."""
    own = "".join(f", {x}" for x in (*more.values(), args.kernels))
    return fresh.Kept(args.results).once(
        f"{case} {way} {size}, {limit} MiB, M={args.num_micro_batches}{own}",
        lambda: fresh.measure(
            args,
            worker_usage.KERNELS[args.kernels],
            case=case,
            only=case,
            ways=way,
            way=way,
            size=size,
            limit=limit,
            **more,
        ),
    )
