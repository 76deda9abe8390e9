"""Child processes that are killed when their parent ends, however it ends."""

import ctypes
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent():
    """Has the system kill this process when the thread that started it ends.

    For the `preexec_fn` of a `subprocess.Popen`, or called by the child. Works
    on Linux only and does nothing elsewhere; `tf_gpipe worker --with_stdin`
    ends with its parent on every system.
    """
    if _libc is not None:
        _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
