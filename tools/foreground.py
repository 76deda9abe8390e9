"""Runs a command as a shell does."""

import contextlib
import signal
import subprocess


def call(command, **kwargs):
    """Runs a command, and leaves to it what to do when it is to stop.

    Ctrl-C reaches it as it reaches this process, SIGTERM is handed on: a
    trainer saves a checkpoint before it ends.

    Args:
        command: List of strings.
        **kwargs: Arguments of `subprocess.Popen`.

    Returns:
        Integer, the exit status, above 128 if a signal has ended the command.
    """
    process = None

    def hand_on(number, frame):
        if process is not None:
            process.send_signal(number)

    handlers = {
        # A handler, not `SIG_IGN`, which the command would inherit.
        signal.SIGINT: lambda number, frame: None,
        signal.SIGTERM: hand_on,
    }
    with contextlib.ExitStack() as stack:
        for number, handler in handlers.items():
            before = signal.signal(number, handler)
            stack.callback(signal.signal, number, before)
        process = subprocess.Popen(command, **kwargs)
        status = process.wait()
    return status if status >= 0 else 128 - status
