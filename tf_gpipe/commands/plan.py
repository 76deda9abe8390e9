"""Shows what a pipeline will need, before anything of it is allocated.

Examples:

    python -m tf_gpipe plan --model=resnet_small --num_stages=2 \\
        --num_micro_batches=8 --batch_size=64 --device_memory=512MB \\
        --find_largest=num_blocks
    python -m tf_gpipe plan --model=my_models:make --num_stages=4
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence

from tf_gpipe import progress
from tf_gpipe.commands import flags

# The value at which `--find_largest` gives up: the hyper-parameter it raises
# does not use memory.
_LIMIT = 2**24


def make_parser() -> argparse.ArgumentParser:
    parser = flags.make_parser("plan", __doc__, batch_size=64)
    micro_batches = parser.flag("num_micro_batches")
    micro_batches.help = f"{micro_batches.help}; 4 a device if not given"
    parser.add_argument(
        "--balance",
        type=_balance,
        help="what stages have in nearly equal parts: flops (the default), "
        "parameters or memory; or the layer counts of the stages with commas",
    )
    flags.add_costs(parser, "; --bandwidth and --latency need it")
    parser.add_argument(
        "--find_largest",
        metavar="NAME",
        help="find the largest value of this integer hyper-parameter with "
        "which the model fits in --device_memory, starting from that in "
        "--model_args or else from 1",
    )
    parser.add_argument(
        "--pareto",
        action="store_true",
        help="show the time of a step against what activations may take, with "
        "remat auto and, to compare, always and never",
    )
    parser.add_argument(
        "--picture",
        metavar="PATH",
        help="draw what --pareto finds here (.png, .svg)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = flags.parse(parser, argv)
    if args.find_largest and args.device_memory is None:
        parser.error("--find_largest needs --device_memory")
    if args.picture and not args.pareto:
        parser.error("--picture needs --pareto")
    if args.pareto and (args.find_largest or args.remat != "always"):
        parser.error("--pareto tries all of --remat, and finds nothing else")
    if args.pareto:
        from tf_gpipe.commands import pareto

        with flags.in_effect(parser, args):
            pareto.show(lambda **kw: _plan(args, {}, None, **kw), args)
        return
    largest = {}
    with flags.in_effect(parser, args):
        if args.find_largest:
            largest = {args.find_largest: _find_largest(args)}
        found = _plan(args, largest, args.device_memory)
    print(found, end="")
    for name, value in largest.items():
        print(f"the largest that fits: {name}={value}")
    if args.json:
        print(json.dumps({**found.to_dict(), **largest}))


def _plan(args, changed, device_memory, **kwargs):
    from tf_gpipe.commands import models
    from tf_gpipe.planning import planner

    return planner.plan(
        *models.to_plan(
            args.model,
            {**args.model_args, **changed},
            args.batch_size,
            args.length,
        ),
        num_stages=args.num_stages,
        num_micro_batches=args.num_micro_batches,
        schedule=args.schedule,
        num_devices=args.num_devices,
        balance=args.balance,
        **kwargs or {"remat": args.remat, "memory_limit": args.memory_limit},
        optimizer=args.optimizer,
        device_memory=device_memory,
        device_flops=args.device_flops,
        bandwidth=args.bandwidth,
        latency=args.latency or 0.0,
    )


def _find_largest(args: argparse.Namespace) -> int:
    """Returns the largest value of a hyper-parameter that fits in memory."""
    from tf_gpipe.partition.memory_limit import TooLittleMemoryError

    name = args.find_largest

    def fits(value: int) -> bool:
        # Planned without a device memory, so that the planner does not search
        # for advice if the model does not fit.
        with progress.doing(f"{name}={value}"):
            try:
                found = _plan(args, {name: value}, None)
            except TooLittleMemoryError:
                return False
        return dataclasses.replace(found, device_memory=args.device_memory).fits

    low, high = 0, args.model_args.get(name, 1)
    if isinstance(high, bool) or not isinstance(high, int) or high < 1:
        raise ValueError(
            f"--find_largest needs a positive integer: {name}={high!r}"
        )
    while fits(high):
        low, high = high, 2 * high
        if high > _LIMIT:
            raise ValueError(f"--find_largest: {name}={low} fits, as all do")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise ValueError(f"--find_largest: not even {name}=1 fits")
    return low


def _balance(text: str) -> str | list[int]:
    if not text[:1].isdecimal():
        return text
    return [flags.positive(count) for count in text.split(",")]
