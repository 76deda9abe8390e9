"""Pipeline parallelism with rematerialisation (GPipe) for Keras."""

import importlib as _importlib
import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from tf_gpipe._version import __version__

__all__ = [
    "Plan",
    "PipelinedModel",
    "PipelinedSequential",
    "Schedule",
    "__version__",
    "callbacks",
    "connect",
    "plan",
    "split_cpu",
    "tune",
    "verify",
]


def _is_command() -> bool:
    """Returns whether this process is `python -m tf_gpipe` or `tf-gpipe`."""
    program, *_ = getattr(_sys, "argv", None) or [""]
    # What Python sets while it looks for the module after `-m`.
    if program == "-m":
        start = _sys.orig_argv.index("-m") if "-m" in _sys.orig_argv else 0
        return _sys.orig_argv[start + 1] in (__name__, f"{__name__}.worker")
    return _os.path.basename(program) in ("tf-gpipe", "tf-gpipe.exe")


if _TYPE_CHECKING or not _is_command():
    # At once, and not when they are first used: Keras finds classes in saved
    # models if they have been imported.
    from tf_gpipe.public import PipelinedModel
    from tf_gpipe.public import PipelinedSequential
    from tf_gpipe.public import Plan
    from tf_gpipe.public import Schedule
    from tf_gpipe.public import callbacks
    from tf_gpipe.public import connect
    from tf_gpipe.public import plan
    from tf_gpipe.public import split_cpu
    from tf_gpipe.public import tune
    from tf_gpipe.public import verify
else:
    # TensorFlow takes seconds, which the help of a command need not wait for.
    def __getattr__(name: str) -> _Any:
        if name in __all__:
            return getattr(_importlib.import_module("tf_gpipe.public"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
