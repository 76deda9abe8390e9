"""`pipeline`: how much faster K devices are than one."""

import argparse
import contextlib
import itertools
import statistics

import tensorflow as tf

import tf_gpipe
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import REMAT_MODES
from tools import command_line
from tools.benchmark import timed_runs
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.benchmark.report import Report

_WAIT = 15.36


def add_arguments(parser):
    parser.add_argument(
        "--on",
        choices=("workers", "local", "simulated"),
        default="workers",
        help="worker processes of one core each; GPUs of this host, or parts "
        "of its CPU; or worker processes that wait instead of computing",
    )
    parser.add_argument(
        "--num_stages",
        type=command_line.positives,
        default="2",
        help="the K of each pipeline",
    )
    parser.add_argument(
        "--num_devices",
        type=command_line.positive,
        help="devices over which the interleaved schedules and auto spread "
        "the stages; one a stage if not given. zb_v, v_half and v_min have "
        "half as many as stages",
    )
    parser.add_argument(
        "--num_micro_batches",
        type=command_line.positives,
        default="8",
        help="the M of each pipeline",
    )
    parser.add_argument(
        "--schedule",
        type=command_line.choices(schedules.NAMES),
        default="1f1b",
        help="the schedule of each pipeline",
    )
    parser.add_argument(
        "--remat",
        type=command_line.choices((*REMAT_MODES, AUTO_REMAT)),
        default="never",
        help="the remat mode of each pipeline",
    )
    parser.add_argument(
        "--memory_limit",
        type=command_line.positive_numbers,
        help="the shares of the activations of never that auto may take, for "
        "a pipeline each; 0.5 if not given",
    )
    parser.add_argument(
        "--steps_per_execution",
        type=command_line.positives,
        default="1",
        help="steps of each pipeline that follow one another in a graph",
    )
    parser.add_argument(
        "--num_replicas",
        type=command_line.positives,
        default="1",
        help="copies of each pipeline under a MirroredStrategy, on devices and "
        "with a batch of their own. Either 1, another number, or both",
    )
    parser.add_argument(
        "--workload",
        choices=workloads.WORKLOADS,
        help="what stages compute; transformer if not given",
    )
    parser.add_argument(
        "--jit_compile",
        action="store_true",
        help="XLA compiles the stages of the pipelines, not the one device "
        "that they are compared with",
    )
    parser.add_argument(
        "--num_layers",
        type=command_line.positive,
        help="layers of each stage of simulated accelerators; 1 if not given",
    )
    parser.add_argument(
        "--wait",
        type=command_line.positive_number,
        help="seconds that a step waits on one simulated accelerator, "
        f"{_WAIT} if not given",
    )
    parser.add_argument("--batch_size", type=command_line.positive, default=64)
    parser.add_argument("--num_steps", type=command_line.positive, default=3)
    parser.add_argument("--num_repeats", type=command_line.positive, default=5)


def main(args):
    """Pipelines against one device, for each K, M, schedule and remat mode.

    The ideal speed-up of K devices is K M / (M + K - 1), as in the GPipe paper,
    times 3/4 with --remat=always, and times the replicas. "simulated" is the
    speed-up of the schedule with equal stages. It exceeds the ideal where the
    schedule recomputes less or has a smaller bubble. "idle" is the share of the
    devices' time beyond the time that one device needs: recomputing, and all
    that makes a pipeline slower, count as idle. With remat auto the stages are
    cut for what they recompute, as by default; otherwise they are equal.

    With --on=simulated a worker is a simulated accelerator: its stage waits
    instead of computing, so that there may be more workers than cores. The
    forward pass takes a third of a step. With replicas these are logical
    devices of this process, since a MirroredStrategy takes no others. For
    remat auto, give stages some layers: --num_layers=64 is enough for a
    --memory_limit of 0.25. "simulated" takes into account how many layers each
    stage has.
    """
    workloads.check_rows(args.batch_size, max(args.num_micro_batches))
    if args.num_devices and set(args.schedule).isdisjoint(
        schedules.ANY_STAGES_A_DEVICE
    ):
        raise argparse.ArgumentError(
            None,
            f"--num_devices is not for --schedule={','.join(args.schedule)}",
        )
    simulated = args.on == "simulated"
    if args.memory_limit and AUTO_REMAT not in args.remat:
        raise argparse.ArgumentError(None, "--memory_limit is for --remat=auto")
    for name in ("workload",) if simulated else ("wait", "num_layers"):
        if getattr(args, name) is not None:
            raise argparse.ArgumentError(
                None, f"--{name} is not for --on={args.on}"
            )
    what = args.workload or "transformer"
    make, balance = workloads.WORKLOADS[what], "flops"
    if simulated:
        wait = args.wait or _WAIT
        what, balance = f"waiting for {wait:g} s", "parameters"
        forward = wait / 3 / args.batch_size
    grid = list(
        itertools.product(
            args.num_stages,
            args.num_micro_batches,
            args.schedule,
            [
                (mode, limit)
                for mode in args.remat
                for limit in (
                    (args.memory_limit or [0.5])
                    if mode == AUTO_REMAT
                    else [None]
                )
            ],
            args.steps_per_execution,
            args.num_replicas,
            (args.jit_compile,),
        )
    )
    with command_line.checking():
        row = max(
            schedules.num_devices_of(schedule, num_stages, args.num_devices)
            for num_stages, _, schedule, *_ in grid
        )
    num_replicas = max(args.num_replicas)
    if not {1, num_replicas}.issuperset(args.num_replicas):
        # A process can use one strategy.
        raise argparse.ArgumentError(
            None,
            "--num_replicas must be one number, or 1 and another one. "
            f"Received: {args.num_replicas}",
        )
    if num_replicas > 1 and args.on == "workers":
        raise argparse.ArgumentError(
            None, "--num_replicas needs --on=local or --on=simulated"
        )
    names, processes, note = timed_runs.devices(
        args.on, row * num_replicas, num_replicas > 1
    )
    rows = [names[r * row : (r + 1) * row] for r in range(num_replicas)]
    strategy = None
    if num_replicas > 1:
        strategy = tf.distribute.MirroredStrategy([x[0] for x in rows])

    def layers(num_stages):
        if not simulated:
            return make()
        count = num_stages * (args.num_layers or 1)
        return workloads.waiting(count, forward / count)

    # This starts TensorFlow.
    x, y = workloads.data(layers(1), args.batch_size * num_replicas)

    def run(num_stages, num_micro_batches, schedule, mode, steps, copies, xla):
        remat, limit = mode
        count = schedules.num_devices_of(schedule, num_stages, args.num_devices)
        used = [x[:count] for x in rows[:copies]]
        with strategy.scope() if copies > 1 else contextlib.nullcontext():
            with command_line.checking():
                model = tf_gpipe.PipelinedSequential(
                    layers(num_stages),
                    num_stages=num_stages,
                    num_micro_batches=num_micro_batches,
                    balance=None if remat == AUTO_REMAT else balance,
                    schedule=schedule,
                    remat=remat,
                    memory_limit=limit,
                    devices=used,
                )
            workloads.compiled(model, xla, steps)
        size = args.batch_size * copies
        return timed_runs.Run(
            model, x[:size], y[:size], processes, args.num_steps
        )

    one = 1, 1, "1f1b", ("never", None), 1, 1, False
    runs = {one: run(*one), **{key: run(*key) for key in grid}}
    seconds = timed_runs.timed(runs, args.num_repeats)
    found = []
    for key, each in runs.items():
        num_stages, num_micro_batches, schedule, mode, steps, copies, xla = key
        remat, limit = mode
        speedup = copies * timing.median_ratio(seconds[one], seconds[key])
        num_devices = len(each.model._pipeline.schedule.tasks)
        bound = timed_runs.ideal_speedup(num_devices, num_micro_batches, remat)
        ideal = copies * bound
        found.append(
            {
                "num_stages": num_stages,
                "num_devices": num_devices,
                "num_micro_batches": num_micro_batches,
                "schedule": schedule,
                "remat": remat,
                "memory_limit": limit,
                "steps_per_execution": steps,
                "num_replicas": copies,
                "jit_compile": xla,
                "samples_per_second": copies
                * args.batch_size
                / statistics.median(seconds[key]),
                "speedup": speedup,
                "ideal": ideal,
                "fraction": speedup / ideal,
                "idle": 1 - speedup / (copies * num_devices),
                "simulated": copies
                * timed_runs.simulated_speedup(each.model, simulated),
                "cores_used": statistics.median(each.cores),
                "client_cores_used": statistics.median(each.client),
            }
        )
    return Report(
        f"{what}, batch of {args.batch_size} a replica, on {note}",
        [
            {
                "K": row["num_stages"],
                "devices": row["num_devices"],
                "M": row["num_micro_batches"],
                "schedule": row["schedule"],
                "remat": row["remat"]
                + (f", {row['memory_limit']:g}" if row["memory_limit"] else ""),
                "steps": row["steps_per_execution"],
                "replicas": row["num_replicas"],
                "XLA": row["jit_compile"],
                "samples/s": row["samples_per_second"],
                "speed-up": row["speedup"],
                "ideal": row["ideal"],
                "fraction": row["fraction"],
                "idle": row["idle"],
                "simulated": row["simulated"],
                "cores": row["cores_used"],
                "client's": row["client_cores_used"],
            }
            for row in found
        ],
        {"rows": found},
        "speed-up",
    )
