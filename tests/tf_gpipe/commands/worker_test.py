"""A worker refuses what it cannot serve, in one line."""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.commands import start
from tf_gpipe.commands import worker as command


class WorkerTest(parameterized.TestCase):
    @parameterized.parameters(
        (["--port=-1"], "from 0 to 65535"),
        (["--port=0", "--bind=elsewhere"], "IPv4 address"),
        (["--port=0", "--bind=192.0.2.99"], "Cannot serve at"),
        (["--port=0", "--forget_after=9"], "at least 10. Received: 9"),
        (["--port=0", "--forget_after=nan"], "at least 10. Received: nan"),
        (["--port=0", "--forget_after=inf"], "at least 10. Received: inf"),
    )
    def test_bad_flags(self, flags, message):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            with self.assertRaises(SystemExit) as raised:
                command.main(flags)
        self.assertEqual(raised.exception.code, 2)
        self.assertIn(message, stderr.getvalue().splitlines()[-1])

    @parameterized.parameters("tf_gpipe worker", "tf_gpipe.worker")
    def test_both_names(self, name):
        result = subprocess.run(
            [sys.executable, "-m", *name.split(), "--port=-1"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 2)
        self.assertIn("from 0 to 65535", result.stderr)

    def test_modules_that_are_left_out(self):
        """Only within the scope: the process may run other code later."""
        sys.modules.pop("this", None)
        with start.left_out("this", "json"):
            with self.assertRaises(ImportError):
                importlib.import_module("this")
            self.assertIs(importlib.import_module("json"), json)
        self.assertNotIn("this", sys.modules)
        self.assertIn("json", sys.modules)

    def test_lines_that_are_left_out(self):
        level = "TF_CPP_MIN_LOG_LEVEL"
        lines = [
            "I0000 00:00:17.6 7 cuda.cc:31] Could not find cuda drivers\n",
            "E0000 00:00:17.6 7 cuda.cc:52] failed call to cuInit: 303\n",
            "W0000 00:00:17.6 7 gpu.cc:2] Cannot dlopen some GPU libraries\n",
            "another line\n",
        ]
        with (
            mock.patch.dict(os.environ, {level: "3"}),
            contextlib.redirect_stderr(io.StringIO()) as printed,
        ):
            with start.quiet():
                os.write(2, "".join(lines).encode())
            self.assertEqual(os.environ[level], "3")
        self.assertEqual(printed.getvalue(), "".join(lines[2:]))

    def test_where_no_lines_can_be_left_out(self):
        with (
            mock.patch.object(tempfile, "tempdir", "/nonsuch"),
            mock.patch.dict(os.environ),
            contextlib.redirect_stderr(io.StringIO()),
            start.quiet(),
        ):
            pass

    def test_imports_little(self):
        """TensorFlow as a whole, and Keras, would take ten times as long."""
        with (
            tempfile.TemporaryFile("w+") as imported,
            subprocess.Popen(
                [sys.executable, "-X", "importtime", "-m", "tf_gpipe", "worker"]
                + ["--port=0", "--with_stdin"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=imported,
                text=True,
            ) as process,
        ):
            self.assertStartsWith(process.stdout.readline(), "worker at")
            # A pipe that nobody reads on would fill.
            self.assertEqual(process.stdout.read(), "")
            process.stdin.close()
            process.wait()
            imported.seek(0)
            lines = imported.read()
        self.assertIn("tensorflow.python", lines)
        for each in ("tensorflow._api", "keras.src", "jax._src"):
            self.assertNotIn(each, lines)


if __name__ == "__main__":
    absltest.main()
