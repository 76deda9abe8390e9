"""Checks of arguments, and the errors that they raise.

Each takes the name that users know an argument by, and its value, which may be
anything: an array is neither true nor false, and equal to nothing.
"""

import difflib
import math
import numbers
import os
import pathlib
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any


def is_positive_integer(value: Any) -> bool:
    """Returns whether a value is an integer, of any library, above 0."""
    return (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and int(value) >= 1
    )


def positive_integer(name: str, value: Any) -> int:
    """Returns a positive integer as Python's.

    Raises:
        ValueError: If it is something else.
    """
    if not is_positive_integer(value):
        raise ValueError(
            f"`{name}` must be a positive integer. Received: {name}={value!r}"
        )
    return int(value)


def number(name: str, value: Any, what: str, above: bool = False) -> None:
    """Refuses what is not a finite number of 0 or more.

    Args:
        name: String, of the argument.
        value: Anything.
        what: String, what it must be, such as `"a positive number"`.
        above: Boolean, whether it must be above 0.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is out of range.
    """
    text = f"`{name}` must be {what}. Received: {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(text)
    try:
        size = float(value)
    except OverflowError:
        size = math.inf
    if not 0 <= size < math.inf or (above and not size):
        raise ValueError(text)


def boolean(name: str, value: Any) -> None:
    """Refuses what is neither `True` nor `False`.

    Raises:
        TypeError: If it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(
            f"`{name}` must be True or False. Received: {name}={value!r}"
        )


def near(names: Iterable, known: Iterable) -> str:
    """Returns which names were meant, as the end of an error.

    Args:
        names: What was received; what is no string is like none.
        known: What there is, likewise.
    """
    choices = [x for x in known if isinstance(x, str)]
    found = [
        match
        for name in names
        if isinstance(name, str)
        for match in difflib.get_close_matches(name, choices, 1)
    ]
    return f". Did you mean {', '.join(found)}?" if found else ""


def one_of(name: str, value: Any, choices: Sequence, more: str = "") -> None:
    """Refuses what is none of some strings, or `None`.

    Args:
        name: String, of the argument.
        value: Anything.
        choices: The strings, and `None` if that is one of them.
        more: String, what else the argument may be, for the error.

    Raises:
        ValueError: If it is something else.
    """
    known = value is None or isinstance(value, str)
    if not known or value not in choices:
        raise ValueError(
            f"`{name}` must be one of {list(choices)}{more}. Received: "
            f"{name}={value!r}{near([value], choices)}"
        )


def items(value: Any, text: str) -> list:
    """Returns a list, a tuple, an array or the like as a list.

    Raises:
        TypeError: With that text, if it is something else: a string, or what
            has no order.
    """
    strange = (str, bytes, Mapping, set, frozenset)
    if isinstance(value, strange) or not isinstance(value, Iterable):
        raise TypeError(text)
    try:
        return list(value)
    except (NotImplementedError, TypeError) as error:
        # Of an array without axes, or a symbolic tensor.
        raise TypeError(text) from error


def path(name: str, value: Any, of: str = "a file") -> str:
    """Returns a path as a string.

    Args:
        name: String, of the argument.
        value: Anything.
        of: String, what it must be the path of.

    Raises:
        TypeError: If it is neither a string nor an `os.PathLike` of one. A
            number would be one of a file that is open.
        ValueError: If it is empty, or no system has such a path.
    """
    place = os.fspath(value) if isinstance(value, os.PathLike) else value
    text = (
        f"`{name}` must be the path of {of}, a string or an `os.PathLike` of "
        f"one. Received: {name}={value!r}"
    )
    if not isinstance(place, str):
        raise TypeError(text)
    if not place or "\0" in place:
        raise ValueError(text)
    return place


def writable(name: str, value: Any) -> None:
    """Refuses what is no path of a file that can be written.

    A file that is not there is made, and deleted.

    Raises:
        TypeError: If it is no path.
        ValueError: If it cannot be written.
    """
    place = path(name, value)
    existed = os.path.exists(place)
    try:
        with open(place, "ab"):
            pass
        if not existed:
            os.remove(place)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`{name}` must be the path of a file that can be written, in a "
            f"directory that exists. Received: {name}={value!r} ({error})"
        ) from error


def directory(name: str, value: Any) -> pathlib.Path:
    """Returns the path of a directory, which need not exist.

    Raises:
        TypeError: If it is no path.
        ValueError: If it is one of something else.
    """
    place = pathlib.Path(path(name, value, "a directory"))
    try:
        wrong = "which is none" if place.exists() and not place.is_dir() else ""
    except OSError as error:
        wrong = str(error)
    if wrong:
        raise ValueError(
            f"`{name}` must be the path of a directory. Received: "
            f"{name}={value!r}, {wrong}"
        )
    return place
