"""The working directory of a run: one trainer at a time, and what it is about.

.lock      who trains here; locked as long as that process lives
run.json   the flags that the model and the data follow from
"""

import json
import pathlib
import weakref

from tf_gpipe.checkpoints.lock import Lock
from tf_gpipe.checkpoints.lock import LockedError
from trainers.command_line import UserError

_RUN = "run.json"
_FILES = (
    *(".lock", _RUN, "flags.txt", "losses.csv", "model.json"),
    *("vocabulary.model", "scores.json", "scores.png"),
)
_DIRECTORIES = ("checkpoints", "logs")
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
            key = str(self.path.resolve())
            lock = _locks.get(key)
            if lock is None or not lock.holds():
                lock = _locks[key] = Lock(self.path)
        except LockedError as error:
            raise UserError(error) from error
        except OSError as error:
            raise UserError(
                f"Cannot write to --workdir, and lock it: {error}. Received: "
                f"--workdir={self.path}"
            ) from error
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


def _plain(about):
    """Returns what JSON makes of it, to compare with what a file has."""
    return json.loads(json.dumps(about, default=str))
