"""`table2`: throughput by stages and micro-batches, beside the paper's."""

import itertools

from tf_gpipe.commands import workers
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.simulate import simulate
from tools import command_line
from tools.benchmark import paper_models
from tools.benchmark import timed_runs
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.benchmark.report import Report

_NUM_STAGES = (2, 4, 8)
_NUM_MICRO_BATCHES = (1, 4, 32)
_BATCH_SIZE = 32
# Huang et al., 2019: rows of M, columns of K.
_PUBLISHED = {
    "AmoebaNet-D (18, 256)": (
        (1.0, 1.13, 1.38),
        (1.07, 1.26, 1.72),
        (1.21, 1.84, 3.48),
    ),
    "Transformer-48": ((1.0, 1.07, 1.3), (1.7, 3.2, 4.8), (1.8, 3.4, 6.3)),
}


def add_arguments(parser):
    parser.add_argument(
        "--model", choices=_PUBLISHED, help="this one only; both if not given"
    )
    parser.add_argument(
        "--schedule",
        # The paper's accelerators have a stage each.
        choices=[
            name
            for name in schedules.NAMES
            if name not in (schedules.AUTO, *schedules.TWO_STAGES_A_DEVICE)
        ],
        default="gpipe",
        help="the paper's, or another one",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=10.0,
        help="seconds that a step waits on one accelerator",
    )
    parser.add_argument("--num_repeats", type=command_line.positive, default=3)


def main(args):
    """The GPipe paper's Table 2 on simulated accelerators.

    K worker processes wait instead of computing, each in proportion to the
    operations of its stage of the paper's model, which the planner counts.
    Everything is recomputed, as in the paper. Throughput is relative to K=2,
    M=1. The ideal is K M / (M + K - 1): equal stages, whose recomputation waits
    for the gradient of their outputs. "simulated" is a simulation of the
    schedule with the paper's stages. Here recomputation does not wait for the
    gradient, which helps most with M=1.
    """
    names = [args.model] if args.model else list(_PUBLISHED)
    keys = list(itertools.product(names, _NUM_MICRO_BATCHES, _NUM_STAGES))
    processes = workers.connected(max(_NUM_STAGES))
    runs = {}
    for name, num_micro_batches, num_stages in keys:
        runs[name, num_micro_batches, num_stages] = timed_runs.simulated_run(
            _layers(args.wait, name, num_stages),
            _BATCH_SIZE,
            processes,
            num_micro_batches=num_micro_batches,
            schedule=args.schedule,
            remat="always",
        )
    seconds = timed_runs.timed(runs, args.num_repeats)
    rows = []
    for name, num_micro_batches, num_stages in keys:
        published = _PUBLISHED[name][
            _NUM_MICRO_BATCHES.index(num_micro_batches)
        ][_NUM_STAGES.index(num_stages)]
        rows.append(
            {
                "model": name,
                "M": num_micro_batches,
                "K": num_stages,
                "paper": published,
                "ideal": timed_runs.ideal_speedup(
                    num_stages, num_micro_batches, "never"
                ),
                "simulated": _makespan(args.schedule, name, 1, 2)
                / _makespan(args.schedule, name, num_micro_batches, num_stages),
                "measured": timing.median_ratio(
                    seconds[name, 1, 2],
                    seconds[name, num_micro_batches, num_stages],
                ),
            }
        )
    return Report(
        f"Throughput relative to K=2, M=1; {args.schedule}, remat always, on "
        "simulated accelerators",
        rows,
        {"rows": rows},
        "measured",
    )


def _layers(wait, name, num_stages):
    """Returns a layer for each stage; they wait `wait` seconds in total."""
    return [
        # Forward pass, recomputation, and a backward pass twice as long.
        workloads.Wait(wait / 4 * share / _BATCH_SIZE)
        for share in _shares(name, num_stages)
    ]


def _shares(name, num_stages):
    """Returns the share of each stage in the model's operations."""
    costs = [stage.flops for stage in paper_models.stages(name, num_stages)]
    return [cost / sum(costs) for cost in costs]


def _makespan(schedule, name, num_micro_batches, num_stages):
    """Returns the simulated time of a step, which is 4 on one accelerator."""
    forward = [x / num_micro_batches for x in _shares(name, num_stages)]
    return simulate(
        schedules.get(schedule, num_stages, num_micro_batches),
        forward,
        [2 * x for x in forward],
        recompute=forward,
    ).makespan
