"""Initialises a model with weights of one trained on other data."""

import pathlib

import keras
import tensorflow as tf

from tf_gpipe.checkpoints import model_variables
from tf_gpipe.checkpoints import state
from tf_gpipe.checkpoints import store
from trainers.command_line import UserError

# The end of the names of averages of weights in an optimizer of Keras.
_AVERAGE = "_average"


def load_all_but_head(model, path):
    """Loads a checkpoint's weights, except those of the last layer.

    As in Huang et al., "GPipe", 2019, section 4: the last layer keeps its
    initial weights, and all layers are trained. The checkpoint's model may have
    had other stages and another number of classes. If its run averaged weights,
    the averages are taken, which that run was tested with.

    Args:
        model: A built `keras.Model`.
        path: Path of a checkpoint, of a `.weights.h5` file, or of the working
            directory of a training run, whose newest checkpoint is taken.

    Raises:
        UserError: If there is no such checkpoint, or its layers, the last one
            excepted, are not those of `model`.
    """
    path = pathlib.Path(path)
    found = path
    if path.is_dir() and not (path / store.INDEX).is_file():
        found = (
            store.Store(path / "checkpoints").newest()
            or store.Store(path).newest()
        )
    if found is None or not found.exists():
        raise UserError(
            "--init_from must be a checkpoint, or the --workdir of a run that "
            f"has one. Received: {path}"
        )
    head = [layer for layer in model.layers if layer.weights][-1]
    try:
        if found.is_dir():
            _load(model, head, store.read(found))
        else:
            model.load_weights(found, objects_to_skip=[head])
    # Not of the file; `as_user_errors` tells of them.
    except (tf.errors.ResourceExhaustedError, tf.errors.UnavailableError):
        raise
    # Any error of Keras and HDF5 for a damaged file.
    except Exception as error:
        raise UserError(
            f"The checkpoint {found} is damaged or not one of a model whose "
            "layers but the last one are those of this one. Use the model and "
            "the --model_args that it was made with."
        ) from error


def _load(model, head, saved):
    """Assigns saved values to all weights except seeds and the head's.

    Args:
        model: The model.
        head: Its last layer with weights.
        saved: The checkpoint, whose weights are matched by their order.
    """
    kept = {id(v) for v in head.variables}
    found = {
        id(v): (v, i)
        for i, v in state.matched(
            saved,
            model_variables.WEIGHTS,
            model_variables.variables_of(model)[model_variables.WEIGHTS],
            skip=lambda v: id(v) in kept or _is_seed(v),
        )
    }
    averages = sorted(
        (array.number, i)
        for i, array in enumerate(saved.arrays)
        if array.kind == model_variables.OPTIMIZER
        and array.name.endswith(_AVERAGE)
    )
    if averages:
        for (_, i), v in zip(averages, model.trainable_variables, strict=True):
            if id(v) in found:
                found[id(v)] = v, i
    for v, i in found.values():
        v.assign(saved.value(i))


def _is_seed(variable):
    return keras.backend.standardize_dtype(variable.dtype) == "uint32"
