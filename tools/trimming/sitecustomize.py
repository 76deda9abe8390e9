"""Has a Python process give freed memory back to the system when asked to.

Python imports this file as it starts, if its folder is on `PYTHONPATH`. After
each SIGUSR1, a thread has the C library return the pages that hold nothing.
"""

import ctypes
import signal
import threading


def _serve():
    libc = ctypes.CDLL(None)
    while True:
        signal.sigwait({signal.SIGUSR1})
        libc.malloc_trim(0)


# Before other threads start, which inherit it: only `_serve` gets the signal.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
threading.Thread(target=_serve, daemon=True).start()
