"""Stops a training run between two steps when it is asked to."""

import contextlib
import signal
import threading

import keras

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """The end of a training run that a signal has stopped.

    Args:
        number: Integer, of the signal.
        message: String, what is left of the run.
    """

    def __init__(self, number, message):
        super().__init__(message)
        self.number = number


class StopOnSignal(keras.callbacks.Callback):
    """Lets the running step end when Ctrl-C or SIGTERM comes.

    A second signal ends the process at once, as without this callback.

    Attributes:
        signal: Integer, the number of the signal that has come, or `None`.

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
