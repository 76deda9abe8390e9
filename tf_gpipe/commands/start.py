"""Imports TensorFlow late, and without what it logs at its start."""

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

# Of TensorFlow: 0 and 1 are those that show what we leave out.
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# What it found of the CPU and of GPUs, in glog's form or below such a line.
_LOGGED = re.compile(
    r"[IWE]\d{4} |WARNING: All log messages before absl|"
    r"To enable the following instructions"
)


def import_tensorflow() -> None:
    """Imports TensorFlow, and has it look for its devices.

    The lines that it logs meanwhile, and what it logs later that is less than
    an error, are left out, unless `TF_CPP_MIN_LOG_LEVEL` is 0 or 1.
    """
    if _shown() or "tensorflow" in sys.modules:
        return
    with quiet():
        import tensorflow as tf

        # Which finds out that there is no GPU.
        tf.config.list_physical_devices()
    # A command makes several models, which TensorFlow warns to be slow.
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
    os.environ[_LEVEL] = "2"
    with _logs_left_out():
        yield


def _shown() -> bool:
    return os.environ.get(_LEVEL, "") in ("0", "1")


@contextlib.contextmanager
def left_out(*names: str) -> Iterator[None]:
    """A scope in which modules are as if they were not installed.

    Those that have been imported before stay.
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
    """A scope of which standard error gets all but lines that are logged.

    They come from C++, so that it is the file descriptor that is changed.
    """
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile(mode="w+", errors="replace") as kept:
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
