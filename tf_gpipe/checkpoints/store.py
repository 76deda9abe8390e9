"""Checkpoints in a directory: each is whole, with checksums, or not there."""

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import BinaryIO
from typing import NamedTuple

import numpy as np
import tensorflow as tf

_PATTERN = re.compile(r"epoch_(\d{5,})(?:_step_(\d+))?")
_PARTIAL = "partial"
_REPLACED = ".replaced"
INDEX = "index.json"
_CHECKSUMS = "CRC32SUMS"
_FORMAT = 1
# A file is missing, was deleted on another host, or is on a bad sector.
_OF_THE_FILE = (errno.ENOENT, errno.ESTALE, errno.EIO)
# Arrays are written and read in pieces of this size, so that only a piece of
# them is in memory.
PIECE_BYTES = 2**22


class Position(NamedTuple):
    """How far a training run has come.

    Attributes:
        epochs: Integer, epochs that are done.
        steps: Integer, steps that are done of the next epoch.
    """

    epochs: int = 0
    steps: int = 0

    def __str__(self) -> str:
        steps = f" and {self.steps} steps" if self.steps else ""
        return f"{self.epochs} epochs{steps}"


class Array(NamedTuple):
    """The description of an array of a checkpoint, without its values.

    Attributes:
        kind: String, the kind of variable whose value it is; see `state`.
        number: Integer, the place of the variable among those of its kind.
        name: String, the variable's name, for messages.
        shape: Tuple of integers.
        dtype: String.
    """

    kind: str
    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str


class CheckpointError(ValueError):
    """A checkpoint cannot be used, or not with this model or data."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or not as it was written."""


class NotFiniteError(ValueError):
    """Weights are not finite numbers: nothing can go on from them."""


class Store:
    """The checkpoints in a directory.

    Each is a directory of its own, `epoch_00003` or `epoch_00003_step_000120`.
    In it are a file with the bytes of arrays for each host, `index.json`, which
    lists the arrays, and `CRC32SUMS`, with a line of checksum and name for each
    file. A CRC detects accidental damage in a sixth of the time of a
    cryptographic hash, time of cores that steps need. The directory is called
    `partial` until all of it is on the disk.

    Args:
        directory: Path. It is created by the first `write`.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = pathlib.Path(directory)

    def positions(self) -> list[Position]:
        """Returns the positions of all checkpoints, in order."""
        if not self.directory.is_dir():
            return []
        found = (_PATTERN.fullmatch(p.name) for p in self.directory.iterdir())
        return sorted(Position(int(m[1]), int(m[2] or 0)) for m in found if m)

    def path(self, position: Position) -> pathlib.Path:
        """Returns the path of a position's checkpoint, which may not exist."""
        steps = f"_step_{position.steps:06d}" if position.steps else ""
        return self.directory / f"epoch_{position.epochs:05d}{steps}"

    def newest(self) -> pathlib.Path | None:
        """Returns the path of the last checkpoint, or `None`."""
        found = self.positions()
        return self.path(found[-1]) if found else None

    def recover(self) -> None:
        """Restores a checkpoint whose replacement was never finished.

        Only for the process that writes.
        """
        for replaced in self.directory.glob(f"*{_REPLACED}"):
            path = replaced.with_name(replaced.name.removesuffix(_REPLACED))
            if path.exists():
                _delete(replaced)
            else:
                replaced.rename(path)

    def write(
        self,
        position: Position,
        parts: Iterable[Iterable[tuple[Array, Iterable[np.ndarray]]]],
        content: Mapping[str, Any],
        keep: int,
    ) -> pathlib.Path:
        """Writes a checkpoint, then deletes those that are not to be kept.

        Args:
            position: `Position`.
            parts: For each file, its arrays, each with an iterable of pieces
                of its elements, which are drawn one at a time.
            content: Dictionary of other entries of `index.json`.
            keep: Integer, how many checkpoints to keep: this one and the last
                ones before it. Those of later positions are deleted.

        Returns:
            The path of the checkpoint.

        Raises:
            OSError: If it cannot be written. The others are as before.
        """
        partial, path = self.directory / _PARTIAL, self.path(position)
        replaced = path.with_name(path.name + _REPLACED)
        self.directory.mkdir(parents=True, exist_ok=True)
        _delete(partial)
        try:
            partial.mkdir()
            sums, arrays = {}, []
            for i, part in enumerate(parts):
                name = f"part_{i:05d}.bin"
                with _File(partial / name) as file:
                    for array, pieces in part:
                        arrays.append([*array, name, file.size])
                        for piece in pieces:
                            file.write(piece)
                            # Freed before the next piece is fetched.
                            del piece
                sums[name] = file.checksum
            index = {**content, "format": _FORMAT, "arrays": arrays}
            with _File(partial / INDEX) as file:
                text = json.dumps(index, default=_plain)
                file.write(np.frombuffer(text.encode(), np.uint8))
            sums[INDEX] = file.checksum
            lines = "".join(f"{x}  {name}\n" for name, x in sums.items())
            with _File(partial / _CHECKSUMS) as file:
                file.write(np.frombuffer(lines.encode(), np.uint8))
            _sync(partial)
            _delete(replaced)
            with contextlib.suppress(FileNotFoundError):
                path.rename(replaced)
            partial.rename(path)
            _sync(self.directory)
            _delete(replaced)
        except BaseException:
            # Any error: `parts` may raise, as when a worker is lost.
            _delete(partial)
            self.recover()
            raise
        before = [x for x in self.positions() if x < position]
        kept = {position, *before[max(0, len(before) - keep + 1) :]}
        # Later ones are of a run that was given up, or are damaged.
        for other in self.positions():
            if other not in kept:
                _delete(self.path(other))
        return path


def read(path: pathlib.Path) -> "Saved":
    """Opens a checkpoint, and checks the checksums of all its files.

    Raises:
        DamagedError: If a file is missing, or its checksum is wrong.
        CheckpointError: If another version of tf_gpipe has written it.
        OSError: If it cannot be read.
    """
    try:
        return Saved(path)
    except CheckpointError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in _OF_THE_FILE:
            raise
        raise DamagedError(
            f"The checkpoint {path} is damaged: {error}"
        ) from error


class Saved:
    """A checkpoint with correct checksums; arrays are read when asked for.

    Attributes:
        path: `pathlib.Path`.
        content: Dictionary, `index.json`: the `content` of `Store.write`, the
            format and the arrays.
        arrays: List of `Array`.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        sums = {}
        with _opened(path / _CHECKSUMS) as file:
            lines = file.read().decode().splitlines()
        for line in lines:
            digest, _, name = line.partition("  ")
            sums[name] = digest
        for name in {INDEX, *sums}:
            if _checksum(path / name) != sums.get(name):
                raise ValueError(f"{name} has other bytes than were written")
        self.content = json.loads((path / INDEX).read_bytes())
        if self.content["format"] != _FORMAT:
            raise CheckpointError(
                f"The checkpoint {path} has format {self.content['format']}, "
                f"and this version of tf_gpipe reads format {_FORMAT}. Use the "
                "version that it was written with, or another directory."
            )
        self.arrays: list[Array] = []
        self._places: list[tuple[str, int]] = []
        for row in self.content["arrays"]:
            kind, number, name, shape, dtype, file, place = row
            if file not in sums:
                raise ValueError(f"{_CHECKSUMS} has no line of {file}")
            shape = tuple(shape)
            self.arrays.append(Array(kind, number, name, shape, dtype))
            self._places.append((file, place))

    @property
    def position(self) -> Position:
        """How far the run had come."""
        return Position(*self.content["position"])

    def value(self, i: int) -> np.ndarray:
        """Returns the values of `arrays[i]`."""
        return self._read(i, 0, self._size(i)).reshape(self.arrays[i].shape)

    def pieces(self, i: int) -> Iterator[np.ndarray]:
        """Yields the elements of `arrays[i]`, some at a time."""
        size = self._size(i)
        count = PIECE_BYTES // self._dtype(i).itemsize
        for begin in range(0, size, count):
            yield self._read(i, begin, min(begin + count, size))

    def _size(self, i: int) -> int:
        return int(np.prod(self.arrays[i].shape, dtype=np.int64))

    def _dtype(self, i: int) -> np.dtype:
        return np.dtype(tf.as_dtype(self.arrays[i].dtype).as_numpy_dtype)

    def _read(self, i: int, begin: int, end: int) -> np.ndarray:
        file, place = self._places[i]
        dtype = self._dtype(i)
        flat = np.fromfile(
            self.path / file,
            np.uint8,
            (end - begin) * dtype.itemsize,
            offset=place + begin * dtype.itemsize,
        )
        return flat.view(dtype)


class _File:
    """A file to write, flushed to the disk as it is closed; with a checksum."""

    def __init__(self, path: pathlib.Path):
        self._file = path.open("wb")
        self._crc = 0
        self.size = 0

    @property
    def checksum(self) -> str:
        return f"{self._crc:08x}"

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *exception: Any) -> None:
        with self._file:
            if exception[0] is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, values: np.ndarray) -> None:
        data: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self.size += data.nbytes


def _checksum(path: pathlib.Path) -> str:
    crc = 0
    with _opened(path) as file:
        while piece := file.read(PIECE_BYTES):
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


def _opened(path: pathlib.Path) -> BinaryIO:
    # To open a named pipe would block.
    if not path.is_file():
        raise ValueError(f"{path.name} is missing, or no file")
    return path.open("rb")


def _plain(value: Any) -> Any:
    """Returns a number of NumPy as one of Python, for JSON."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _delete(path: pathlib.Path) -> None:
    """Deletes a directory or a file, and ignores errors."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _sync(directory: pathlib.Path) -> None:
    """Flushes a directory's entries (new and renamed files) to the disk.

    Where the system can: Windows and some network file systems cannot.
    """
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
