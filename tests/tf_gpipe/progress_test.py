"""Progress bars show on a terminal only, and leave standard output alone."""

import os
import pty
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe import progress

CODE = """
import sys, types
package = types.ModuleType("tf_gpipe")
package.__path__ = [{path!r}]
sys.modules["tf_gpipe"] = package
from tf_gpipe import progress
@progress.shown(after=progress.PATIENCE)
def count():
    for i in progress.track(range(3), "counting"):
        progress.say(str(i))
with progress.shown({wanted}):
    count()
"""


class ProgressTest(parameterized.TestCase):
    def test_yields_all(self):
        with progress.shown():
            self.assertEqual(
                list(progress.track(iter("ab"), "letters")), ["a", "b"]
            )
            with progress.doing("nothing"):
                pass

    @parameterized.parameters((True, True), (False, False))
    def test_on_a_terminal(self, wanted, expected):
        ours, terminal = pty.openpty()
        code = CODE.format(
            path=os.path.dirname(progress.__file__), wanted=wanted
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(terminal)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:
            pass  # The end of the output, on Linux.
        os.close(ours)
        self.assertEqual(process.wait(), 0)
        self.assertEqual(b"counting" in text, expected)
        for number in (b"0", b"1", b"2"):
            self.assertIn(number, text)

    def test_not_in_a_file(self):
        code = CODE.format(path=os.path.dirname(progress.__file__), wanted=True)
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        )
        self.assertEqual(result.stdout, "0\n1\n2\n")
        self.assertEqual(result.stderr, "")


if __name__ == "__main__":
    absltest.main()
