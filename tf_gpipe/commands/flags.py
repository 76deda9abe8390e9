"""Flags that commands share."""

import argparse
import ast
import contextlib
import math
import re
import shutil
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import model_zoo
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import REMAT_MODES

# Of users, or of the machine that they have.
_MISTAKES = (
    *(ImportError, MemoryError, OSError, OverflowError, TypeError),
    *(ValueError, tf.errors.OpError),
)


class _Formatter(
    argparse.ArgumentDefaultsHelpFormatter,
    argparse.RawDescriptionHelpFormatter,
):
    pass


def make_parser(
    name: str, description: str | None, **defaults: Any
) -> argparse.ArgumentParser:
    """Returns a parser with the flags that tell of a model and a schedule.

    Args:
        name: String, the name of the command.
        description: String, the docstring of its module.
        **defaults: Defaults of these flags, by name.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tf_gpipe {name}",
        description=description,
        formatter_class=_Formatter,
    )
    parser.add_argument(
        "--model",
        type=_model,
        default="resnet_small",
        metavar="NAME",
        help=f"a model of the model zoo ({', '.join(model_zoo.names())}); or "
        "package.module:function, a function of yours that returns a "
        "functional or sequential Keras model, or a list of layers that "
        "begins with a keras.Input",
    )
    parser.add_argument(
        "--model_args",
        type=keyword_arguments,
        default={},
        metavar="NAME=VALUE,...",
        help="arguments of the function that makes the model, such as "
        "num_blocks=3,input_shape=(32,32,3)",
    )
    parser.add_argument(
        "--dtype_policy",
        default="float32",
        help="Keras dtype policy of the model, such as mixed_float16",
    )
    parser.add_argument(
        "--num_stages", type=positive, default=2, help="stages K"
    )
    parser.add_argument(
        "--num_micro_batches",
        type=positive,
        help="micro-batches M; None for 4 a device",
    )
    parser.add_argument(
        "--batch_size", type=positive, help="rows of a mini-batch"
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
        help="devices that --schedule=interleaved, interleaved_zero_bubble "
        "and auto spread the stages over; one a stage if not given. zb_v, "
        "v_half and v_min have two stages a device",
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
    parser.set_defaults(**defaults)
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Returns the arguments, after the checks that all commands need."""
    args = parser.parse_args(argv)
    if args.num_devices and args.schedule not in schedules.ANY_NUMBER:
        parser.error(
            "--num_devices is for --schedule=interleaved, "
            "interleaved_zero_bubble and auto only"
        )
    return args


@contextlib.contextmanager
def in_effect(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> Iterator[None]:
    """A scope with the dtype policy, which ends with errors in one line."""
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy(args.dtype_policy)
        yield
    except _MISTAKES as e:
        # Keras's messages have several lines.
        parser.error(" ".join(str(e).split()))
    finally:
        keras.config.set_dtype_policy(before)


def parse_with_program(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Returns the arguments of a command that runs another program.

    That program, with its own arguments, is the `command` of the result.
    """
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="what to run, with arguments"
    )
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("a command to run is needed")
    if shutil.which(args.command[0]) is None:
        parser.error(
            "the command must be a program that can be run. Received: "
            f"{args.command[0]}"
        )
    return args


def positive(text: str) -> int:
    """Returns a positive integer of 31 bits, as the type of a flag."""
    digits = text.lstrip("0") if re.fullmatch("[0-9]+", text) else ""
    if not digits:
        raise argparse.ArgumentTypeError(f"not a positive integer: {text!r}")
    if len(digits) > 10 or int(digits) >= 2**31:
        raise argparse.ArgumentTypeError(f"not below 2**31: {text!r}")
    return int(digits)


def keyword_arguments(text: str) -> dict[str, Any]:
    """Returns the keyword arguments in a text, as a dictionary.

    Args:
        text: String, such as `"num_blocks=3,input_shape=(32,32,3)"`.

    Raises:
        argparse.ArgumentTypeError: If it is not of this form.
    """
    try:
        call = ast.parse(f"_({text})", mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            found = {
                str(x.arg): ast.literal_eval(x.value) for x in call.keywords
            }
            if all(map(math.isfinite, _floats(found))) and "None" not in found:
                return found
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        pass
    raise argparse.ArgumentTypeError(
        "not of the form name=value,name=value, with values of Python and "
        f"finite numbers: {text!r}"
    )


def _floats(value: Any) -> list[float]:
    return [x for x in keras.tree.flatten(value) if isinstance(x, float)]


def _model(text: str) -> str:
    if text in model_zoo.names() or re.fullmatch(r"\w+(\.\w+)*:\w+", text):
        return text
    raise argparse.ArgumentTypeError(
        f"expected one of {', '.join(model_zoo.names())}; or "
        f"package.module:function. Received: {text!r}"
    )
