"""A quick Python is like Python, but for what has been imported."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import quick_python

TELL = """
import json, os, sys
print(json.dumps([
    *(sys.argv, sys.orig_argv, sys.path[:2]),
    *(__name__, os.getcwd(), os.environ.get("TF_NEW"), sys.stdin.read()),
]))
sys.exit(3)
"""


def run(python, *args, **kwargs):
    return subprocess.run(
        [*python, *args], capture_output=True, text=True, **kwargs
    )


class QuickPythonTest(parameterized.TestCase):
    @parameterized.parameters("-c", "-m", "file")
    def test_a_program_is_told_what_python_tells(self, kind):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        pathlib.Path(folder, "tell.py").write_text(TELL)
        args = {"-c": ("-c", TELL), "-m": ("-m", "tell"), "file": ("tell.py",)}
        quick, plain = (
            run(
                python,
                *(*args[kind], "one", "--two=3"),
                cwd=folder,
                env={**os.environ, "PYTHONPATH": folder + "x"},
                input="four",
            )
            for python in (quick_python.command(), (sys.executable,))
        )
        self.assertEqual(json.loads(quick.stdout), json.loads(plain.stdout))
        self.assertEqual((quick.returncode, quick.stderr), (3, ""))

    @pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
    def test_keras_is_imported(self):
        code = "import sys; print('keras' in sys.modules, len(sys.argv))"
        done = run(quick_python.command(), "-c", code)
        self.assertEqual(done.stdout, "True 1\n")
        # TensorFlow reads its environment once.
        other = {**os.environ, "TF_NEW": "1"}
        done = run(quick_python.command(), "-c", code, env=other)
        self.assertEqual(done.stdout, "False 1\n")

    @parameterized.parameters(
        ("raise ValueError('no')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
    )
    def test_ends_as_the_program_does(self, code, status):
        done = run(quick_python.command(), "-c", code)
        self.assertEqual(done.returncode, status)
        self.assertEqual("ValueError: no" in done.stderr, status == 1)

    @parameterized.parameters(signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    def test_signals(self, number):
        code = (
            "import signal\n"
            # Ignored where the tests run in the background of a script.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "signal.alarm(60)\n"
            "print(1, flush=True)\n"
            "while True: pass"
        )
        process = subprocess.Popen(
            [*quick_python.command(), "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.assertEqual(process.stdout.readline(), "1\n")
        process.send_signal(number)
        # To the end of what the program could print, and so to its end.
        _, errors = process.communicate()
        self.assertEqual(process.returncode, -number)
        self.assertEqual("KeyboardInterrupt" in errors, number == signal.SIGINT)


if __name__ == "__main__":
    absltest.main()
