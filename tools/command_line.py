"""Types and checks of command-line flags that several tools share."""

import argparse
import contextlib
import math

from tf_gpipe.commands.flags import positive


def positive_number(text):
    """Type of a flag: a positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return value


def positive_numbers(text):
    """Type of a flag: positive numbers, separated by commas."""
    return [positive_number(each) for each in text.split(",")]


def positives(text):
    """Type of a flag: positive integers, separated by commas."""
    return [positive(each) for each in text.split(",")]


def choices(names):
    """Returns the type of a flag: some of `names`, separated by commas."""

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


@contextlib.contextmanager
def checking():
    """A scope for what fails only where flags are wrong.

    Its errors become usage errors, of one line. Others, outside of it, keep
    their traceback.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise argparse.ArgumentError(None, str(error)) from error
