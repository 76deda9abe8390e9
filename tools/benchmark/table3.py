"""`table3`: throughput over a slow link, beside the paper's."""

import itertools

from tf_gpipe.commands import workers
from tools import command_line
from tools.benchmark import paper_models
from tools.benchmark import timed_runs
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.benchmark.report import Report

_NUM_STAGES = (2, 4, 8)
_NUM_MICRO_BATCHES = 32
_BATCH_SIZE = 32
# Huang et al., 2019.
_PUBLISHED = {
    "AmoebaNet-D (18, 128)": (1.0, 1.7, 2.7),
    "Transformer-24": (1.0, 1.8, 3.3),
}


def add_arguments(parser):
    parser.add_argument(
        "--model", choices=_PUBLISHED, help="this one only; both if not given"
    )
    parser.add_argument(
        "--tflops",
        type=float,
        default=5.0,
        help="operations that an accelerator does, in 10^12 a second",
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=6.0,
        help="of the link between two accelerators, in 10^9 bytes a second",
    )
    parser.add_argument(
        "--latency", type=float, default=50.0, help="of the link, microseconds"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=10.0,
        help="seconds that a step waits on one accelerator: time runs slower "
        "here, and for the link as well",
    )
    parser.add_argument("--num_repeats", type=command_line.positive, default=3)


def main(args):
    """The GPipe paper's Table 3 on simulated accelerators and links.

    Worker processes wait instead of computing, in proportion to the
    operations of the stages of the paper's model, which the planner counts.
    Between two stages another worker stands for the link. It waits as long as
    the link would take to send the activations of a micro-batch, while the
    stages go on. M is 32, and the schedule the paper's. Everything is
    recomputed; the recomputation is a part of the backward pass here.
    Throughput is relative to K=2. The speeds of accelerators and links are
    round numbers: the paper does not give its own.
    """
    names = [args.model] if args.model else list(_PUBLISHED)
    keys = list(itertools.product(names, _NUM_STAGES))
    # A worker for each stage, and for each boundary between two stages.
    processes = workers.connected(2 * max(_NUM_STAGES) - 1)
    runs = {}
    for name, num_stages in keys:
        runs[name, num_stages] = timed_runs.simulated_run(
            _layers(args, name, num_stages),
            _BATCH_SIZE,
            processes,
            num_micro_batches=_NUM_MICRO_BATCHES,
            schedule="gpipe",
            remat="never",
        )
    seconds = timed_runs.timed(runs, args.num_repeats)
    ideal = {
        k: timed_runs.ideal_speedup(k, _NUM_MICRO_BATCHES, "never")
        for k in _NUM_STAGES
    }
    rows = [
        {
            "model": name,
            "K": num_stages,
            "paper": _PUBLISHED[name][_NUM_STAGES.index(num_stages)],
            "ideal": ideal[num_stages] / ideal[2],
            "measured": timing.median_ratio(
                seconds[name, 2], seconds[name, num_stages]
            ),
        }
        for name, num_stages in keys
    ]
    return Report(
        f"Throughput relative to K=2; M={_NUM_MICRO_BATCHES}, gpipe, remat "
        f"always; simulated: {args.tflops:g} TFLOPS, links of "
        f"{args.bandwidth:g} GB/s and {args.latency:g} us",
        rows,
        {"rows": rows},
        "measured",
    )


def _layers(args, name, num_stages):
    """Returns a layer for each stage, and one for each link between two."""
    stages = paper_models.stages(name, num_stages)
    whole = sum(stage.flops for stage in stages)
    # The real seconds of a row (a forward pass, a recomputation, and a backward
    # pass that is twice as long), and how many times slower they are here.
    real = 4 * whole / args.tflops / 1e12
    slower = args.wait / _BATCH_SIZE / real
    layers = []
    for stage in stages:
        forward = slower * real / 4 * stage.flops / whole
        layers.append(workloads.Wait(forward, 3 * forward))
        link = stage.boundary_bytes / args.bandwidth / 1e9 + args.latency / 1e6
        layers.append(workloads.Wait(slower * link, slower * link))
    # The last stage sends nothing.
    return layers[:-1]
