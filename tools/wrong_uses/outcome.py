"""Runs a use, and tells a deliberate error from an accident."""

import ast
import contextlib
import functools
import os
import re
import signal
import traceback
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe

# A use that takes longer hangs.
_LIMIT_SECONDS = 60
_PACKAGE = os.path.dirname(tf_gpipe.__file__)
_ROOT = os.path.dirname(_PACKAGE)
# Names and words of the code, which no message should contain.
_INTERNAL = re.compile(
    r"has no attribute|'NoneType'|unsupported operand|not supported between|"
    r"not subscriptable|has no len\(\)|zip\(\) argument|unhashable|"
    r"index out of range|must be real number|to unpack|"
    r"cannot be interpreted as|(?<![\w'\"./])_[a-z]\w+|"
    r"PipelineConfig|MicroBatchLoss|\bSplit\b"
)


class Hangs(BaseException):
    """Raised within a use that takes too long."""


@contextlib.contextmanager
def limited(seconds: int = _LIMIT_SECONDS) -> Iterator[None]:
    """A scope that raises `Hangs` if it takes longer than `seconds`."""

    def stop(number: int, frame: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def end_of(run: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Runs a use, and returns its result and the error that it raised."""
    keras.utils.set_random_seed(0)
    filtered = keras.config.is_traceback_filtering_enabled()
    # With filtering, an error within Keras seems to be its caller's.
    keras.config.disable_traceback_filtering()
    try:
        with limited():
            return run(), None
    except (Exception, Hangs) as error:
        return None, error
    finally:
        if filtered:
            keras.config.enable_traceback_filtering()


def problem(error: BaseException, plain: BaseException | None) -> str | None:
    """Returns what is wrong with the error that a use raised, or `None`.

    Args:
        error: The error.
        plain: What plain Keras raises for the same use, or `None`.
    """
    if isinstance(error, Hangs):
        return f"does not end within {_LIMIT_SECONDS} seconds"
    told = f"{type(error).__name__}: {str(error)[:1000]}"
    place = _raised_at(error)
    if plain is not None and type(plain) is type(error):
        if place is None or str(plain) == str(error):
            return None
    if place is not None:
        return f"an accident in {place}: {told}"
    allowed = (ValueError, TypeError, tf.errors.UnavailableError, ImportError)
    if not isinstance(error, allowed):
        if plain is None or not isinstance(error, tf.errors.OpError):
            return f"another type: {told}"
    found = leaked(str(error))
    if found and plain is None:
        return f"tells of '{found}': {told}"
    return None


def leaked(text: str) -> str | None:
    """Returns a name or word of the code in a message, or `None`."""
    found = _INTERNAL.search(text)
    return found[0] if found else None


def difference(expected: Any, received: Any) -> str | None:
    """Returns how numbers differ, or `None`."""
    expected, received = (
        [
            np.asarray(getattr(x, "shape", 0)[1:])
            if isinstance(x, keras.KerasTensor)
            else np.asarray(x, "float64")
            for x in made
        ]
        for made in (expected, received)
    )
    if len(expected) != len(received):
        return f"{len(received)} numbers in place of {len(expected)}"
    for a, b in zip(expected, received, strict=True):
        if a.shape != b.shape:
            return f"shape {b.shape} in place of {a.shape}"
        if not np.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True):
            return f"{np.max(np.abs(a - b)):.1e} apart"
    return None


def _raised_at(error: BaseException) -> str | None:
    """Returns the line of this project that raised an error by accident.

    Returns `None` if a `raise` statement raised it, or other code did.
    """
    if error.__traceback__ is None:
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if not frame.filename.startswith(_ROOT) or frame.lineno is None:
        return None
    if "/.venv/" in frame.filename or "/tools/" in frame.filename:
        return None
    if any(a <= frame.lineno <= b for a, b in _raises(frame.filename)):
        return None
    return f"{os.path.relpath(frame.filename, _ROOT)}:{frame.lineno}"


@functools.cache
def _raises(path: str) -> list[tuple[int, int]]:
    with open(path) as file:
        tree = ast.parse(file.read())
    return [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
    ]
