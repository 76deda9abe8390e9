"""Shows what a pipeline will need, before anything of it is allocated.

Example:

    python -m tools.plan --model=resnet_small --num_stages=2 \\
        --num_micro_batches=8 --batch_size=64 --device_memory=512MB \\
        --find_largest=num_blocks
"""

import argparse
import dataclasses
import json
import os
import re

# Before TensorFlow is imported: it reports at start that there is no GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402

import model_zoo  # noqa: E402
from tf_gpipe import planner  # noqa: E402
from tools import command_line  # noqa: E402

# Where `--find_largest` gives up: no memory is used by what grows.
_LIMIT = 2**24


def make_parser():
    parser = command_line.make_parser("plan", __doc__)
    command_line.add_model_flags(parser)
    parser.add_argument(
        "--batch_size",
        type=command_line.positive,
        default=64,
        help="rows of a mini-batch",
    )
    parser.add_argument(
        "--num_micro_batches",
        type=command_line.positive,
        help="micro-batches M; 4 a device if not given",
    )
    parser.add_argument(
        "--balance",
        type=_balance,
        default="parameters",
        help="what stages have in nearly equal parts: parameters, flops or "
        "memory; or the layer counts of the stages with commas",
    )
    parser.add_argument(
        "--optimizer",
        default="adam",
        help="name of a Keras optimizer, whose slots are counted",
    )
    parser.add_argument(
        "--device_memory",
        type=_bytes,
        metavar="SIZE",
        help="what a device has for weights and activations: bytes, or a "
        "number with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB "
        "(powers of 1024)",
    )
    parser.add_argument(
        "--device_flops",
        type=float,
        help="operations a second that a device achieves, such as 1e13",
    )
    parser.add_argument(
        "--bandwidth",
        type=_bytes,
        metavar="SIZE",
        help="what goes from a stage to the next one in a second; needs "
        "--device_flops",
    )
    parser.add_argument(
        "--latency",
        type=float,
        default=0.0,
        help="seconds that a transfer takes besides",
    )
    parser.add_argument(
        "--find_largest",
        metavar="NAME",
        help="find the largest value of this integer hyper-parameter with "
        "which the model fits in --device_memory, starting from that in "
        "--model_args or else from 1",
    )
    return parser


def main(argv=None):
    parser = make_parser()
    args = command_line.parse(parser, argv)
    if args.find_largest and args.device_memory is None:
        parser.error("--find_largest needs --device_memory")
    before = keras.config.dtype_policy()
    largest = {}
    try:
        keras.config.set_dtype_policy(args.dtype_policy)
        if args.find_largest:
            largest = {args.find_largest: _find_largest(args)}
        found = _plan(args, largest, args.device_memory)
    except (TypeError, ValueError) as e:
        # Keras's messages have several lines.
        parser.error(" ".join(str(e).split()))
    finally:
        keras.config.set_dtype_policy(before)
    print(found, end="")
    for name, value in largest.items():
        print(f"the largest that fits: {name}={value}")
    if args.json:
        print(json.dumps({**found.to_dict(), **largest}))


def _plan(args, changed, device_memory):
    # Without values for the weights of a functional model.
    with keras.StatelessScope(initialize_variables=False):
        model = model_zoo.get(args.model, **{**args.model_args, **changed})
    functional = isinstance(model, keras.Model)
    spec = keras.tree.map_structure(
        lambda x: keras.KerasTensor((args.batch_size, *x.shape[1:]), x.dtype),
        model.input if functional else model[0].output,
    )
    return planner.plan(
        model,
        spec,
        num_stages=args.num_stages,
        num_micro_batches=args.num_micro_batches,
        schedule=args.schedule,
        num_devices=args.num_devices,
        balance=args.balance,
        remat=args.remat,
        optimizer=args.optimizer,
        device_memory=device_memory,
        device_flops=args.device_flops,
        bandwidth=args.bandwidth,
        latency=args.latency,
    )


def _find_largest(args):
    """Returns the largest value of a hyper-parameter that fits."""
    name = args.find_largest

    def fits(value):
        # Without the device's memory the planner looks for no advice.
        found = _plan(args, {name: value}, None)
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


def _balance(text):
    if not text[:1].isdecimal():
        return text
    return [command_line.positive(count) for count in text.split(",")]


def _bytes(text):
    match = re.fullmatch(r"(\d+\.?\d*)(?:([KMGT])(I?))?B?", text.upper())
    size = 0
    if match:
        number, prefix, binary = match.groups()
        power = "KMGT".index(prefix) + 1 if prefix else 0
        size = int(float(number) * (1024 if binary else 1000) ** power)
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"not a size such as 8GB, 512MB, 16GiB or a count of bytes: "
            f"{text!r}"
        )
    return size


if __name__ == "__main__":
    main()
