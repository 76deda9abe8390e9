"""Checkpoints that are written beside the training, one at a time."""

import concurrent.futures
import contextlib
import os
import pathlib
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

from tf_gpipe.checkpoints import store
from tf_gpipe.checkpoints.store import DamagedError
from tf_gpipe.checkpoints.store import Position
from tf_gpipe.checkpoints.store import Saved
from tf_gpipe.checkpoints.store import Store

# From 0 to 19: the share of a core that it gets beside a step is small.
_NICENESS = 10


class Writer:
    """Writes into a `Store` from a thread.

    A process waits for it as it ends.

    Args:
        directory: Path, as of `Store`.
        keep: Integer, how many checkpoints to keep.
    """

    def __init__(self, directory: pathlib.Path, keep: int):
        self._store = Store(directory)
        self._keep = keep
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, initializer=_give_way
        )
        self._pending: concurrent.futures.Future | None = None

    def write(
        self,
        position: Position,
        parts: Iterable,
        content: Mapping[str, Any],
        done: Callable[[pathlib.Path], None],
    ) -> None:
        """Begins to write a checkpoint, once the one before it is written.

        Args:
            position: As of `Store.write`, as are the next two.
            parts: See `position`.
            content: See `position`.
            done: Function of the checkpoint's path, called when it is there.

        Raises:
            OSError: If the one before it could not be written.
        """
        self.wait()

        def run() -> None:
            try:
                path = self._store.write(position, parts, content, self._keep)
            except OSError as error:
                newest = self._store.newest() or "none"
                raise OSError(
                    error.errno,
                    f"Cannot write a checkpoint of {position}: {error}. The "
                    f"newest one is {newest}",
                ) from error
            done(path)

        self._pending = self._thread.submit(run)

    def wait(self) -> None:
        """Waits for what is being written.

        Raises:
            OSError: If it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def settle(self) -> None:
        """Waits for what is being written, whether it can be or not."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])

    def newest(self) -> pathlib.Path | None:
        """Returns the path of the newest checkpoint, or `None`."""
        self.settle()
        return self._store.newest()

    def read(self) -> Saved | None:
        """Returns the newest checkpoint that is whole, or `None`.

        Of damaged ones it tells.

        Raises:
            DamagedError: If there are some, and none is whole.
        """
        self.wait()
        error = None
        for position in reversed(self._store.positions()):
            try:
                return store.read(self._store.path(position))
            except DamagedError as damaged:
                error = error or damaged
                tell(f"{damaged}.")
        if error is not None:
            raise DamagedError(
                f"{error}, and none before it is whole. Delete "
                f"{self._store.directory} to train from the start."
            )
        return None


def _give_way() -> None:
    """Lets the steps have the cores before this thread, where it can be."""
    if sys.platform == "linux":
        # Elsewhere it would be the whole process.
        with contextlib.suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), _NICENESS
            )


def tell(text: str) -> None:
    """Prints a line for who runs the program, on standard error."""
    print(f"tf_gpipe: {text}", file=sys.stderr, flush=True)
