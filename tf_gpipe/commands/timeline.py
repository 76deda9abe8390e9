"""Shows when each device of a pipeline runs what, and what it waits for.

Simulates a schedule; or, with --model, trains a model for a few steps on random
data, over logical CPU devices where there is no accelerator (or over worker
processes of one core each, with --workers), and shows the step of median length
below its simulation from the measured times.

Examples:

    python -m tf_gpipe timeline --num_stages=4 --num_micro_batches=8
    python -m tf_gpipe timeline --model=resnet_small --num_stages=2
    python -m tf_gpipe timeline --model=my_models:make --trace=step.json
"""

import argparse
import json
import math
from collections.abc import Sequence

from tf_gpipe.commands import flags
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.search import search
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.simulate import Times
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.step_files import StepFiles
from tf_gpipe.schedule.tasks import AUTO_REMAT

# The most characters of a line.
_WIDEST = 10_000
# The largest cost of a task, so that the sum of all costs is finite; and the
# least one above 0, so that the width of a chart divided by the time is finite.
_LARGEST_COST, _LEAST_COST = 1e300, 1e-300


def make_parser() -> argparse.ArgumentParser:
    parser = flags.make_parser(
        "timeline",
        __doc__,
        model=None,
        num_stages=4,
        num_micro_batches=8,
        batch_size=256,
    )
    for name, default, what in (
        ("forward", 1.0, "a micro-batch's forward pass through a stage"),
        ("backward", 2.0, "its backward pass, without recomputation"),
        ("recompute", 1.0, "its recomputation"),
    ):
        parser.add_argument(
            f"--{name}",
            type=_costs,
            default=default,
            help=f"time of {what}; one number, or one a stage with commas",
        )
    parser.add_argument(
        "--transfer",
        type=_costs,
        default=0.0,
        help="time from a stage to the next one, and back; one number, or "
        "one for each of the K-1 boundaries with commas",
    )
    parser.add_argument(
        "--workers",
        action="store_true",
        help="run --model over worker processes, each on a core of its own",
    )
    parser.add_argument(
        "--num_steps",
        type=flags.positive,
        default=10,
        help="steps of --model, with the recorder and without it by turns",
    )
    parser.add_argument(
        "--width",
        type=flags.positive,
        default=80,
        help="characters of a line",
    )
    parser.add_argument(
        "--picture", metavar="PATH", help="save an image here (.png, .svg)"
    )
    parser.add_argument(
        "--html", metavar="PATH", help="save a page to zoom into here (.html)"
    )
    parser.add_argument(
        "--trace",
        metavar="PATH",
        help="save a trace for Perfetto or chrome://tracing here (.json)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = flags.parse(parser, argv)
    of_model = "workers model_args dtype_policy batch_size num_steps"
    for name in of_model.split():
        if getattr(args, name) != parser.get_default(name) and not args.model:
            parser.error(f"--{name} needs --model")
    for name in ("forward", "backward", "recompute", "transfer"):
        if getattr(args, name) != parser.get_default(name) and args.model:
            parser.error(f"--{name} is for a step on paper, without --model")
    if args.remat == AUTO_REMAT and not args.model:
        parser.error("--remat=auto needs --model, whose layers it chooses from")
    if args.num_steps < 3:
        # Times are taken from the start of a step to that of the next one, and
        # the first step, which is traced, does not count.
        parser.error(f"--num_steps must be at least 3, not {args.num_steps}")
    if args.width > _WIDEST:
        parser.error(f"--width must be at most {_WIDEST}, not {args.width}")
    with flags.in_effect(parser, args):
        files = StepFiles(args.trace, args.picture, args.html)
        if args.model:
            from tf_gpipe.commands import recording

            steps, ratio = recording.measured(args)
        else:
            steps, ratio = simulated(args), None
        files.write(steps)
    step = list(steps.values())[-1]
    names = ("makespan", "busy", "bubble", "peak_micro_batches")
    totals = {name: getattr(step, name) for name in names}
    if args.schedule == schedules.AUTO:
        print(list(steps)[0])
    print(timeline.text_chart(step, args.width))
    peaks = ", ".join(map(str, step.peak_micro_batches))
    print(f"most micro-batches kept, by stage: {peaks}")
    if ratio is not None:
        print(f"a step with the recorder takes {ratio:.3f} of one without")
        totals["recorder_ratio"] = ratio
    if args.json:
        print(json.dumps(totals))


def simulated(args: argparse.Namespace) -> dict[str, Execution]:
    """Returns a dict from the title to the simulated step."""
    costs = {
        "forward": args.forward,
        "backward": args.backward,
        "recompute": args.recompute,
        "transfer": args.transfer,
    }
    title = "simulated"
    if args.schedule == schedules.AUTO:
        plan = search(
            Times.of(args.num_stages, **costs),
            args.num_micro_batches,
            args.num_devices or args.num_stages,
            args.remat,
        )
        title += f", {plan.title}"
    else:
        plan = schedules.get(
            args.schedule,
            args.num_stages,
            args.num_micro_batches,
            args.num_devices,
        )
    return {title: simulate(plan, **costs, remat=args.remat)}


def _costs(text: str) -> float | list[float]:
    try:
        values = [float(x) for x in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(x == 0 or _LEAST_COST <= x <= _LARGEST_COST for x in values):
        raise argparse.ArgumentTypeError(
            "not a number, or numbers with commas, each 0 or from "
            f"{_LEAST_COST:g} to {_LARGEST_COST:g}: {text!r}"
        )
    return values if "," in text else values[0]
