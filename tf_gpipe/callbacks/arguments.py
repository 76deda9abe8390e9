"""Arguments of callbacks, checked when they are given."""

import math
import numbers
import os
import pathlib
from typing import Any


def directory(workdir: Any) -> pathlib.Path:
    """Returns the path of a directory, which need not exist.

    Raises:
        TypeError, ValueError: If it is no path, or one of something else.
    """
    expected = (
        "`workdir` must be the path of a directory. Received: "
        f"workdir={workdir!r}"
    )
    if not isinstance(workdir, (str, os.PathLike)):
        raise TypeError(expected)
    path = pathlib.Path(workdir)
    if not str(workdir) or (path.exists() and not path.is_dir()):
        raise ValueError(expected)
    return path


def check_number(name: str, value: Any, whole: bool) -> None:
    """Refuses what is no positive number.

    Raises:
        TypeError, ValueError: If it is something else, or not positive.
    """
    kind = numbers.Integral if whole else numbers.Real
    what = "integer" if whole else "number"
    expected = f"`{name}` must be a positive {what}. Received: {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(expected)
    if not 0 < float(value) < math.inf:
        raise ValueError(expected)
