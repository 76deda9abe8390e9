"""The working directory of a run: its lock and the record of its flags.

.lock             the process that trains here; locked while it lives
run.json          the flags that determine the model and the data
plan_flags.json   those for which --tune has chosen plan.json
"""

import json
import os
import pathlib
import weakref

from tf_gpipe import checks
from tf_gpipe.checkpoints.lock import Lock
from tf_gpipe.checkpoints.lock import LockedError
from tf_gpipe.whole_files import replacing
from trainers.command_line import UserError

_RUN = "run.json"
_FILES = (
    *(".lock", _RUN, "flags.txt", "losses.csv", "model.json"),
    *("vocabulary.model", "scores.json", "scores.png"),
    *("plan.json", "plan_flags.json"),
)
_DIRECTORIES = (
    *("checkpoints", "export", "logs"),
    # Keras's TensorBoard writes into these.
    *("logs/train", "logs/validation"),
)
# The locks of this process, by directory: a process may train again where it
# holds the lock.
_locks = weakref.WeakValueDictionary()


class Workdir:
    """The working directory of a run.

    Args:
        path: Path.

    Raises:
        UserError: If it is no local path, or has a directory where trainers
            write a file, or a file where they write a directory, or a link
            there that leads nowhere.

    Example:

    ```python
    workdir = Workdir("/tmp/job")
    workdir.lock()
    changed = workdir.changed({"batch_size": 128})
    workdir.keep({"batch_size": 128})
    ```
    """

    def __init__(self, path):
        self._lock = None
        try:
            checks.path("--workdir", path, "a directory")
            self.path = pathlib.Path(path)
            for name in _FILES:
                link = self.path / name
                # A file may be made where a link leads.
                place = pathlib.Path(os.path.realpath(link))
                nowhere = link.is_symlink() and not place.parent.is_dir()
                other = os.path.lexists(place) and not place.is_file()
                self._refuse(name, nowhere or other, "a file")
            for name in _DIRECTORIES:
                place = self.path / name
                other = os.path.lexists(place) and not place.is_dir()
                self._refuse(name, other, "a directory")
        except (OSError, ValueError) as error:
            # A URL, a name that is too long, or no permission.
            raise UserError(f"Cannot read --workdir: {error}") from error

    def lock(self):
        """Locks the directory, until `unlock` or the end of this process.

        The directory is created if it does not exist.

        Raises:
            UserError: If another process trains here, or the directory cannot
                be written.
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
        """Releases the lock, if this object holds it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def keep(self, about, file=_RUN):
        """Writes flags to a file.

        Args:
            about: Dictionary from names of flags to their values.
            file: String, the name of the file. Defaults to run.json, of the
                flags of the run.
        """
        with replacing(self.path / file) as path:
            path.write_text(json.dumps(_plain(about), indent=2) + "\n")

    def changed(self, about, file=_RUN):
        """Returns the flags whose values differ from those in a file.

        Args:
            about: Dictionary as of `keep`. Other flags are not compared.
            file: String as of `keep`.

        Returns:
            List of strings with the old and the new value of a flag.

        Raises:
            UserError: If the file is damaged.
        """
        path = self.path / file
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
                f"{self.path / name} must be {expected} that a trainer writes, "
                "or a link to one. Choose another --workdir, or move it away."
            )


def _plain(about):
    """Returns a copy with JSON's types, comparable with a file's content."""
    return json.loads(json.dumps(about, default=str))
