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

    A second signal ends the process at once, as without this callback.

    Attributes:
        signal: Integer, the number of the signal received, or `None`.

    Example:

    ```python
    stop = StopOnSignal()
    with stop:
        model.fit(x, y, callbacks=[stop])
    ```
    """

    def __init__(self):
        super().__init__()
        self.signal = None
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
        if self.signal:
            self.model.stop_training = True

    def _handle(self, number, frame):
        self.signal = number
        self._stack.close()
        print(
            "\nStopping after this step. The same signal again stops at once.",
            flush=True,
        )
