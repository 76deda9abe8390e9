"""Progress bars, shown on terminals only.

A function that takes long reports its progress by `track` and `doing`; the
command or public function that was called shows the bars, by `shown`. This
module imports no TensorFlow.
"""

import contextlib
import contextvars
import sys
import threading
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
# Whether a scope has decided on bars for what runs within it.
_DECIDED = contextvars.ContextVar("decided", default=False)
# Seconds after which a public function shows bars: `@shown(after=PATIENCE)`.
PATIENCE = 1.0


@contextlib.contextmanager
def shown(wanted: bool = True, after: float = 0.0) -> Iterator[None]:
    """A scope in which bars are shown, if stdout and stderr are terminals.

    Bars are written to standard error, and are removed when they are full. A
    scope within another one changes nothing.

    Args:
        wanted: Boolean, whether to show bars at all: `False` for a command that
            prints JSON.
        after: Float, the seconds after which bars are shown, if the scope has
            not ended by then.
    """
    if _DECIDED.get():
        yield
        return
    # As it is now: what runs within the scope may redirect it.
    console = rich.console.Console(file=sys.stderr)
    # Those of Python: `contextlib.redirect_stdout` is none.
    terminals = console.is_terminal and getattr(sys.stdout, "isatty", bool)()
    decided = _DECIDED.set(True)
    try:
        if wanted and terminals:
            with _bar_on(console, after):
                yield
        else:
            yield
    finally:
        _DECIDED.reset(decided)


@contextlib.contextmanager
def _bar_on(console: rich.console.Console, after: float) -> Iterator[None]:
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        # Text printed meanwhile is not moved to the bar's stream.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    start = threading.Timer(after, bar.start)
    start.daemon = True
    token = _BAR.set(bar)
    try:
        if after:
            start.start()
        else:
            bar.start()
        yield
    finally:
        _BAR.reset(token)
        if after:
            start.cancel()
            start.join()
        bar.stop()


def say(text: str) -> None:
    """Prints a line at once, above the bars where there are some."""
    bar = _BAR.get()
    if bar is None:
        print(text, flush=True)
    else:
        bar.console.print(
            text, soft_wrap=True, markup=False, highlight=False, emoji=False
        )


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
