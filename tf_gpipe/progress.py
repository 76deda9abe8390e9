"""Progress bars of commands, on terminals alone.

A library function says what it goes through; whether a bar shows it is up to
the command that has called it. This module imports no TensorFlow.
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
    """A scope in which bars are shown, if both outputs are a terminal.

    They are on standard error, and vanish when they are full.

    Args:
        wanted: Boolean, whether to show them at all. A command that is to
            print JSON wants none.
    """
    console = rich.console.Console(stderr=True)
    # Those of Python: `contextlib.redirect_stdout` is none.
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
        # What is printed meanwhile stays where it was to go.
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
    """Yields items, and shows how many there have been.

    Args:
        items: Iterable.
        what: String, what is done with them.
        total: Integer, how many there will be. Defaults to the length of
            `items`, or that is not known.

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
    """A scope in which a bar moves, whose end is not known."""
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
