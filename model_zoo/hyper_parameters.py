"""Whether arguments are such as a function takes, by what it has by default."""

import inspect
import math
import numbers


def check(function, arguments):
    """Refuses arguments of other kinds than the defaults of a function.

    Where a default is an integer, a number, a boolean or a tuple of positive
    integers, so must be what is given: an integer is above 0, or may be 0 where
    the default is, other numbers are finite, and neither is negative unless the
    default is. What has `None` by default is a number or `None`, if it is not a
    list or the like. Parameters without defaults are counts, above 0.

    Args:
        function: Function or class, with hyper-parameters as its parameters.
        arguments: Dictionary of its keyword arguments.

    Raises:
        TypeError, ValueError: If one is of another kind, or out of range.

    Example:

    >>> def model(num_blocks=4, dropout=0.0): ...
    >>> check(model, {"num_blocks": 2, "dropout": 0.5})
    """
    parameters = inspect.signature(function).parameters
    for name, value in arguments.items():
        if name not in parameters:
            continue
        default = parameters[name].default
        expected = _expected(value, default)
        if expected:
            raise ValueError(
                f"`{name}` must be {expected}. Received: {name}={value!r}"
            )


def _expected(value, default):
    """Returns what a value should be, and is not; or `None`."""
    if default is inspect.Parameter.empty:
        default = 1
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "True or False"
    if isinstance(default, tuple):
        return _expected_shape(value, default)
    if default is None:
        if isinstance(value, str):
            return "a number or None"
        if not isinstance(value, numbers.Real):
            return None
        return None if math.isfinite(value) else "a finite number"
    if not isinstance(default, numbers.Real):
        return None
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if isinstance(default, int):
        least = min(default, 1)
        if real and isinstance(value, numbers.Integral) and value >= least:
            return None
        return f"an integer of {least} or more"
    if not real or not math.isfinite(value):
        return "a finite number"
    return "a number of 0 or more" if value < 0 <= default else None


def _expected_shape(value, default):
    if (
        isinstance(value, (list, tuple))
        and len(value) == len(default)
        and all(_expected(x, 1) is None for x in value)
    ):
        return None
    return f"{len(default)} positive integers, such as {default}"
