"""A checkpoint each epoch, and resumption from the last one."""

import errno
import math
import os
import pathlib
import re
import shutil
import warnings
from typing import NamedTuple

import h5py
import keras
import numpy as np
import tensorflow as tf

from trainers.command_line import UserError

_PATTERN = re.compile(r"epoch_(\d{5,})(?:_step_(\d+))?\.weights\.h5")
_PARTIAL = "partial.weights.h5"
# Beside what Keras saves, which leaves out the state of random numbers, and
# which optimizer it was.
_SEEDS = "seed_generator_states"
_OPTIMIZER = "optimizer"
_SEED_STATE = "seed_generator_state"


class Position(NamedTuple):
    """Where a training run stands.

    Attributes:
        epochs: Integer, epochs that are done.
        steps: Integer, steps that are done of the next epoch.
    """

    epochs: int = 0
    steps: int = 0

    def __str__(self):
        steps = f" and {self.steps} steps" if self.steps else ""
        return f"{self.epochs} epochs{steps}"


class Checkpoints(keras.callbacks.Callback):
    """Saves weights and optimizer state at the end of each epoch.

    If training is stopped within an epoch, by `model.stop_training`, it saves
    after the last step. Unlike `keras.callbacks.BackupAndRestore`, it keeps
    the last checkpoint when training is done, so that running again only
    evaluates. What has been done is part of the file's name, and the file gets
    its name once it is complete: whenever a run is killed, or the disk is
    full, a whole checkpoint remains.

    Args:
        directory: Path, made if it does not exist.
        is_chief: Boolean, whether it saves. Of several processes that train
            one model only one does; all of them restore.

    Example:

    ```python
    checkpoints = Checkpoints("/tmp/job")
    checkpoints.restore(model)
    model.fit(
        x,
        y,
        initial_epoch=checkpoints.position().epochs,
        callbacks=[checkpoints],
    )
    ```
    """

    def __init__(self, directory, is_chief=True):
        super().__init__()
        self.is_chief = is_chief
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._epoch = 0
        # Done of this epoch, before this run or in it.
        self._steps = 0

    def restore(self, model):
        """Loads the last checkpoint, if there is one.

        Args:
            model: A built and compiled pipeline.

        Raises:
            UserError: If the checkpoint is not one of this model and its
                optimizer.
        """
        path = newest(self.directory)
        if path is None:
            return
        try:
            with warnings.catch_warnings():
                # Keras leaves out an optimizer's state that does not fit.
                warnings.filterwarnings("error", "Skipping variable loading")
                model.load_weights(path)
            with h5py.File(path) as file:
                seeds = file[_SEEDS][:]
                saved = file[_SEEDS].attrs[_OPTIMIZER]
            # Slots of the same shapes may mean something else.
            if saved != type(model.optimizer).__name__:
                raise ValueError(f"its optimizer is {saved}")
            for variable, seed in zip(_seeds(model), seeds, strict=True):
                variable.assign(seed)
        except tf.errors.OpError:
            raise  # A worker is lost, or memory.
        # Whatever Keras and HDF5 raise for a file that is damaged.
        except Exception as error:
            # Keras lists every variable with its values.
            raise UserError(
                f"The checkpoint {path} is damaged or not one of this model "
                "and its optimizer. Choose another directory, or the flags "
                "that it was made with."
            ) from error

    def position(self):
        """Returns the `Position` of the last checkpoint, or `(0, 0)`."""
        return max(_saved(self.directory), default=Position())

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        before = self.position()
        self._steps = before.steps if before.epochs == epoch else 0

    def on_train_batch_end(self, batch, logs=None):
        self._steps += 1
        # Not as the epoch ends: there may be a long validation before.
        if self.model.stop_training:
            self._save(Position(self._epoch, self._steps))

    def on_epoch_end(self, epoch, logs=None):
        if not self.model.stop_training:
            self._save(Position(epoch + 1))

    def _save(self, position):
        if not self.is_chief:
            return
        partial = self.directory / _PARTIAL
        try:
            # HDF5 crashes where a disk is full.
            _check_space(partial, self.model)
            self.model.save_weights(partial, overwrite=True)
            with h5py.File(partial, "a") as file:
                seeds = [v.numpy() for v in _seeds(self.model)]
                file[_SEEDS] = np.reshape(seeds, (-1, 2)).astype("int64")
                optimizer = type(self.model.optimizer).__name__
                file[_SEEDS].attrs[_OPTIMIZER] = optimizer
            partial.replace(_path(self.directory, position))
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(
                f"Cannot write a checkpoint of {position}: {error}. The "
                f"newest one is {newest(self.directory) or 'none'}."
            ) from error
        for other in _saved(self.directory):
            if other != position:
                _path(self.directory, other).unlink()


def _seeds(model):
    """Returns the states from which dropout and the like draw."""
    return [v for v in model.variables if v.path.endswith(_SEED_STATE)]


def newest(directory):
    """Returns the path of the last checkpoint in `directory`, or `None`."""
    position = max(_saved(directory), default=None)
    return position and _path(directory, position)


def _check_space(path, model):
    """Raises `OSError` if the disk has no room for a checkpoint."""
    variables = [*model.variables, *model.optimizer.variables]
    num_bytes = sum(
        math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables
    )
    # HDF5's own share; each variable has a header.
    num_bytes += 2**20 + 2**12 * len(variables)
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        elif shutil.disk_usage(path.parent).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _path(directory, position):
    epochs, steps = position
    suffix = f"_step_{steps:06d}" if steps else ""
    return directory / f"epoch_{epochs:05d}{suffix}.weights.h5"


def _saved(directory):
    """Returns the positions that there are checkpoints of."""
    matches = (_PATTERN.fullmatch(p.name) for p in directory.glob("*"))
    return [Position(int(m[1]), int(m[2] or 0)) for m in matches if m]
