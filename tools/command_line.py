"""Types of flags that several tools share."""

import argparse
import math

from tf_gpipe.commands.flags import positive


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
