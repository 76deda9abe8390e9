"""A program that dies starts again, and a worker at the address it had."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from tools import child_process

# Ends each time in the next way that is given, and tells how often it ran.
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

# Kills its worker, and waits until it is there again.
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


def supervise(*args, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-m", "tf_gpipe", "supervise", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=child_process.end_with_parent,
        **kwargs,
    )


class SuperviseTest(parameterized.TestCase):
    @parameterized.parameters(
        # How it ends, how often it may start again, its end, how often it ran.
        ("SIGKILL,1,0", 5, 0, 3),
        ("75,75,75,75", 2, 75, 3),
        ("SIGSEGV,2", 5, 2, 2),
        ("SIGTERM,0", 5, 128 + signal.SIGTERM, 1),
        ("0", 5, 0, 1),
    )
    def test_restarts(self, ends, restarts, status, times):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "runs"
            process = supervise(
                f"--restarts={restarts}",
                *(sys.executable, "-c", PROGRAM, str(path), ends),
            )
            _, errors = process.communicate()
            self.assertEqual(process.returncode, status, errors)
            self.assertLen(path.read_text(), times)
        self.assertEqual(errors.count("It starts again"), times - 1)

    def test_stopped(self):
        process = supervise(
            *(sys.executable, "-c"),
            "import signal\nprint('ready', flush=True)\nsignal.pause()",
        )
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)
        self.assertNotIn("again", errors)

    def test_the_program_ends_with_it(self):
        process = supervise(
            *(sys.executable, "-c"),
            "import signal\nprint('ready', flush=True)\nsignal.pause()",
        )
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.kill()
        # Which both have: it ends with the last of them.
        process.communicate()

    @parameterized.parameters(
        ((), "a command to run is needed"),
        (("--restarts=0", "true"), "--restarts"),
        (("/nonsuch",), "cannot run /nonsuch"),
    )
    def test_wrong_arguments(self, args, message):
        process = supervise(*args)
        _, errors = process.communicate()
        self.assertEqual(process.returncode, 2)
        self.assertIn(message, errors)
        self.assertNotIn("Traceback", errors)


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
            env={**os.environ},
        )
        self.assertEqual((result.returncode, result.stdout), (0, "there\n"))


if __name__ == "__main__":
    absltest.main()
