"""A checkpoint each epoch, and resumption from the last one."""

import pathlib
import re

import keras

from trainers.command_line import UserError

_NAME = "epoch_{:05d}.weights.h5"
_PATTERN = re.compile(r"epoch_(\d{5,})\.weights\.h5")


class Checkpoints(keras.callbacks.Callback):
    """Saves weights and optimizer state at the end of each epoch.

    Unlike `keras.callbacks.BackupAndRestore`, it keeps the last checkpoint
    when training is done, so that running again only evaluates. The number of
    finished epochs is part of the file's name, and the file gets its name
    once it is complete: whenever a run is killed, a whole checkpoint remains.

    Args:
        directory: Path, made if it does not exist.
        is_chief: Boolean, whether it saves. Of several processes that train
            one model only one does; all of them restore.

    Example:

    ```python
    checkpoints = Checkpoints("/tmp/job")
    first_epoch = checkpoints.restore(model)
    model.fit(x, y, initial_epoch=first_epoch, callbacks=[checkpoints])
    ```
    """

    def __init__(self, directory, is_chief=True):
        super().__init__()
        self.is_chief = is_chief
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def restore(self, model):
        """Loads the last checkpoint, if there is one.

        Args:
            model: A built and compiled `keras.Model`.

        Returns:
            Integer, the number of epochs that the model has been trained for:
            `0` without a checkpoint.

        Raises:
            UserError: If the checkpoint is not one of this model.
        """
        num_epochs = self.num_epochs()
        if num_epochs:
            # Keras skips the optimizer's state in the file if the optimizer
            # has no variables yet.
            model.optimizer.build(model.trainable_variables)
            path = self._path(num_epochs)
            try:
                model.load_weights(path)
            except (KeyError, OSError, ValueError) as error:
                # Keras lists every variable with its values.
                raise UserError(
                    f"The checkpoint {path} is damaged or not one of this "
                    "model. Choose another directory, or the flags that it "
                    "was made with."
                ) from error
        return num_epochs

    def num_epochs(self):
        """Returns the number of epochs before the last checkpoint, or 0."""
        return max(_saved(self.directory), default=0)

    def on_epoch_end(self, epoch, logs=None):
        if not self.is_chief:
            return
        num_epochs = epoch + 1
        partial = self.directory / "partial.weights.h5"
        self.model.save_weights(partial, overwrite=True)
        partial.replace(self._path(num_epochs))
        for older in _saved(self.directory):
            if older != num_epochs:
                self._path(older).unlink()

    def _path(self, num_epochs):
        return self.directory / _NAME.format(num_epochs)


def newest(directory):
    """Returns the path of the last checkpoint in `directory`, or `None`."""
    num_epochs = max(_saved(directory), default=0)
    return directory / _NAME.format(num_epochs) if num_epochs else None


def _saved(directory):
    """Returns the numbers of epochs that there are checkpoints of."""
    matches = (_PATTERN.fullmatch(p.name) for p in directory.glob("*"))
    return [int(match[1]) for match in matches if match]
