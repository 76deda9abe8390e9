"""A program that dies starts again; so does a worker, at its old address."""

import contextlib
import io
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.commands import supervise
from tools import child_process

# Ends each time in the next of the given ways, and counts its starts in a file.
PROGRAM = """
import os, pathlib, signal, sys
path = pathlib.Path(sys.argv[1])
count = len(path.read_text()) if path.exists() else 0
path.write_text("x" * (count + 1))
how = sys.argv[2].split(",")[count]
if how.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, how))
sys.exit(int(how))
"""

# Kills its worker, and waits until it answers again; twice.
KILLING = """
import os, signal, subprocess, sys, time
from tf_gpipe.devices import heartbeat
from tf_gpipe.devices import worker_lost
address = sys.argv[-1].removeprefix("--workers=")
(place,) = worker_lost.places_of([address]).values()
below = f"/proc/{os.getppid()}/task/{os.getppid()}/children"
for _ in range(2):
    (pid,) = [
        int(x)
        for x in open(below).read().split()
        if "worker" in open(f"/proc/{x}/cmdline").read().split("\\0")
    ]
    os.kill(pid, signal.SIGKILL)
    while heartbeat.ask(*place, 1.0) is None:
        pass
    while heartbeat.ask(*place, 1.0) is not None:
        pass
print("there", flush=True)
"""


def started(*args):
    return subprocess.Popen(
        [sys.executable, "-m", "tf_gpipe", "supervise", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=child_process.end_with_parent,
    )


class SuperviseTest(parameterized.TestCase):
    @parameterized.parameters(
        # How each run ends, how many restarts are allowed, and whether after
        # errors; the exit status, and the number of runs.
        ("SIGKILL,1,0", 5, True, 0, 3),
        ("SIGKILL,1,0", 5, False, 1, 2),
        ("75,75,75,75", 2, False, 75, 3),
        ("SIGSEGV,2", 5, True, 2, 2),
        ("SIGTERM,0", 5, True, 128 + signal.SIGTERM, 1),
        ("0", 5, True, 0, 1),
        ("1,0", 0, True, 1, 1),
    )
    def test_restarts(self, ends, restarts, errors, status, times):
        printed = io.StringIO()
        with (
            tempfile.TemporaryDirectory() as directory,
            contextlib.redirect_stderr(printed),
        ):
            path = pathlib.Path(directory) / "runs"
            command = [sys.executable, "-c", PROGRAM, str(path), ends]
            self.assertEqual(supervise.run(command, restarts, errors), status)
            self.assertLen(path.read_text(), times)
        self.assertEqual(printed.getvalue().count("It starts again"), times - 1)

    def test_stopped(self):
        process = started(
            *(sys.executable, "-c"),
            "import signal\nprint('ready', flush=True)\nsignal.pause()",
        )
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)
        self.assertNotIn("again", errors)

    def test_stopped_program_that_ends_with_an_error(self):
        process = started(
            *("--restarts=1", sys.executable, "-c"),
            "import signal, sys\nsignal.alarm(20)\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
            "print('ready', flush=True)\nsignal.pause()",
        )
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        self.assertEqual(process.returncode, 1)
        self.assertIn("status 1. It does not start again", errors)

    def test_the_program_ends_with_it(self):
        process = started(
            *(sys.executable, "-c"),
            "import signal\nprint('ready', flush=True)\nsignal.pause()",
        )
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.kill()
        # Both processes hold its output, which ends with the last of them.
        process.communicate()

    @parameterized.parameters(
        ((), "a command to run is needed"),
        (("/nonsuch",), "program that can be run. Received: /nonsuch"),
    )
    def test_wrong_arguments(self, args, message):
        process = started(*args)
        _, errors = process.communicate()
        self.assertEqual(process.returncode, 2)
        self.assertIn(message, errors)
        self.assertNotIn("Traceback", errors)


@pytest.mark.slow
class WorkersTest(absltest.TestCase):
    def test_restart(self):
        result = subprocess.run(
            [
                *(sys.executable, "-m", "tf_gpipe", "workers", "--restart"),
                *("1", sys.executable, "-c", KILLING),
            ],
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
        )
        self.assertEqual((result.returncode, result.stdout), (0, "there\n"))


if __name__ == "__main__":
    absltest.main()
