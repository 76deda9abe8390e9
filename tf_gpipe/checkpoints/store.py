"""Checkpoints in a directory: each is whole, with checksums, or not there."""

import contextlib
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
INDEX = "index.json"
_CHECKSUMS = "CRC32SUMS"
_FORMAT = 1
# What of an array is in memory at a time.
PIECE_BYTES = 2**22


class Position(NamedTuple):
    """Where a training run stands.

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
    """What is known of an array of a checkpoint, but for its values.

    Attributes:
        kind: String, what it is the value of.
        number: Integer, which one of that kind.
        name: String, for messages.
        shape: Tuple of integers.
        dtype: String.
    """

    kind: str
    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str


class CheckpointError(ValueError):
    """A checkpoint cannot be used, or not for this."""


class DamagedError(CheckpointError):
    """A checkpoint does not have the bytes that were written."""


class Store:
    """The checkpoints in a directory.

    Each is a directory of its own, `epoch_00003` or `epoch_00003_step_000120`,
    with a file of bytes for each device, `index.json`, which says what is in
    them, and `CRC32SUMS`, a line of checksum and name for each. A CRC finds
    what breaks by itself, in a sixth of the time of a cryptographic hash, which
    steps would share the cores with. It gets its name when all of it is on the
    disk.

    Args:
        directory: Path. It is made when something is written.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = pathlib.Path(directory)

    def positions(self) -> list[Position]:
        """Returns the positions that there are checkpoints of, in order."""
        if not self.directory.is_dir():
            return []
        found = (_PATTERN.fullmatch(p.name) for p in self.directory.iterdir())
        return sorted(Position(int(m[1]), int(m[2] or 0)) for m in found if m)

    def path(self, position: Position) -> pathlib.Path:
        """Returns where the checkpoint of a position is, or would be."""
        steps = f"_step_{position.steps:06d}" if position.steps else ""
        return self.directory / f"epoch_{position.epochs:05d}{steps}"

    def newest(self) -> pathlib.Path | None:
        """Returns the path of the last checkpoint, or `None`."""
        found = self.positions()
        return self.path(found[-1]) if found else None

    def write(
        self,
        position: Position,
        parts: Iterable[Iterable[tuple[Array, Iterable[np.ndarray]]]],
        content: Mapping[str, Any],
        keep: int,
    ) -> pathlib.Path:
        """Writes a checkpoint, then deletes others.

        Args:
            position: `Position`.
            parts: The arrays of each file, each in pieces of its elements,
                which are asked for one at a time.
            content: What else is to be told, as JSON has it.
            keep: Integer, how many checkpoints to keep: this one, and those
                before it.

        Returns:
            The path of the checkpoint.

        Raises:
            OSError: If it cannot be written. The others are as before.
        """
        partial = self.directory / _PARTIAL
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
                            # Before the next one comes.
                            del piece
                sums[name] = file.checksum
            index = {**content, "format": _FORMAT, "arrays": arrays}
            with _File(partial / INDEX) as file:
                file.write(np.frombuffer(json.dumps(index).encode(), np.uint8))
            sums[INDEX] = file.checksum
            lines = "".join(f"{x}  {name}\n" for name, x in sums.items())
            with _File(partial / _CHECKSUMS) as file:
                file.write(np.frombuffer(lines.encode(), np.uint8))
            _sync(partial)
            path = self.path(position)
            _delete(path)
            partial.rename(path)
            _sync(self.directory)
        except BaseException:
            # A worker that is lost, too, may end it.
            _delete(partial)
            raise
        before = [x for x in self.positions() if x < position]
        kept = {position, *before[len(before) - keep + 1 :]}
        # Later ones are of a run that went another way, or are damaged.
        for other in self.positions():
            if other not in kept:
                _delete(self.path(other))
        return path


def read(path: pathlib.Path) -> "Saved":
    """Returns a checkpoint, all of whose checksums are right.

    Raises:
        DamagedError: If a file is missing, or has other bytes than were
            written.
    """
    try:
        return Saved(path)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"The checkpoint {path} is damaged: {error}"
        ) from error


class Saved:
    """A checkpoint that has been read.

    Attributes:
        path: `pathlib.Path`.
        content: Dict, what `Store.write` was told.
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
            raise ValueError(f"its format is {self.content['format']}")
        self.arrays: list[Array] = []
        self._places: list[tuple[str, int]] = []
        for row in self.content["arrays"]:
            kind, number, name, shape, dtype, file, place = row
            if file not in sums:
                raise ValueError(f"{_CHECKSUMS} has no line of {file}")
            shape = tuple(shape)
            self.arrays.append(Array(kind, number, name, shape, dtype))
            self._places.append((file, place))

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
    """A file that is on the disk when it is closed, and its checksum."""

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
    # A pipe, for one, would be waited for.
    if not path.is_file():
        raise ValueError(f"{path.name} is missing, or no file")
    return path.open("rb")


def _delete(path: pathlib.Path) -> None:
    """Deletes what is there, as far as it can, of whatever kind it is."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _sync(directory: pathlib.Path) -> None:
    """Has the system write what a directory lists to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
