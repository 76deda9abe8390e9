"""Checks of users' arguments, with their error messages.

Each takes the argument's name, for the error, and its value. The value may be
of any type: an array, for example, can neither be tested for truth nor compared
with `==`.
"""

import difflib
import math
import numbers
import os
import pathlib
import re
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

# Such as gs://bucket/run, of which `pathlib` leaves gs:/bucket/run. A drive of
# Windows has one letter.
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def is_positive_integer(value: Any) -> bool:
    """Returns whether a value is an integer above 0, of any library."""
    return (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and int(value) >= 1
    )


def positive_integer(name: str, value: Any) -> int:
    """Returns a positive integer as a Python `int`.

    Raises:
        ValueError: If the value is not one.
    """
    if not is_positive_integer(value):
        raise ValueError(
            f"`{name}` must be a positive integer. Received: {name}={value!r}"
        )
    return int(value)


def number(
    name: str, value: Any, what: str, above: bool = False, least: float = 0.0
) -> float:
    """Returns a finite number, `least` or more, as a Python `float`.

    Args:
        name: String, name of the argument.
        value: Anything.
        what: String, the requirement for the error, such as
            `"a positive number"`.
        above: Boolean, whether the number must be above 0.
        least: Float, the least number that is taken.

    Raises:
        TypeError: If the value is not a number.
        ValueError: If the number is out of range.
    """
    text = f"`{name}` must be {what}. Received: {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(text)
    try:
        size = float(value)
    except OverflowError:
        size = math.inf
    if not least <= size < math.inf or (above and not size):
        raise ValueError(text)
    return size


def boolean(name: str, value: Any) -> None:
    """Checks that a value is `True` or `False`.

    Raises:
        TypeError: If it is not.
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


def one_of(name: str, value: Any, choices: Sequence) -> None:
    """Checks that a value is one of some strings, or `None` if allowed.

    Args:
        name: String, name of the argument.
        value: Anything.
        choices: The allowed strings, and `None` if it is allowed.

    Raises:
        ValueError: If it is not.
    """
    known = value is None or isinstance(value, str)
    if not known or value not in choices:
        raise ValueError(
            f"`{name}` must be one of {list(choices)}. Received: "
            f"{name}={value!r}{near([value], choices)}"
        )


def items(value: Any, text: str) -> list:
    """Returns the items of a list, tuple, array or other ordered iterable.

    Args:
        value: Anything.
        text: String, the error message.

    Raises:
        TypeError: If the value is not iterable, or is a string, mapping or
            set.
    """
    strange = (str, bytes, Mapping, set, frozenset)
    if isinstance(value, strange) or not isinstance(value, Iterable):
        raise TypeError(text)
    try:
        return list(value)
    except (NotImplementedError, TypeError) as error:
        # The value is an array without axes, or a symbolic tensor.
        raise TypeError(text) from error


def path(name: str, value: Any, of: str = "a file") -> str:
    """Returns a path as a string.

    Args:
        name: String, name of the argument.
        value: Anything.
        of: String, what the path must be of, for the error.

    Raises:
        TypeError: If the value is neither a string nor an `os.PathLike` of
            one. `open` would take a number for a file descriptor.
        ValueError: If the path is empty, has a null character, or is a URL.
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
    if _URL.match(place):
        raise ValueError(
            f"{text}. It must be a local path: mount the bucket, or copy files "
            "there."
        )
    return place


def writable(name: str, value: Any) -> None:
    """Checks that a value is the path of a file that can be written.

    A file that does not exist is created and deleted.

    Raises:
        TypeError: If the value is not a path.
        ValueError: If the file cannot be written.
    """
    place = path(name, value)
    existed = os.path.exists(place)
    try:
        with open(place, "ab"):
            pass
        if not existed:
            # If it is a link, what the link points to.
            os.remove(os.path.realpath(place))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`{name}` must be the path of a file that can be written, in a "
            f"directory that exists. Received: {name}={value!r} ({error})"
        ) from error


def directory(name: str, value: Any) -> pathlib.Path:
    """Returns the path of a directory, which need not exist.

    Raises:
        TypeError: If the value is not a path.
        ValueError: If the path exists and is not a directory.
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
