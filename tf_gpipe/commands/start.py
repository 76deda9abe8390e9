"""Imports TensorFlow late, without the lines that it logs at its start."""

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

# TensorFlow's environment variable: at levels 0 and 1 nothing is left out.
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Lines about the CPU and GPUs found, in glog's form or following such a line;
# not that GPUs cannot be used, since their libraries are missing.
_LOGGED = re.compile(
    r"[IWE]\d{4} (?!.*Cannot dlopen some GPU libraries)|"
    r"WARNING: All log messages before absl|"
    r"To enable the following instructions"
)


def import_tensorflow() -> None:
    """Imports TensorFlow, and makes it look for devices.

    The lines that it logs meanwhile are left out, and later ones below the
    level of errors, unless `TF_CPP_MIN_LOG_LEVEL` is 0 or 1.
    """
    if _shown() or "tensorflow" in sys.modules:
        return
    with quiet():
        import tensorflow as tf

        # Here TensorFlow logs that there is no GPU.
        tf.config.list_physical_devices()
    # Warnings, too: TensorFlow warns that making several models is slow.
    tf.get_logger().setLevel(logging.ERROR)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A scope in which TensorFlow starts, without the lines that it logs.

    Later it logs errors alone. With `TF_CPP_MIN_LOG_LEVEL` of 0 or 1 it logs
    all, as ever.
    """
    if _shown():
        yield
        return
    os.environ[_LEVEL] = os.environ.get(_LEVEL) or "2"
    with _logs_left_out():
        yield


def _shown() -> bool:
    return os.environ.get(_LEVEL, "") in ("0", "1")


@contextlib.contextmanager
def left_out(*names: str) -> Iterator[None]:
    """A scope in which importing these modules fails as if not installed.

    Modules that have been imported before stay.
    """
    missing = [x for x in names if x not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(missing))
    try:
        yield
    finally:
        for name in missing:
            del modules[name]


@contextlib.contextmanager
def _logs_left_out() -> Iterator[None]:
    """A scope whose standard error is printed at its end, without log lines.

    It redirects the file descriptor, since the lines are written by C++. Where
    no file can be made to keep them, as on a read-only host, they are printed.
    """
    try:
        file = tempfile.TemporaryFile(mode="w+", errors="replace")
    except OSError:
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    with file as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            for line in kept:
                if not _LOGGED.match(line):
                    sys.stderr.write(line)
