"""Progress bars of commands, shown on terminals only.

A library function reports its progress by `track` and `doing`; a bar shows it
if the calling command has entered `shown`. This module imports no TensorFlow.
"""

import contextlib
import contextvars
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sized
from typing import Any
from typing import TypeVar

import rich.console
import rich.progress

_T = TypeVar("_T")
_BAR: contextvars.ContextVar[rich.progress.Progress | None] = (
    contextvars.ContextVar("bar", default=None)
)


@contextlib.contextmanager
def shown(wanted: bool = True) -> Iterator[None]:
    """A scope in which bars are shown, if stdout and stderr are terminals.

    Bars are written to standard error, and are removed when they are full.

    Args:
        wanted: Boolean, whether to show bars at all: `False` for a command that
            prints JSON.
    """
    console = rich.console.Console(stderr=True)
    # Python's current stdout: under `contextlib.redirect_stdout` it is no
    # terminal.
    if not (wanted and console.is_terminal and sys.stdout.isatty()):
        yield
        return
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        # Text printed meanwhile is not moved to the bar's stream.
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        token = _BAR.set(bar)
        try:
            yield
        finally:
            _BAR.reset(token)


def track(
    items: Iterable[_T], what: str, total: int | None = None
) -> Iterator[_T]:
    """Yields items, and shows how many have been processed.

    Args:
        items: Iterable.
        what: String, the activity, shown beside the bar.
        total: Integer, the number of items. Defaults to the length of `items`
            if it has one; otherwise the bar shows no total.

    Example:

    >>> list(track(["a", "b"], "reading"))
    ['a', 'b']
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with _task(what, total) as advance:
        for item in items:
            yield item
            advance()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """A scope in which a bar without a total is shown."""
    with _task(what, None):
        yield


@contextlib.contextmanager
def _task(what: str, total: int | None) -> Iterator[Any]:
    bar = _BAR.get()
    if bar is None:
        yield lambda: None
        return
    task = bar.add_task(what, total=total)
    try:
        yield lambda: bar.advance(task)
    finally:
        bar.remove_task(task)
