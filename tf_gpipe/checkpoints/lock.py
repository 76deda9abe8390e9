"""A lock file, so that one process at a time trains in a directory."""

import contextlib
import errno
import os
import pathlib
import re
import socket
import time
import weakref

from tf_gpipe.checkpoints.store import CheckpointError

try:
    import fcntl
except ImportError:  # On Windows.
    fcntl = None  # type: ignore[assignment]

_NAME = ".lock"
_LOCKED = (errno.EACCES, errno.EAGAIN)
# How often the file is read for the name of the process that has the lock,
# which that process writes a moment after it has locked the file.
_LOOKS = 20
_LOOK_SECONDS = 0.05
_MOST_CHARACTERS = 300
# The locks of this process.
_locks: weakref.WeakSet["Lock"] = weakref.WeakSet()


class LockedError(CheckpointError):
    """Another process trains in the directory."""


class Lock:
    """Keeps other processes out of a directory; `.lock` there names this one.

    The kernel's `flock` of the file is the lock. It ends with its process,
    however that ends: a file that names a dead process, or one whose number
    another process has now, locks nobody out.

    Args:
        directory: Path of a directory.

    Raises:
        LockedError: If another process has the lock.
        OSError: If the file cannot be written, or the file system has no locks.

    Example:

    ```python
    lock = Lock("/tmp/run")
    try:
        train()
    finally:
        lock.release()
    ```
    """

    def __init__(self, directory: str | os.PathLike):
        self._path = pathlib.Path(directory) / _NAME
        _locks.add(self)
        who = ""
        for look in range(_LOOKS):
            self._file = self._path.open("a+", errors="replace")
            try:
                if self._take():
                    return
                self._file.seek(0)
                who = self._file.read(_MOST_CHARACTERS).strip()
                # At the first look, it may still name an earlier process.
                if look and who and not _is_dead(who):
                    break
            except OSError:
                self._file.close()
                raise
            self._file.close()
            time.sleep(_LOOK_SECONDS)
        self._file.close()
        raise LockedError(
            f"{who or 'Another process'} trains in {directory} already. Wait "
            "for it, end it, or choose another `workdir`."
        )

    def _take(self) -> bool:
        """Tries to lock the open file, and returns whether it is ours."""
        if fcntl is None:
            raise OSError(errno.ENOLCK, "This system has no flock")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _LOCKED:
                return False
            raise
        if not self.holds():
            # The process that had the lock deleted the file after we opened it.
            return False
        self._file.truncate(0)
        self._file.write(f"Process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
        return True

    def holds(self) -> bool:
        """Returns whether the open file is still the one at the path."""
        if self._file.closed:
            return False
        try:
            there = os.stat(self._path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._file.fileno()))

    def release(self) -> None:
        """Deletes the file, if it is ours, and releases the lock."""
        if self.holds():
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._file.close()


def _let_go() -> None:
    """Closes the files of the parent's locks, which stay the parent's."""
    for lock in _locks:
        # Not there yet, if another thread is making the lock.
        if "_file" in vars(lock):
            lock._file.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _is_dead(who: str) -> bool:
    """Returns whether `who` names a process of this host that has ended."""
    found = re.fullmatch(r"Process (\d+) on (.*)", who)
    if not found or found[2] != socket.gethostname():
        return False
    try:
        os.kill(int(found[1]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        # The process of another user, which we may not signal.
        return False
    return False
