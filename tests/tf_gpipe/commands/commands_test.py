"""`python -m tf_gpipe` knows its commands, and each of them has help."""

import contextlib
import importlib
import io
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe import __main__ as program
from tf_gpipe import commands

# The others are what commands share.
NAMES = [
    path.stem
    for path in sorted(pathlib.Path(commands.__path__[0]).glob("*.py"))
    if "\ndef main(" in path.read_text()
]


def run(*argv):
    """Returns the exit status and what was printed, on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = program.main(argv)
        except SystemExit as e:
            status = e.code
    return status, out.getvalue(), err.getvalue()


class CommandsTest(parameterized.TestCase):
    @parameterized.parameters([[]], [["--help"]])
    def test_lists_every_command(self, argv):
        status, out, _ = run(*argv)
        self.assertEqual(status, 0)
        listed = [x.split()[0] for x in out.splitlines() if x.startswith("  ")]
        self.assertContainsSubset(NAMES, listed)
        self.assertEqual(NAMES, [*program.COMMANDS])

    @parameterized.parameters(*NAMES)
    def test_help(self, name):
        status, out, _ = run(name, "--help")
        self.assertEqual(status, 0)
        self.assertStartsWith(out, f"usage: python -m tf_gpipe {name} ")
        module = importlib.import_module(f"tf_gpipe.commands.{name}")
        self.assertIn(module.__doc__.splitlines()[0], out)

    def test_workers_for_a_program_that_cannot_start(self):
        status, _, err = run("workers", "1", "/no/such/program")
        self.assertEqual(status, 2)
        self.assertIn("Received: /no/such/program", err.splitlines()[-1])

    def test_unknown_command(self):
        status, out, err = run("train", "--help")
        self.assertEqual(status, 2)
        self.assertEmpty(out)
        self.assertEqual(
            err,
            "tf_gpipe: unknown command. Expected one of: plan, supervise, "
            "timeline, verify, worker, workers. Received: train\n",
        )

    def test_no_command_is_imported_before_it_is_known(self):
        code = (
            "import runpy, sys; sys.argv = ['tf_gpipe'];\n"
            "try: runpy.run_module('tf_gpipe', run_name='__main__')\n"
            "except SystemExit: pass\n"
            "print([x for x in sys.modules if 'commands.' in x])"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        )
        self.assertEqual(result.stdout.splitlines()[-1], "[]", result.stderr)


if __name__ == "__main__":
    absltest.main()
