"""The working directory of a run: one trainer at a time, and what it is about.

    .lock      who trains here; locked as long as that process lives
    run.json   the flags that the model and the data follow from

The lock is the kernel's (flock). It ends with the process that has it, however
that ends, so what the file says of a dead process, or of one whose number
another process has got, keeps nobody out.
"""

import errno
import fcntl
import json
import os
import pathlib
import socket
import weakref

from trainers.command_line import UserError

_LOCK = ".lock"
_RUN = "run.json"
_FILES = (
    *(_LOCK, _RUN, "flags.txt", "losses.csv", "model.json"),
    *("vocabulary.model", "scores.json", "scores.png"),
)
_DIRECTORIES = ("checkpoints", "logs")
_LOCKED = (errno.EACCES, errno.EAGAIN)
# Of this process, by their directories: a process may train there again.
_locks = weakref.WeakValueDictionary()


class Workdir:
    """The working directory of a run.

    Args:
        path: Path.

    Raises:
        UserError: If something in it is of another kind than what trainers
            write there.

    Example:

    ```python
    workdir = Workdir("/tmp/job")
    workdir.lock()
    changed = workdir.changed({"batch_size": 128})
    workdir.keep({"batch_size": 128})
    ```
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self._lock = None
        try:
            for name in _FILES:
                place = self.path / name
                other = place.exists() and not place.is_file()
                self._refuse(name, other, "a file")
            for name in _DIRECTORIES:
                place = self.path / name
                other = place.exists() and not place.is_dir()
                self._refuse(name, other, "a directory")
        except OSError as error:
            # Of a name that is too long, or one that is not for this user.
            raise UserError(f"Cannot read --workdir: {error}") from error

    def lock(self):
        """Keeps other trainers out, until `unlock` or this process's end.

        The directory is made if it does not exist.

        Raises:
            UserError: If another process trains here, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot write to --workdir: {error}") from error
        key = str(self.path.resolve())
        lock = _locks.get(key)
        if lock is None or not lock.holds(self.path / _LOCK):
            lock = _locks[key] = _Lock(self.path / _LOCK)
        self._lock = lock

    def unlock(self):
        """Lets other trainers in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def keep(self, about):
        """Writes what the run is about.

        Args:
            about: Dictionary of the values of flags, by their names.
        """
        partial = self.path / f"{_RUN}.partial"
        partial.write_text(json.dumps(_plain(about), indent=2) + "\n")
        partial.replace(self.path / _RUN)

    def changed(self, about):
        """Returns the flags that differ from those of the run before.

        Args:
            about: As of `keep`. Other flags are not compared.

        Returns:
            List of strings, what each flag was and is.

        Raises:
            UserError: If the file is damaged.
        """
        path = self.path / _RUN
        if not path.exists():
            return []
        try:
            before = dict(json.loads(path.read_text()))
        except (OSError, RecursionError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is damaged: {error}. Delete it, if you know that the "
                "flags are those of the run before."
            ) from error
        return [
            f"--{name} was {before[name]!r}, is {value!r}"
            for name, value in _plain(about).items()
            if name in before and before[name] != value
        ]

    def _refuse(self, name, other, expected):
        if other:
            raise UserError(
                f"{self.path / name} must be {expected} that a trainer writes. "
                "Choose another --workdir, or move it away."
            )


class _Lock:
    """An exclusive lock of a file, with a line of who has it."""

    def __init__(self, path):
        try:
            self._file = path.open("a+", errors="replace")
        except OSError as error:
            raise UserError(f"Cannot write to --workdir: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            who = self._file.read().strip() or "another process"
            self._file.close()
            if error.errno in _LOCKED:
                raise UserError(
                    f"{who} trains in {path.parent} already. Wait for it, end "
                    "it, or choose another --workdir."
                ) from error
            raise UserError(
                f"Cannot lock {path}: {error}. Choose a --workdir on a file "
                "system that has locks."
            ) from error
        self._file.truncate(0)
        self._file.write(f"Process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def holds(self, path):
        """Returns whether this is the lock of the file that is there now."""
        if self._file.closed:
            return False
        try:
            there = os.stat(path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._file.fileno()))

    def release(self):
        # What it says must not be read by those who find it locked by others.
        self._file.truncate(0)
        self._file.close()


def _plain(about):
    """Returns what JSON makes of it, to compare with what a file has."""
    return json.loads(json.dumps(about, default=str))
