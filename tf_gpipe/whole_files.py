"""Files that are whole at any time: a new one takes the place of the old one.

This module imports no TensorFlow.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A scope to write a file in: all of it, or the one before stays.

    The new file has the permissions of the one before. Links stay, and what is
    no file, such as a pipe, is written to.

    Args:
        path: Path of the file.

    Yields:
        The `pathlib.Path` to write to. It is deleted if the scope fails.
    """
    place = pathlib.Path(path)
    there = place.exists()
    if there and not place.is_file():
        yield place
        return
    place = pathlib.Path(os.path.realpath(place))
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    try:
        yield partial
        if there:
            shutil.copymode(place, partial)
        partial.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
