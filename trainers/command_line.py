"""Flags of programs, and errors of one line for mistakes of the user."""

import argparse
import dataclasses
import math
import os
import re
import signal
import sys

from absl import app
from absl import flags
from absl import logging

from tf_gpipe.checks import near
from tf_gpipe.commands import supervise
from trainers.interruption import Stopped

# absl's functions by the type of a flag's value.
_DEFINE = {
    bool: flags.DEFINE_bool,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    list: flags.DEFINE_list,
    str: flags.DEFINE_string,
}

# The largest integer of any flag: Keras's seeds have 32 bits.
_LARGEST = 2**32 - 1

# `--help` lists flags by module: those defined here are listed under the
# module that calls `define_flags`, not under this one.
flags.disclaim_key_flags()


class UserError(Exception):
    """An error that the user can repair: in a flag, a file, a worker process.

    Args:
        error: The exception or string whose text is shown, in one line.
    """

    def __init__(self, error):
        super().__init__(" ".join(str(error).split()))


class Unavailable(UserError):
    """A worker is lost: the same program may succeed later."""


def check_utf8(what, texts):
    """Checks that texts from outside were read as UTF-8.

    Python keeps other bytes as surrogates, which cannot be written again.

    Args:
        what: String, the name of the texts.
        texts: List of strings.

    Raises:
        UserError: If one is not UTF-8.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeError as error:
            raise UserError(
                f"{what} must be in UTF-8. Received: {text!r}"
            ) from error


def setting(default, help, *, kind=None, parse=lambda value: value, **checks):
    """Returns a dataclass field that is set by a flag of the same name.

    `define_flags` makes the flag. Its help is the documentation of the field.

    Args:
        default: Value of the flag if it is not given.
        help: String, the help of the flag.
        kind: Type of the flag: `bool`, `float`, `int`, `list` or `str`.
            Defaults to the type of `default`.
        parse: Function from the flag's value to the field's. It raises an
            `argparse.ArgumentTypeError` for a bad value. Defaults to the value
            itself.
        **checks: Arguments of absl's `DEFINE_...`: `lower_bound` and
            `upper_bound` of numbers; or `enum_values`, the allowed strings.

    Example:

    ```python
    @dataclasses.dataclass
    class Config:
        num_epochs: int = setting(20, "Epochs in all.", lower_bound=0)

    define_flags(Config)
    config = from_flags(Config)  # once the flags are parsed
    ```
    """
    define = _DEFINE[kind or type(default)]
    if "enum_values" in checks:
        define = flags.DEFINE_enum
    return dataclasses.field(
        default_factory=lambda: parse(default),
        metadata={
            "define": lambda name: define(name, default, help=help, **checks),
            "parse": parse,
        },
    )


def define_flags(cls):
    """Defines the flags of a dataclass whose fields are made by `setting`."""
    for field in dataclasses.fields(cls):
        if field.metadata:
            field.metadata["define"](field.name)


def from_flags(cls, **others):
    """Returns an instance of a dataclass with the values of its flags.

    Args:
        cls: Dataclass that `define_flags` was called with.
        **others: Values of the fields that have no flags.

    Raises:
        UserError: If the value of a flag cannot be parsed.
    """
    for field in dataclasses.fields(cls):
        if field.metadata:
            others[field.name] = parsed(field.name, field.metadata["parse"])
    return cls(**others)


def parsed(name, parse):
    """Returns the parsed value of a flag.

    Args:
        name: String, the flag's name.
        parse: Function from the flag's value to the result, as of `setting`.

    Raises:
        UserError: If the value cannot be parsed.
    """
    try:
        return parse(flags.FLAGS[name].value)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--{name}: {error}") from error


def run(main, takes_arguments=False, **defaults):
    """Parses the flags, calls `main()`, and exits.

    A bad flag and a `UserError` end the program with one line on standard
    error and exit status 1. A training run that a signal has stopped ends it
    with 128 plus the signal's number. Other exceptions are no mistakes of the
    user and keep their traceback. With --restarts, the program runs in a child
    process, which is started again when it dies.

    Args:
        main: Function without arguments, or of the list of arguments that
            are not flags.
        takes_arguments: Boolean, whether `main` takes that list. Defaults to
            `False`.
        **defaults: Defaults of flags, by name, in place of their own.
    """
    for name, value in defaults.items():
        flags.FLAGS.set_default(name, value)

    def guarded_main(argv):
        if len(argv) > 1 and not takes_arguments:
            sys.exit(f"Error: unexpected arguments: {' '.join(argv[1:])}")
        if flags.FLAGS["restarts"].value and not _is_supervised():
            command = [sys.executable, *sys.orig_argv[1:]]
            restarts = flags.FLAGS["restarts"].value
            sys.exit(supervise.run(command, restarts, errors=False))
        try:
            main(argv[1:]) if takes_arguments else main()
        except UserError as error:
            if isinstance(error, Unavailable) and _is_supervised():
                print(f"Error: {error}", file=sys.stderr)
                sys.exit(supervise.TEMPORARY)
            sys.exit(f"Error: {error}")
        except Stopped as stopped:
            print(stopped)
            # A shell's exit status for a command ended by a signal.
            sys.exit(128 + stopped.number)
        except KeyboardInterrupt:
            print("Stopped at once.", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)

    app.run(guarded_main, flags_parser=_parse)


def _is_supervised():
    return supervise.SUPERVISED in os.environ


def _parse(argv):
    try:
        check_utf8("Arguments", argv)
        arguments = flags.FLAGS(argv)
    except UserError as error:
        sys.exit(f"Error: {error}")
    except flags.Error as error:
        sys.exit(f"Error: {UserError(error)}{_near(str(error))}")
    except (OSError, UnicodeError) as error:
        sys.exit(
            "Error: a --flagfile must be a text with a flag on each line. "
            f"{UserError(error)}"
        )
    optimizer = flags.FLAGS["optimizer"]
    # Keras ignores the case of names.
    if optimizer.value.lower() != optimizer.default.lower():
        # The default arguments are those of the default optimizer.
        flags.FLAGS.set_default("optimizer_args", "")
    for name in flags.FLAGS:
        expected = _expected(flags.FLAGS[name])
        if expected:
            value = flags.FLAGS[name].value
            sys.exit(f"Error: --{name} must be {expected}. Received: {value!r}")
    # The default of `app.run` is INFO, at which TFDS logs what it reads.
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING
    return arguments


def _near(message):
    """Returns a suggestion for a misspelt value of an enumeration flag.

    absl itself suggests flags for misspelt names.
    """
    found = re.search(r"=(\S+): value should be one of <(.*)>", message)
    if not found:
        return ""
    # absl's message, to which this is appended, has no full stop at its end.
    return near([found[1]], found[2].split("|")).removeprefix(".")


def _expected(flag):
    """Returns text on the value a flag should have; `None` if it is valid."""
    value = flag.value
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"an integer of at most {_LARGEST}"
    texts = value if isinstance(value, list) else [value]
    if any(len(f"{x}.".splitlines()) > 1 for x in texts):
        # A file of flags has one a line.
        return "of one line"
    empty = isinstance(value, (list, str)) and not all([value, *value])
    may_be = flag.default == "" or flag.name == "optimizer_args"
    if flag.present and empty and not may_be:
        return "left out, or be something"
    return None


def chosen(name, among):
    """Returns the value of a flag whose choices differ by trainer.

    Args:
        name: String, the flag's name.
        among: List of strings, the choices of this trainer.

    Raises:
        UserError: If the value is none of the choices.
    """
    value = flags.FLAGS[name].value
    if value not in among:
        raise UserError(
            f"--{name} must be one of {', '.join(among)}. Received: "
            f"--{name}={value}{near([value], among)}"
        )
    return value
