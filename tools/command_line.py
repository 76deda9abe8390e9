"""Flags that commands about a schedule share."""

import argparse
import math

import model_zoo
from tf_gpipe import schedules
from tf_gpipe.schedule import REMAT_MODES
from trainers import models


class _Formatter(
    argparse.ArgumentDefaultsHelpFormatter,
    argparse.RawDescriptionHelpFormatter,
):
    pass


def make_parser(name, description):
    """Returns a parser with the flags that tell of a schedule.

    Args:
        name: String, the name of the module in `tools`.
        description: String, its docstring.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.{name}",
        description=description,
        formatter_class=_Formatter,
    )
    parser.add_argument(
        "--schedule",
        choices=schedules.NAMES,
        default="1f1b",
        help="the order of the tasks",
    )
    parser.add_argument(
        "--num_devices",
        type=positive,
        help="devices that --schedule=interleaved spreads the stages over; "
        "one a stage if not given",
    )
    parser.add_argument(
        "--remat",
        choices=REMAT_MODES,
        default="always",
        help="which micro-batches are recomputed",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on the last line",
    )
    return parser


def add_model_flags(parser):
    """Adds the flags of commands that cut a model of the zoo into stages."""
    parser.add_argument(
        "--model",
        choices=model_zoo.names(),
        default="resnet_small",
        help="a model of the model zoo",
    )
    parser.add_argument(
        "--model_args",
        type=model_args,
        default={},
        metavar="NAME=VALUE,...",
        help="hyper-parameters of the model, such as "
        "num_blocks=3,input_shape=(32,32,3)",
    )
    parser.add_argument(
        "--num_stages", type=positive, default=2, help="stages K"
    )
    parser.add_argument(
        "--dtype_policy",
        default="float32",
        help="Keras dtype policy, such as mixed_float16",
    )


def parse(parser, argv):
    """Returns the arguments, after the checks that all commands need."""
    args = parser.parse_args(argv)
    if args.num_devices and args.schedule != "interleaved":
        parser.error("--num_devices is for --schedule=interleaved only")
    return args


def positive(text):
    """Returns a positive integer, as the type of a flag."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a positive integer: {text!r}")
    return value


def positive_number(text):
    """Returns a positive number, as the type of a flag."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return value


def positives(text):
    """Returns positive integers, with commas between, as the type of a flag."""
    return [positive(each) for each in text.split(",")]


def choices(names):
    """Returns the type of a flag of several names, with commas between."""

    def type_(text):
        found = text.split(",")
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(
                    f"invalid choice: {name!r} (choose from "
                    f"{', '.join(map(repr, names))})"
                )
        return found

    return type_


def model_args(text):
    """Returns hyper-parameters of a model, as the type of a flag."""
    try:
        return models.parse_hyper_parameters(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
