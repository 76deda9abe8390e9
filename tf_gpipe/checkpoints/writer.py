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
from tf_gpipe.checkpoints.lock import Lock
from tf_gpipe.checkpoints.store import DamagedError
from tf_gpipe.checkpoints.store import Position
from tf_gpipe.checkpoints.store import Saved
from tf_gpipe.checkpoints.store import Store

# From 0 to 19: the share of a core that it gets beside a step is small.
_NICENESS = 10


class NotWrittenError(OSError):
    """A checkpoint could not be written."""


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
        self._lock: Lock | None = None

    def lock(self) -> None:
        """Keeps other processes from writing there, until `end`.

        Of a directory that cannot be locked it tells.

        Raises:
            LockedError: If another process writes there.
        """
        directory = self._store.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(directory)
        except OSError as error:
            tell(
                f"{directory} cannot be locked: {error}. Nothing else may "
                "train there meanwhile."
            )

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
            NotWrittenError: If the one before it could not be written.
        """
        self.wait()

        def run() -> None:
            try:
                path = self._store.write(position, parts, content, self._keep)
            except OSError as error:
                newest = self._store.newest()
                before = "There is none before it."
                if newest:
                    before = (
                        f"The newest one is {newest}: once that is mended, "
                        "the same program goes on from there."
                    )
                raise NotWrittenError(
                    error.errno,
                    f"Cannot write a checkpoint of {position} to "
                    f"{self._store.directory}: {error.strerror or error}. "
                    f"{before}",
                ) from error
            done(path)

        self._pending = self._thread.submit(run)

    def wait(self) -> None:
        """Waits for what is being written.

        Raises:
            NotWrittenError: If it could not be written.
        """
        self._settle()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def has_failed(self) -> bool:
        """Returns whether `wait` would raise an error, without waiting."""
        pending = self._pending
        return (
            pending is not None
            and pending.done()
            and pending.exception() is not None
        )

    def end(self) -> None:
        """Waits for what is being written, and lets other processes write.

        If it cannot be written, training has ended by another error: this one
        is told of.
        """
        try:
            self.wait()
        except Exception as error:
            tell(f"{error}")
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def newest(self) -> pathlib.Path | None:
        """Returns the path of the newest checkpoint, or `None`."""
        self._settle()
        return self._store.newest()

    def _settle(self) -> None:
        if self._pending is not None:
            concurrent.futures.wait([self._pending])

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
