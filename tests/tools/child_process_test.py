"""A program ends with the program that has started it."""

import signal
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tools import child_process

CHILD = "import signal; print('ready', flush=True); signal.pause()"
PARENT = f"""
import signal, subprocess, sys
from tools import child_process

child = subprocess.Popen(
    [sys.executable, "-c", {CHILD!r}],
    preexec_fn=child_process.end_with_parent,
)
signal.pause()
"""


class ChildProcessTest(parameterized.TestCase):
    @parameterized.parameters(signal.SIGKILL, signal.SIGTERM)
    def test_ends_with_its_parent(self, number):
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            # Both processes write to it: it ends with the last of them.
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=child_process.end_with_parent,
        )
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.send_signal(number)
        self.assertEqual(process.stdout.read(), "")
        process.communicate()


if __name__ == "__main__":
    absltest.main()
