"""The loss of every training step, in a CSV file."""

import pathlib

import keras

from trainers.checkpoints import Position


class LossLog(keras.callbacks.Callback):
    """Writes a line `step,loss` for each step, counted from 0 over all epochs.

    Lines are written step by step, so that those of all steps before a
    checkpoint are there, however the run ends. A resumed run goes on after the
    steps before its checkpoint, and drops later lines.

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
        self._file = None

    def on_epoch_begin(self, epoch, logs=None):
        self._total = 0.0
        self._step = epoch * self.steps_per_epoch
        if epoch == self.position.epochs:
            self._step += self.position.steps
        self._close()
        lines = ["step,loss\n"]
        if self._step and self.path.exists():
            # What a crash of the host has left may be anything.
            with self.path.open(errors="replace") as file:
                lines = file.readlines()[: self._step + 1]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(lines))
        partial.replace(self.path)
        # A line at once.
        self._file = self.path.open("a", buffering=1)

    def on_train_batch_end(self, batch, logs=None):
        # Keras reports the mean over the epoch so far.
        total = (batch + 1) * logs["loss"]
        self._file.write(f"{self._step},{total - self._total:.6f}\n")
        self._total = total
        self._step += 1

    def on_epoch_end(self, epoch, logs=None):
        self._close()

    def on_train_end(self, logs=None):
        self._close()

    def _close(self):
        if self._file is not None:
            self._file.close()
            self._file = None
