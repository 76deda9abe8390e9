"""The loss of every training step, in a CSV file."""

import pathlib

import keras

from trainers.checkpoints import Position


class LossLog(keras.callbacks.Callback):
    """Writes a line `step,loss` for each step, counted from 0 over all epochs.

    Lines are written as their epoch ends. A resumed run goes on after the
    steps of the epochs before it, and drops later lines.

    Args:
        path: Path of the file.
        steps_per_epoch: Positive integer. Where batches differ in rows, as
            those of equally many tokens do, losses are approximate.
        position: `Position` that training resumes from. Defaults to the start.
    """

    def __init__(self, path, steps_per_epoch, position=Position()):  # noqa: B008
        super().__init__()
        self.path = pathlib.Path(path)
        self.steps_per_epoch = steps_per_epoch
        self.position = position

    def on_epoch_begin(self, epoch, logs=None):
        self._total = 0.0
        self._losses = []

    def on_train_batch_end(self, batch, logs=None):
        # Keras reports the mean over the epoch so far.
        total = (batch + 1) * logs["loss"]
        self._losses.append(total - self._total)
        self._total = total

    def on_epoch_end(self, epoch, logs=None):
        first = epoch * self.steps_per_epoch
        if epoch == self.position.epochs:
            first += self.position.steps
        lines = ["step,loss\n"]
        if first and self.path.exists():
            with self.path.open() as file:
                lines = file.readlines()[: first + 1]
        for step, loss in enumerate(self._losses, start=first):
            lines.append(f"{step},{loss:.6f}\n")
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(lines))
        partial.replace(self.path)
