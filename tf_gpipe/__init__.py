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
    # Python sets `sys.argv[0]` to "-m" while it looks for the module.
    if program == "-m":
        start = _sys.orig_argv.index("-m") if "-m" in _sys.orig_argv else 0
        return _sys.orig_argv[start + 1] in (__name__, f"{__name__}.worker")
    return _os.path.basename(program) in ("tf-gpipe", "tf-gpipe.exe")


if _TYPE_CHECKING or not _is_command():
    # Imported at once, not at first use: Keras can load saved models only if
    # their classes have been imported.
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
    # Imported at first use: importing TensorFlow takes seconds, for which the
    # help of a command should not wait.
    def __getattr__(name: str) -> _Any:
        if name in __all__:
            return getattr(_importlib.import_module("tf_gpipe.public"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
