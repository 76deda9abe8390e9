"""Flags that commands share, and the types of their values."""

import argparse
import ast
import contextlib
import math
import re
import shutil
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from tf_gpipe import progress
from tf_gpipe.checks import near
from tf_gpipe.commands import start
from tf_gpipe.commands.parser import Parser
from tf_gpipe.partition import sizes
from tf_gpipe.partition.memory_limit import MemoryLimit
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import REMAT_MODES

# The names of `model_zoo.names()`, repeated here because that imports Keras.
ZOO = (
    *("amoebanet_d", "resnet101", "resnet50", "resnet_small"),
    *("transformer_lm", "transformer_nmt", "unet"),
)
# Errors shown in one line: mistakes of the user or limits of the machine.
_MISTAKES = (
    *(ImportError, MemoryError, OSError),
    *(OverflowError, TypeError, ValueError),
)


def make_parser(name: str, description: str | None, **defaults: Any) -> Parser:
    """Returns a parser with the flags of a model and of a schedule.

    Args:
        name: String, the name of the command.
        description: String, the docstring of the command's module.
        **defaults: Defaults of these flags, by name.
    """
    parser = Parser(name, description)
    parser.add_argument(
        "--model",
        type=_model,
        default="resnet_small",
        metavar="NAME",
        help=f"a model of the model zoo ({', '.join(ZOO)}); or "
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
        help="micro-batches M",
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
        choices=(*REMAT_MODES, AUTO_REMAT),
        default="always",
        help="which micro-batches are recomputed; with auto, of all of them "
        "the layers that --memory_limit asks for",
    )
    parser.add_argument(
        "--memory_limit",
        type=_limit,
        metavar="SIZE",
        help="what a device may take, with --remat=auto: a size such as 8GB, "
        "or a share from 0 to 1 of the activations that the fullest device "
        "takes with --remat=never, such as 0.5",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on the last line",
    )
    parser.set_defaults(**defaults)
    return parser


def add_costs(parser: argparse.ArgumentParser, of_speed: str) -> None:
    """Adds flags for the optimizer, lengths, and memory and speed of devices.

    Args:
        parser: The parser of a command.
        of_speed: String added to the help of `--device_flops`.
    """
    parser.add_argument(
        "--optimizer",
        default="adam",
        help="name of a Keras optimizer, whose slots are counted",
    )
    parser.add_argument(
        "--length",
        type=positive,
        help="stands for the sizes of inputs that the model leaves open",
    )
    parser.add_argument(
        "--device_memory",
        type=size,
        metavar="SIZE",
        help="what a device has for weights and activations: bytes, or a "
        "number with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB "
        "(powers of 1024)",
    )
    parser.add_argument(
        "--device_flops",
        type=float,
        help=f"operations a second that a device achieves, such as 1e13"
        f"{of_speed}",
    )
    parser.add_argument(
        "--bandwidth",
        type=size,
        metavar="SIZE",
        help="bytes a second from a device to the next one, such as 10GB",
    )
    parser.add_argument(
        "--latency",
        type=float,
        help="seconds that each transfer takes in addition",
    )


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parses a command line, and checks flags that depend on one another."""
    args = parser.parse_args(argv)
    if args.num_devices and args.schedule not in schedules.ANY_STAGES_A_DEVICE:
        parser.error(
            "--num_devices is for --schedule=interleaved, "
            "interleaved_zero_bubble and auto only"
        )
    if (args.remat == AUTO_REMAT) != (args.memory_limit is not None):
        parser.error("--remat=auto and --memory_limit need each other")
    return args


def limit(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of a pipeline that follow from --memory_limit."""
    if args.memory_limit is None:
        return {}
    return {"memory_limit": args.memory_limit, "batch_size": args.batch_size}


@contextlib.contextmanager
def in_effect(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> Iterator[None]:
    """A scope for the body of a command: errors end it, in one line.

    Progress is shown by bars. With --model it imports TensorFlow and Keras, and
    sets the dtype policy; otherwise neither is imported.
    """
    mistakes: tuple = _MISTAKES
    with contextlib.ExitStack() as scope:
        scope.enter_context(progress.shown(not args.json))
        if args.model is not None:
            start.import_tensorflow()
            import tensorflow as tf

            from tf_gpipe.commands import models

            mistakes = (*_MISTAKES, tf.errors.OpError)
        try:
            if args.model is not None:
                scope.enter_context(models.dtype_policy(args.dtype_policy))
            yield
        except mistakes as e:
            # In one line: Keras's messages have several.
            parser.error(" ".join(str(e).split()))


def parse_with_program(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parses the command line of a command that runs another program.

    The attribute `command` of the result is that program with its arguments.
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


def size(text: str) -> int:
    """Returns a number of bytes, as the type of a flag."""
    try:
        return sizes.to_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"not a size such as 8GB, 512MB, 16GiB or a count of bytes: "
            f"{text!r}"
        ) from error


def positive(text: str) -> int:
    """Returns a positive integer of 31 bits, as the type of a flag."""
    digits = text.lstrip("0") if re.fullmatch("[0-9]+", text) else ""
    if not digits:
        raise argparse.ArgumentTypeError(f"not a positive integer: {text!r}")
    if len(digits) > 10 or int(digits) >= 2**31:
        raise argparse.ArgumentTypeError(f"not below 2**31: {text!r}")
    return int(digits)


def _limit(text: str) -> int | float:
    """Returns a memory limit: an integer of bytes, or a float share."""
    try:
        if re.fullmatch(r"[01](\.\d*)?|\.\d+", text):
            return MemoryLimit.of(float(text)).value
        return sizes.to_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"not a size such as 8GB, nor a share such as 0.5: {text!r}"
        ) from error


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
            # A name that is given twice, or `**` without a name, is refused.
            once = len(found) == len(call.keywords) and "None" not in found
            if once and all(map(math.isfinite, _floats(found))):
                return found
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        pass
    raise argparse.ArgumentTypeError(
        "not of the form name=value,name=value, with each name once, values "
        f"of Python and finite numbers: {text!r}"
    )


def _floats(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, set, tuple)):
        return [x for part in value for x in _floats(part)]
    return [value] if isinstance(value, float) else []


def _model(text: str) -> str:
    if text in ZOO or re.fullmatch(r"\w+(\.\w+)*:\w+", text):
        return text
    raise argparse.ArgumentTypeError(
        f"expected one of {', '.join(ZOO)}; or "
        f"package.module:function. Received: {text!r}{near([text], ZOO)}"
    )
