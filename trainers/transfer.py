"""Starts a model with the weights of one that was trained on other data."""

import pathlib

from trainers.checkpoints import newest
from trainers.command_line import UserError


def load_all_but_head(model, path):
    """Loads a checkpoint's weights but for those of the last layer.

    As in Huang et al., "GPipe", 2019, section 4: the last layer is new, and
    everything is trained. The other model may have had other stages, and any
    number of classes.

    Args:
        model: A built `keras.Model`.
        path: Path of a `.weights.h5` file, or of the working directory of a
            training run, whose newest checkpoint is taken.

    Raises:
        UserError: If there is no such checkpoint, or it is not one of such a
            model.
    """
    path = pathlib.Path(path)
    found = path
    if path.is_dir():
        found = newest(path / "checkpoints") or newest(path)
    if found is None or not found.is_file():
        raise UserError(
            "--init_from must be a checkpoint, or the --workdir of a run that "
            f"has one. Received: {path}"
        )
    head = [layer for layer in model.layers if layer.weights][-1]
    try:
        model.load_weights(found, objects_to_skip=[head])
    # Whatever Keras and HDF5 raise for a file that is damaged.
    except Exception as error:
        raise UserError(
            f"The checkpoint {found} is damaged or not one of a model whose "
            "layers but the last one are those of this one. Use the model and "
            "the --model_args that it was made with."
        ) from error
