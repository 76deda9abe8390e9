"""The loss of every training step, in a CSV file."""

import pathlib
import re

import keras

from tf_gpipe.whole_files import replacing

# A whole line, with the number of its step.
_LINE = re.compile(r"([0-9]{1,18}),(?:-?[0-9]+\.[0-9]+|-?inf|nan)\n")


class LossLog(keras.callbacks.Callback):
    """Writes a line `step,loss` for each step, counted from 0 over all epochs.

    A line is written when its step ends. A run that resumes from a checkpoint
    first drops the lines of later steps. If batches differ in their number of
    rows, losses are approximate. So are their last digits late in a long epoch:
    they are differences of the mean over it, which has the precision of
    float32.

    Args:
        path: Path of the file.
        steps_per_epoch: Positive integer.
    """

    def __init__(self, path, steps_per_epoch):
        super().__init__()
        self.path = pathlib.Path(path)
        self.steps_per_epoch = steps_per_epoch
        self._file = None

    def on_epoch_begin(self, epoch, logs=None):
        self._first = epoch * self.steps_per_epoch
        self._total = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        if self._file is None:
            self._file = self._opened(self._first + batch)
            if batch:
                mean = self.model.get_metrics_result()["loss"]
                self._total = batch * float(mean)

    def on_train_batch_end(self, batch, logs=None):
        # Keras reports the mean over the epoch so far.
        total = (batch + 1) * logs["loss"]
        self._file.write(f"{self._first + batch},{total - self._total:.6f}\n")
        # Flushed, because the process may be killed at any time.
        self._file.flush()
        self._total = total

    def on_train_end(self, logs=None):
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self, step):
        """Opens the file to append to, with only the lines before `step`."""
        lines = ["step,loss\n"]
        if step and self.path.exists():
            with self.path.open(errors="replace") as file:
                # A crash of the host may have left any bytes in it, or none.
                found = map(_LINE.fullmatch, file)
                lines += [x[0] for x in found if x and int(x[1]) < step]
        with replacing(self.path) as partial:
            partial.write_text("".join(lines))
        return self.path.open("a")
