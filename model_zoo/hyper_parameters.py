"""Whether arguments are such as a function takes, by what it has by default."""

import inspect
import math
import numbers

# How the names of numbers end that may be left open, beside `None`s by default.
_MAY_BE_OPEN = ("length", "clip")
# Counts of which there may be none.
_MAY_BE_ZERO = ("num_stem_reductions",)


def check(function, arguments):
    """Refuses arguments of other kinds than the defaults of a function.

    Where a default is an integer, a number, a boolean or a tuple of positive
    integers, so must be what is given: an integer is above 0, or may be 0 where
    the default is, other numbers are finite, and neither is negative unless the
    default is. What has `None` by default is a number or `None`, or no number
    at all, such as a list. Parameters without defaults are counts, above 0.
    `None` may stand for a length or a limit, and for what is neither a count
    nor a number.

    Args:
        function: Function or class, with hyper-parameters as its parameters.
        arguments: Dictionary of its keyword arguments.

    Raises:
        ValueError: If one is of another kind, or out of range.

    Example:

    >>> def model(num_blocks=4, dropout=0.0): ...
    >>> check(model, {"num_blocks": 2, "dropout": 0.5})
    """
    parameters = inspect.signature(function).parameters
    for name, value in arguments.items():
        if name not in parameters or name == "name":
            continue
        default = parameters[name].default
        expected = _expected(name, value, default)
        if expected:
            raise ValueError(
                f"`{name}` must be {expected}. Received: {name}={value!r}"
            )


def _expected(name, value, default):
    """Returns what a value should be, and is not; or `None`."""
    if default is inspect.Parameter.empty:
        default = 1
    if value is None:
        number = isinstance(default, numbers.Real)
        number = number and not isinstance(default, bool)
        if not number or name.endswith(_MAY_BE_OPEN):
            return "a positive integer" if name.startswith("num_") else None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "True or False"
    if isinstance(default, tuple):
        return _expected_shape(value, default)
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if default is None:
        if isinstance(value, (bool, str)):
            return "a number or None"
        if number and name.endswith(("steps", "frequency", "length")):
            return _expected(name, value, 1)
        finite = not number or math.isfinite(value)
        return None if finite else "a finite number"
    if not isinstance(default, numbers.Real):
        return None
    # A ratio may be 1 by default.
    if isinstance(default, int) and not name.endswith("ratio"):
        least = 0 if name in _MAY_BE_ZERO else min(default, 1)
        if number and isinstance(value, numbers.Integral) and value >= least:
            return None
        return f"an integer of {least} or more"
    if not number or not math.isfinite(value):
        return "a finite number"
    return "a number of 0 or more" if value < 0 <= default else None


def _expected_shape(value, default):
    if (
        isinstance(value, (list, tuple))
        and len(value) == len(default)
        and all(x is None or _expected("", x, 1) is None for x in value)
    ):
        return None
    # Of convolutions: the only tuples are shapes, but for coefficients.
    if all(isinstance(x, int) for x in default):
        return f"{len(default)} positive integers, such as {default}"
    return None
