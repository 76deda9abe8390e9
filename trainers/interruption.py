"""Stops a training run between two steps at Ctrl-C or SIGTERM."""

import contextlib
import signal
import threading

import keras

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """Raised when a signal has stopped a training run.

    Args:
        number: Integer, the number of the signal.
        message: String that names the newest checkpoint.
    """

    def __init__(self, number, message):
        super().__init__(message)
        self.number = number


class StopOnSignal(keras.callbacks.Callback):
    """Ends training after the running step at Ctrl-C or SIGTERM.

    A validation then ends after one batch. Callbacks that are listed later do
    not see its metrics, which are not those of all batches. A second signal
    ends the process at once, as without this callback.

    Args:
        of_all_hosts: Function that returns a list of the numbers with which
            all processes that train together call it: they stop at the same
            step. Defaults to one for a single process.

    Attributes:
        signal: Integer, the number of the signal that stops all processes, or
            0.

    Example:

    ```python
    stop = StopOnSignal()
    with stop:
        model.fit(x, y, callbacks=[stop])
    ```
    """

    def __init__(self, of_all_hosts=lambda number: [number]):
        super().__init__()
        self.signal = self._received = 0
        # Whether it has ended a validation before its last batch.
        self._cut_short = False
        self._of_all_hosts = of_all_hosts
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        # Python calls handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.signal(number, self._handle)
                self._stack.callback(signal.signal, number, before)
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def on_train_batch_end(self, batch, logs=None):
        if self.is_stopped():
            self.model.stop_training = True

    def on_test_begin(self, logs=None):
        self.on_test_batch_end(0)

    def on_test_batch_end(self, batch, logs=None):
        # Not training, too: the end of this epoch is no end of the run.
        if self.is_stopped():
            self.model.stop_evaluating = self._cut_short = True

    def on_test_end(self, logs=None):
        if self._cut_short and logs:
            logs.clear()

    def on_epoch_end(self, epoch, logs=None):
        if self._cut_short:
            for name in [x for x in logs or {} if x.startswith("val_")]:
                del logs[name]

    def is_stopped(self):
        """Returns whether a signal has come, to any host: all hosts call it."""
        self.signal = max(self._of_all_hosts(self._received))
        return bool(self.signal)

    def _handle(self, number, frame):
        self._received = number
        self._stack.close()
        print(
            "\nStopping after this step. The same signal again stops at once.",
            flush=True,
        )
