"""`Speed`: samples or steps per second, in the logs of each epoch."""

import time

import keras


class Speed(keras.callbacks.Callback):
    """Adds samples per second, or steps per second, to an epoch's logs.

    The first step of an epoch is not counted: in it TensorFlow traces, or waits
    for the first data.

    Args:
        batch_size: Positive integer, the samples of a batch; or `None` if
            batches differ, for steps per second.
    """

    # Makes `fit` call it before the callbacks that read the logs.
    adds_to_logs = True

    def __init__(self, batch_size=None):
        super().__init__()
        self._batch_size = batch_size
        self._name = "steps_per_second"
        if batch_size is not None:
            self._name = "samples_per_second"

    def on_epoch_begin(self, epoch, logs=None):
        self._start = self._end = None
        self._num_steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self._end = time.perf_counter()
        if self._start is None:
            self._start = self._end
        else:
            self._num_steps += 1

    def on_epoch_end(self, epoch, logs=None):
        if self._num_steps:
            speed = self._num_steps / (self._end - self._start)
            logs[self._name] = speed * (self._batch_size or 1)
