"""Converts errors of a training run to errors of one line with a repair."""

import contextlib
import errno
import math
import os
import pathlib
import re

import keras
import tensorflow as tf

from tf_gpipe.checkpoints.store import CheckpointError
from tf_gpipe.checkpoints.store import Store
from tf_gpipe.checkpoints.writer import NotWrittenError
from trainers.command_line import Unavailable
from trainers.command_line import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def checkpoints(workdir):
    """Returns the directory of the checkpoints in a working directory."""
    return workdir / "checkpoints"


def newest(workdir):
    """Returns the newest checkpoint's path, or text why there is none."""
    if not workdir:
        return "none: there is no --workdir"
    try:
        return Store(checkpoints(workdir)).newest() or "none: it was too early"
    except OSError as error:
        return f"not known: {error}"


@contextlib.contextmanager
def as_user_errors(workdir):
    """A scope that converts errors that the user can repair to `UserError`s.

    Args:
        workdir: `pathlib.Path` of the working directory, or `None`.
    """
    try:
        yield
    except NotWrittenError as error:
        raise UserError(error.strerror) from error
    except tf.errors.UnavailableError as error:
        raise Unavailable(
            f"{error.message} The newest checkpoint is {newest(workdir)}."
        ) from error
    except (
        tf.errors.OutOfRangeError,
        tf.errors.ResourceExhaustedError,
    ) as error:
        # TensorFlow raises these for a full disk, too.
        place = _on_full_disk(error.message)
        if place:
            raise UserError(_not_written(place, workdir)) from error
        if isinstance(error, tf.errors.OutOfRangeError):
            raise
        raise UserError(
            "A device is out of memory. More micro-batches "
            "(--num_micro_batches), --remat=always, more stages "
            f"(--num_stages) or smaller batches need less: {error.message}"
        ) from error
    except tf.errors.PermissionDeniedError as error:
        if not workdir or str(workdir) not in error.message:
            raise
        raise UserError(_not_written(error.message, workdir)) from error
    except (
        tf.errors.DataLossError,
        tf.errors.FailedPreconditionError,
        tf.errors.InvalidArgumentError,
    ) as e:
        # The operation that has failed, not one that is named as a neighbour.
        if isinstance(e, tf.errors.DataLossError) or re.search(
            r"(node |\[Op:)([\w/]+/)?"
            "((MultiDevice)?IteratorGetNext|MakeIterator|Decode)",
            str(e),
        ):
            raise UserError(
                "The data set is damaged. Delete it from the directory of "
                f"data sets and prepare it again: {e.message}"
            ) from e
        raise
    except CheckpointError as error:
        raise UserError(error) from error
    except OSError as error:
        full = error.errno in _FULL
        if not full and not _is_within(error.filename, workdir):
            raise
        raise UserError(_not_written(error, workdir)) from error


def _not_written(error, workdir):
    return (
        f"Cannot write to {workdir or 'a file'}: {error}. The newest "
        f"checkpoint is {newest(workdir)}."
    )


def _on_full_disk(message):
    """Returns a file that TensorFlow had no space for, with the reason.

    Args:
        message: String, the message of TensorFlow's error.

    Returns:
        String, or `None` if the error is another one.
    """
    why = "|".join(re.escape(os.strerror(x)) for x in _FULL)
    found = re.search(rf"\S+; ({why})", message)
    return found and found[0]


def _is_within(path, workdir):
    if not workdir or not isinstance(path, (str, os.PathLike)):
        return False
    # Real paths: either may be relative, or lead through a link.
    real = pathlib.Path(os.path.realpath(path))
    return real.is_relative_to(os.path.realpath(workdir))


class NotANumber(keras.callbacks.Callback):
    """Ends training at a loss that is not finite, before it can be saved."""

    def __init__(self, workdir):
        super().__init__()
        self._workdir = workdir

    def on_train_batch_end(self, batch, logs=None):
        if not math.isfinite(logs["loss"]):
            raise UserError(
                f"The loss is {logs['loss']}. A lower --learning_rate or a "
                "longer --warmup_steps may help. The newest checkpoint is "
                f"{newest(self._workdir)}."
            )
