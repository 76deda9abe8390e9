"""New files, and directories, that take the place of old ones as a whole.

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

    Or a directory: if one is made in the scope, it takes the place of the one
    before, which has another name for a moment; if the process dies then, the
    next scope gives it its name back. The new file has the permissions of the
    one before. Links stay, and what is neither file nor directory, such as a
    pipe, is written to.

    Args:
        path: Path of the file or directory.

    Yields:
        The `pathlib.Path` to write to. It is deleted if the scope fails.
    """
    place = pathlib.Path(path)
    there = place.exists()
    if there and not (place.is_file() or place.is_dir()):
        yield place
        return
    place = pathlib.Path(os.path.realpath(place))
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    before = place.with_name(f".{place.name}.replaced")
    # What a process has left that died in such a scope.
    _delete(partial)
    if before.is_dir() and not place.exists():
        before.rename(place)
        there = True
    _delete(before)
    try:
        yield partial
        if there:
            shutil.copymode(place, partial)
        if partial.is_dir() and place.is_dir():
            # Unlike a file, it cannot be replaced in one step.
            place.rename(before)
        partial.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            before.rename(place)
        _delete(partial)
        raise
    _delete(before)


def _delete(path: pathlib.Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()
