"""How fast a training run is, in the logs of each epoch."""

import time

import keras


class Speed(keras.callbacks.Callback):
    """Adds samples a second, or steps a second, to the logs of an epoch.

    The first step of an epoch does not count: TensorFlow traces in it, or
    data is fetched.

    Args:
        batch_size: Positive integer, samples of a batch; or `None`, if they
            differ, for steps a second.
    """

    # By which `fit` calls it before the callbacks that show logs.
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
