"""Finds the arguments of the fastest pipeline that fits the devices.

Examples:

    python -m tf_gpipe tune --model=resnet_small --batch_size=64
    python -m tf_gpipe tune --model=my_models:make --num_devices=8 \\
        --device_memory=16GB --batch_size=256 --save=plan.json

With --num_devices nothing is measured: it is for devices that are not here. A
model takes the plan with `plan=tf_gpipe.Plan.load("plan.json")`.
"""

import argparse
import json
from collections.abc import Sequence

from tf_gpipe import checks
from tf_gpipe.commands import flags

# The flags that are chosen if the user does not give them.
_CHOSEN = ("num_stages", "num_micro_batches", "schedule", "remat")


def make_parser():
    parser = flags.make_parser(
        "tune",
        __doc__,
        batch_size=64,
        num_stages=None,
        schedule=None,
        remat=None,
    )
    for flag in map(parser.flag, _CHOSEN):
        flag.help = f"{flag.help}; chosen if not given"
    parser.flag("num_devices").help = "devices that are not here"
    parser.flag("memory_limit").help = argparse.SUPPRESS
    flags.add_costs(parser, "; measured if not given and the devices are here")
    parser.add_argument(
        "--budget_seconds",
        type=float,
        default=60.0,
        help="for measurements and trials; 0 for none",
    )
    parser.add_argument(
        "--save", metavar="PATH", help="a file for the plan, as JSON"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.memory_limit is not None:
        parser.error(
            "--memory_limit follows from --device_memory: 90 % of it, with "
            "--remat=auto"
        )
    with flags.in_effect(parser, args):
        if args.save:
            checks.writable("save", args.save)
        from tf_gpipe.commands import models
        from tf_gpipe.tuning.tune import tune

        found = tune(
            *models.to_plan(
                args.model, args.model_args, args.batch_size, args.length
            ),
            devices=args.num_devices,
            device_memory=args.device_memory,
            optimizer=args.optimizer,
            budget_seconds=args.budget_seconds,
            device_flops=args.device_flops,
            bandwidth=args.bandwidth,
            latency=args.latency,
            **{name: getattr(args, name) for name in _CHOSEN},
        )
        print(found, end="")
        if args.json:
            print(json.dumps(found.to_dict()))
        if args.save:
            found.save(args.save)
