"""Runs a check in a process of its own, within a time limit.

A check that crashes, hangs or takes all memory leaves the others alone.
"""

import dataclasses
import faulthandler
import functools
import importlib
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback

from tools import child_process

# The number of last lines printed by a process that are in its result.
_NUM_LINES = 5
# The file to which a process writes its stack when most of its time is up.
_WHERE = "where.txt"
_MOST_OF = 0.9


class Failed(Exception):
    """A check has found a fault.

    Args:
        why: String.
        **value: What the check has measured nevertheless.
    """

    def __init__(self, why, **value):
        super().__init__(why)
        self.value = value


class Skipped(Failed):
    """A check cannot run here."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: String.
        function: String, `"module:function"`. The function takes `cpu`,
            whether to run small on logical CPU devices, and `arguments`. It
            returns its measurements in a form that JSON can hold. If it
            raises, the check has failed.
        seconds: Number, the time limit.
        arguments: Tuple, other arguments of the function.
    """

    name: str
    function: str
    seconds: float
    arguments: tuple = ()


def run(check, cpu):
    """Runs a check and returns its result.

    What the check prints goes to standard error.

    Args:
        check: `Check`.
        cpu: Boolean. On a GPU, where nothing should be skipped, a check that
            skips itself has failed.

    Returns:
        Dict with `"check"`; `"status"`, which is `"ok"`, `"failed"` or
        `"skipped"`; `"seconds"`; and `"value"`.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result.json")
        log = pathlib.Path(folder, "log.txt")
        log.touch()
        process = _context(cpu).Process(
            target=_work, args=(check, cpu, str(result), str(log))
        )
        process.start()
        try:
            process.join(check.seconds)
            late = process.is_alive()
        finally:
            _end(process)
        printed = log.read_text(errors="replace")
        sys.stderr.write(printed)
        if result.exists():
            status, value = json.loads(result.read_text())
        else:
            status, value = (
                "failed",
                {
                    "why": f"not done within {check.seconds} seconds"
                    if late
                    else f"the process ended with status {process.exitcode}",
                    "printed": printed.splitlines()[-_NUM_LINES:],
                    "where": _lines_of_main_thread(result.with_name(_WHERE)),
                },
            )
    return {
        "check": check.name,
        "status": status,
        "seconds": round(time.monotonic() - start, 2),
        "value": value,
    }


@functools.cache
def _context(cpu):
    if not cpu:
        # If this process has started CUDA, a fork of it cannot use CUDA.
        return multiprocessing.get_context("spawn")
    # The server imports TensorFlow once; that takes longer than most checks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tf_gpipe", "tools.command_line"])
    return context


def _work(check, cpu, result, log):
    """Runs a check in this process, and writes its result to a file."""
    child_process.end_with_parent()
    # A process group, so that all processes that the check starts can be ended.
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    where = open(pathlib.Path(result).with_name(_WHERE), "w")
    faulthandler.dump_traceback_later(_MOST_OF * check.seconds, file=where)
    module, _, name = check.function.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        found = "ok", function(cpu, *check.arguments)
    except Skipped as e:
        status = "skipped" if cpu else "failed"
        found = status, {"why": str(e), **e.value}
    except Exception as e:
        traceback.print_exc()
        value = e.value if isinstance(e, Failed) else {}
        kind = "" if isinstance(e, Failed) else f"{type(e).__name__}: "
        found = "failed", {"why": f"{kind}{e}", **value}
    sys.stdout.flush()
    sys.stderr.flush()
    part = pathlib.Path(result + ".part")
    part.write_text(json.dumps(found))
    # The result's file has all of the result or is missing.
    part.rename(result)


def _lines_of_main_thread(path):
    """Returns the main thread's calls in a dump, innermost first."""
    # The main thread comes last in a dump.
    dump = path.read_text() if path.exists() else ""
    return dump.rpartition("(most recent call first):")[2].splitlines()[1:]


def _end(process):
    """Ends a process with all processes that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        # It has ended, or has no group of its own yet.
        process.kill()
    process.join()
