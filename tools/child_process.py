"""Programs that end with the one that has started them, however that ends."""

import ctypes
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # Of Linux, <linux/prctl.h>.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent():
    """Has the system end this process with the thread that has started it.

    As `preexec_fn` of a `subprocess.Popen`, or called by the process, on
    Linux; elsewhere it does nothing. `tf_gpipe worker --with_stdin` does so
    everywhere.
    """
    if _libc is not None:
        _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
