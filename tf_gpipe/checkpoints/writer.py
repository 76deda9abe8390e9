"""A thread that writes checkpoints, one at a time, while training goes on."""

import concurrent.futures
import contextlib
import errno
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
from tf_gpipe.checkpoints.store import NotFiniteError
from tf_gpipe.checkpoints.store import Position
from tf_gpipe.checkpoints.store import Saved
from tf_gpipe.checkpoints.store import Store

# The thread's `nice` value, up to 19: beside a step it gets little of a core.
_NICENESS = 10
# The errors of file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class NotWrittenError(OSError):
    """A checkpoint could not be written."""


class Writer:
    """Writes into a `Store` from a thread, which Python waits for at exit.

    The thread also takes and releases the lock, in order with what it writes.

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
        self._refused: OSError | None = None
        self._told_not_finite = False

    def lock(self) -> None:
        """Keeps other processes from writing there, until `end`.

        If its file system has no locks, it prints that, and goes on.

        Raises:
            LockedError: If another process writes there.
        """
        self._refused = None

        def lock() -> None:
            self._take_lock()
            self._store.recover()

        try:
            self._thread.submit(lock).result()
        except OSError as error:
            self._refused = error

    def check(self) -> None:
        """Raises a `NotWrittenError` if `lock` was not allowed to write."""
        error = self._refused
        if error is not None:
            raise NotWrittenError(
                error.errno,
                f"Cannot write to {self._store.directory}: "
                f"{error.strerror or error}",
            ) from error

    def write(
        self,
        position: Position,
        parts: Iterable,
        content: Mapping[str, Any],
        done: Callable[[pathlib.Path], None],
    ) -> None:
        """Starts to write a checkpoint, once the last one is written.

        If `parts` raises a `NotFiniteError`, it is told of once, and nothing is
        written.

        Args:
            position: As of `Store.write`.
            parts: As of `Store.write`.
            content: As of `Store.write`.
            done: Function that is called, in the thread, with the path of the
                checkpoint once it is written.

        Raises:
            NotWrittenError: If the last one could not be written.
            LockedError: If the directory was deleted, and another process has
                begun to train there, before the last one was written.
        """
        self.wait()

        def run() -> None:
            try:
                if self._lock is not None:
                    self._take_lock()
                path = self._store.write(position, parts, content, self._keep)
            except NotFiniteError as error:
                if not self._told_not_finite:
                    self._told_not_finite = True
                    newest = self._store.newest()
                    before = f"The newest one is {newest}."
                    tell(
                        f"{error} No checkpoint of such weights is written. "
                        f"{before if newest else 'There is none before it.'}"
                    )
                return
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

    def _take_lock(self) -> None:
        """Makes the directory and takes its lock, if this object has it not.

        Raises:
            LockedError: If another process trains there.
            OSError: If it cannot be written to.
        """
        directory = self._store.directory
        if self._lock is not None:
            if self._lock.holds():
                return
            tell(
                f"The lock of {directory} has been deleted since training "
                "began, by itself or with all that was there. It is taken "
                "again, if no other program has it."
            )
            self._lock.release()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = Lock(directory)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            tell(
                f"{directory} cannot be locked: {error}. Nothing else may "
                "train there meanwhile."
            )

    def wait(self) -> None:
        """Waits until the checkpoint is written that `write` started.

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
        """Waits for the last checkpoint, and releases the lock.

        An error of writing is printed, not raised, so as not to hide the error
        by which training has ended.
        """
        # In the thread, once all is written: another Ctrl-C may end the wait.
        released = self._thread.submit(self._release)
        try:
            self.wait()
        except Exception as error:
            tell(f"{error}")
        finally:
            concurrent.futures.wait([released])

    def _release(self) -> None:
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

        It prints a line for each damaged one.

        Raises:
            DamagedError: If there are some, and none is whole.
            CheckpointError: If the newest is one of another version.
            OSError: If it cannot be read.
        """
        self.wait()
        error = None
        positions = self._store.positions()
        for position in reversed(positions):
            try:
                return store.read(self._store.path(position))
            except DamagedError as damaged:
                if self._store.positions()[-1:] != positions[-1:]:
                    # A process that trains deletes those before a newer one.
                    return self.read()
                error = error or damaged
                tell(f"{damaged}.")
        if error is not None:
            raise DamagedError(
                f"{error}, and none before it is whole. Delete "
                f"{self._store.directory} to train from the start."
            )
        return None


def _give_way() -> None:
    """Lowers this thread's priority below that of the steps, on Linux."""
    if sys.platform == "linux":
        # On other systems it would be that of the whole process.
        with contextlib.suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), _NICENESS
            )


def tell(text: str) -> None:
    """Prints a line on standard error, for whoever runs the program."""
    print(f"tf_gpipe: {text}", file=sys.stderr, flush=True)
