"""Checks the arguments of a function by the types of its defaults."""

import inspect
import math
import numbers

# Endings of the names of numbers that may be `None`, beside those whose default
# is `None`.
_MAY_BE_OPEN = ("length", "clip")
# The most layers, levels and halvings that there may be: a model is made layer
# by layer, and with more a typing error would run for days.
_MOST = dict.fromkeys(("num_blocks", "num_layers", "depth"), 2**15)
_MOST["num_stem_reductions"] = 64
# The end of other integers, a bound against typing errors, too.
_END = 2**32
# Counts that may be 0.
_MAY_BE_ZERO = ("num_stem_reductions",)


def check(function, arguments):
    """Refuses arguments of another type than the defaults of a function.

    An argument must be an integer, a float, a boolean or a tuple of positive
    integers if its default is one. Integers must be positive, or may be 0 if
    the default is, and below 2**32, or of layers at most 2**15; floats must be
    finite; neither may be negative unless the default is. If the default is
    `None`, finite numbers, `None` and other objects, such as lists, are
    allowed, but no booleans or strings. Parameters without a default are
    positive integers. Lengths and limits may be `None`, and so may arguments
    whose default is no number.

    Args:
        function: Function or class, with hyper-parameters as its parameters.
        arguments: Dictionary of its keyword arguments.

    Raises:
        ValueError: If an argument is of another type, or out of range.

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
    """Returns text on what a value should be, or `None` if it is valid."""
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
        return None if not number or _is_finite(value) else "a finite number"
    if not isinstance(default, numbers.Real):
        return None
    # A ratio is a float, even if its default is the integer 1.
    if isinstance(default, int) and not name.endswith("ratio"):
        least = 0 if name in _MAY_BE_ZERO else min(default, 1)
        most = _MOST.get(name, _END - 1)
        integer = number and isinstance(value, numbers.Integral)
        if integer and least <= value <= most:
            return None
        too_large = f", at most {most}" if integer and value > most else ""
        return f"an integer of {least} or more{too_large}"
    if not number or not _is_finite(value):
        return "a finite number"
    return "a number of 0 or more" if value < 0 <= default else None


def _expected_shape(value, default):
    if (
        isinstance(value, (list, tuple))
        and len(value) == len(default)
        and all(x is None or _expected("", x, 1) is None for x in value)
    ):
        return None
    # Tuples of integers are shapes; others are coefficients, and not checked.
    if all(isinstance(x, int) for x in default):
        return (
            f"{len(default)} positive integers below 2**32, such as {default}"
        )
    return None


def _is_finite(value):
    try:
        return math.isfinite(value)
    except OverflowError:  # A larger integer than any float.
        return False
