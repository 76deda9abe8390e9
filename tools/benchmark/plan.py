"""`plan`: planned memory and step time, beside what is measured."""

import argparse
import json
import time

import keras

from tf_gpipe.commands import models
from tf_gpipe.commands import workers
from tf_gpipe.devices import slots
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.planning.candidates import Fixed
from tf_gpipe.planning.choice import Chooser
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.layer_times import LayerTimes
from tf_gpipe.tuning import measured_layers
from tf_gpipe.tuning import measured_speeds
from tools import command_line
from tools import worker_usage
from tools.benchmark import fresh
from tools.benchmark import planned_models
from tools.benchmark import timing
from tools.benchmark.planned_models import MODELS
from tools.benchmark.report import Report

_REMAT = ("always", "never")
# Relative errors that a plan may have: in memory, in the memory of models of
# convolutions, and in time.
_LIMITS = (0.05, 0.1, 0.1)
# Each is measured by processes of its own: where freed memory is given back at
# once, as measured memory needs it, a step may take three times as long.
_QUANTITIES = ("memory", "time")
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"


def add_arguments(parser):
    fresh.add_arguments(parser, MODELS, "build/plan.json")
    parser.add_argument("--num_stages", type=command_line.positive, default=2)
    parser.add_argument(
        "--num_micro_batches", type=command_line.positive, default=8
    )
    parser.add_argument(
        "--measuring_seconds",
        type=command_line.positive_number,
        default=30.0,
        help="time limit for measuring a model's layers",
    )
    parser.add_argument("--num_repeats", type=command_line.positive, default=3)
    parser.add_argument(
        "--quantity",
        choices=_QUANTITIES,
        default="time",
        help="what `--only` measures; without it, all are measured",
    )
    planned_models.add_kernels(parser)


def main(args):
    """Peak memory and step time of pipelines: planned, and measured.

    Each stage has a worker process with one core; memory and time are measured
    by processes of their own. Memory is planned from the layers alone; time
    from the measured times of layers, speeds and transfers, as by
    `tf_gpipe.tune`. Measured memory is the peak of the process's resident
    memory in a step, above its memory between steps, plus the size of weights
    and slots. Measured time is the shortest of some steps. CPU seconds of a
    step are compared with the time that devices are planned to be busy: they
    depend less on what else the machine does. Ratios are planned over measured;
    those of memory are of the stage with the worst ratio.
    """
    if args.only:
        print(json.dumps(_measured(args, args.only, args.quantity)))
        return None
    rows = []
    for name in args.case:
        found = [
            fresh.once(args, only=name, case=name, quantity=quantity)
            for quantity in _QUANTITIES
        ]
        rows += [{"model": name, **a, **b} for a, b in zip(*found, strict=True)]
    wrong = {
        name: sum(abs(x[name] - 1) > _limit(x, name) for x in rows)
        for name in ("memory", "step", "time", "work")
    }
    notes = [
        f"{name}: {len(rows) - wrong[name]} of {len(rows)} within the limit; "
        f"the worst is {x['model']}, remat {x['remat']}: {x[name]:.2f}"
        for name in wrong
        for x in [max(rows, key=lambda x: abs(x[name] - 1))]
    ]
    return Report(
        f"plans: K={args.num_stages}, M={args.num_micro_batches}, 1F1B; MiB of "
        "each stage at the peak, and what of that a step adds",
        [
            {
                "model": x["model"],
                "kernels": x["kernels"],
                "remat": x["remat"],
                "planned": _mebibytes(x["planned_bytes"]),
                "measured": _mebibytes(x["measured_bytes"]),
                "memory": x["memory"],
                "planned of a step": _mebibytes(x["planned_step_bytes"]),
                "measured of a step": _mebibytes(x["measured_step_bytes"]),
                "step": x["step"],
                "planned s": x["planned_seconds"],
                "measured s": x["measured_seconds"],
                "time": x["time"],
                "planned busy s": x["planned_busy"],
                "CPU s": x["measured_busy"],
                "work": x["work"],
            }
            for x in rows
        ],
        {"rows": rows, "wrong": wrong},
        "memory",
        notes,
    )


def _limit(row, name):
    own, convolutions, seconds = _LIMITS
    if name in ("time", "work"):
        return seconds
    return convolutions if row["convolutions"] else own


def _mebibytes(sizes):
    return ", ".join(f"{x / 2**20:.0f}" for x in sizes)


def _worst(planned, measured):
    """Returns the ratio that is furthest from 1."""
    ratios = [x / max(y, 1e-9) for x, y in zip(planned, measured, strict=True)]
    return max(ratios, key=lambda x: abs(x - 1))


def _measured(args, name, quantity):
    """Returns a model's results, a dictionary for each remat mode."""
    make, num_rows, length, convolutions = MODELS[name]
    kernels = planned_models.kernels_of(name, args)
    found = []
    environment = worker_usage.KERNELS[kernels]
    if quantity == "time":
        environment = {_ONEDNN: environment[_ONEDNN]}
    with command_line.checking():
        processes = workers.connected(
            args.num_stages, environment=environment, one_core=True
        )
    names = [x.device for x in processes]
    model = make()
    known = KnownLayers(model, models.batch(model, num_rows, length), "adam")
    machine = measured_speeds.measured(names, [None] * len(names))
    device = machine.devices[0]
    times = LayerTimes(
        known,
        measured_layers.measured(
            known,
            [known.micro_batch(args.num_micro_batches)],
            device.name,
            device.speed,
            time.monotonic() + args.measuring_seconds,
        ),
        device.speed,
    )
    for remat in _REMAT:
        fixed = Fixed(args.num_stages, args.num_micro_batches, "1f1b", remat)
        ranked = Chooser(known, times, machine).ranked(fixed, 1)
        if not ranked:
            raise argparse.ArgumentError(
                None,
                f"{name} has {len(known.names)} layers, and mini-batches of "
                f"{known.rows} rows: no pipeline has --num_stages="
                f"{args.num_stages} and --num_micro_batches="
                f"{args.num_micro_batches}",
            )
        plan = ranked[0].plan
        keras.backend.clear_session(free_memory=False)
        pipeline = models.pipelined(make(), **plan.arguments)
        x, y = planned_models.data(pipeline, num_rows, length)
        pipeline.compile("adam", planned_models.losses(y))
        row = {"kernels": kernels, "remat": remat, "convolutions": convolutions}
        row.update(
            _memory(plan, pipeline, processes, x, y)
            if quantity == "memory"
            else _time(plan, pipeline, processes, x, y, args.num_repeats)
        )
        found.append(row)
    return found


def _memory(plan, pipeline, processes, x, y):
    """Returns planned and measured bytes of each device."""
    # A plan may put a stage on any of the devices.
    own = {x.device: x for x in processes}
    added = worker_usage.peak_memory(
        [own[device] for device in plan.device_names],
        lambda: pipeline.train_on_batch(x, y),
    )
    between = [
        sum(
            size_in_bytes([stage.variables, _slots(pipeline, stage)])
            for stage in pipeline.stages
            if plan.devices[stage.index] == device
        )
        for device in range(plan.num_devices)
    ]
    planned = plan.device_bytes
    planned_step = [a - b for a, b in zip(planned, between, strict=True)]
    measured = [a + b for a, b in zip(added, between, strict=True)]
    return {
        "planned_bytes": planned,
        "measured_bytes": measured,
        "memory": _worst(planned, measured),
        "planned_step_bytes": planned_step,
        "measured_step_bytes": added,
        "step": _worst(planned_step, added),
    }


def _time(plan, pipeline, processes, x, y, num_repeats):
    """Returns planned and measured seconds of a step, and busy ones."""
    # `fit` optimises the graph of the step as it first runs.
    timing.step_seconds(pipeline, x, y, 1)
    used = sum(map(worker_usage.cpu_seconds, processes))
    seconds = min(
        timing.step_seconds(pipeline, x, y, 1) for _ in range(num_repeats)
    )
    used = sum(map(worker_usage.cpu_seconds, processes)) - used
    busy = plan.step_seconds * sum(1 - x for x in plan.device_idle)
    return {
        "planned_seconds": plan.step_seconds,
        "measured_seconds": seconds,
        "time": plan.step_seconds / seconds,
        "planned_busy": busy,
        "measured_busy": used / num_repeats,
        "work": _worst([busy], [used / num_repeats]),
    }


def _slots(pipeline, stage):
    """Returns the optimizer's slots of the weights of a stage."""
    weights = pipeline.trainable_variables
    found = slots.of_optimizer(pipeline.optimizer, weights)
    own = {id(v) for v in stage.variables}
    return [x for v, x in zip(weights, found, strict=True) if id(v) in own]
