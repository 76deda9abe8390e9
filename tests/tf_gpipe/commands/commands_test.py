"""`python -m tf_gpipe` knows its commands, and each of them has help."""

import contextlib
import importlib
import io
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import keras
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import model_zoo
import tf_gpipe
from tf_gpipe import __main__ as program
from tf_gpipe import commands
from tf_gpipe.commands import flags

# The other files hold what commands share.
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

    @parameterized.parameters("supervise", "workers", "tune")
    def test_ctrl_c(self, name):
        """Whatever it does then, such as to start workers."""
        with mock.patch.object(
            importlib.import_module(f"tf_gpipe.commands.{name}"),
            "main",
            side_effect=KeyboardInterrupt,
        ):
            status, out, err = run(name)
        self.assertEqual(status, 130)
        self.assertEqual((out, err), ("", "tf_gpipe: stopped by Ctrl-C.\n"))

    def test_unknown_command(self):
        status, out, err = run("train", "--help")
        self.assertEqual(status, 2)
        self.assertEmpty(out)
        self.assertEqual(
            err,
            "tf_gpipe: unknown command. Expected one of: plan, supervise, "
            "timeline, tune, verify, worker, workers. Received: train\n",
        )

    @parameterized.parameters(
        (["timelin"], "Received: timelin. Did you mean timeline?"),
        (["plan", "--nmu_stages=2"], "--nmu_stages=2. Did you mean --num_sta"),
        (["tune", "--device_memry=1GB"], "Did you mean --device_memory?"),
        (["timeline", "--schedule=1f1"], "Did you mean 1f1b?"),
        (["plan", "--remat=alwyas"], "Did you mean always?"),
        (["verify", "--model=resnet_smal"], "Did you mean resnet_small?"),
        (["worker", "--port=0", "--bnd=::1"], "Did you mean --bind?"),
        (["worker", "--prt=1"], "Did you mean --port?"),
        (["worker"], "are required: --port"),
        (["plan", "--optimizer=adm"], "Did you mean adam?"),
        (["plan", "--balance=flop"], "Did you mean flops?"),
        (["supervise", "--restart", "3"], "a command to run is needed"),
        (["plan", "--xyz"], "unrecognized arguments: --xyz"),
        # Not tried, as so many processes would halt the host.
        (["workers", "20000", "true"], "at most 256 workers. Received: 20000"),
        (["workers", "257", "true"], "at most 256 workers"),
    )
    def test_near_miss(self, argv, message):
        """The error is one line."""
        status, out, err = run(*argv)
        self.assertEqual(status, 2)
        self.assertEmpty(out)
        (line,) = err.splitlines()
        self.assertIn(message, line)

    def test_models_of_the_zoo(self):
        self.assertEqual(list(flags.ZOO), model_zoo.names())

    @parameterized.parameters([[]], *([[x]] for x in NAMES))
    def test_help_imports_no_tensorflow(self, argv):
        """That would take seconds. `-X importtime` prints all imports."""
        result = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "tf_gpipe"]
            + [*argv, "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        imported = {
            line.rpartition("|")[2].strip()
            for line in result.stderr.splitlines()
        }
        self.assertContainsSubset(
            {"tf_gpipe", "argparse"} if argv else {"tf_gpipe"}, imported
        )
        self.assertNoCommonElements({"tensorflow", "keras", "numpy"}, imported)

    @pytest.mark.slow
    def test_nothing_that_tensorflow_logs(self):
        result = subprocess.run(
            [sys.executable, "-m", "tf_gpipe", "plan"]
            + ["--model_args=num_blocks=1,num_filters=2"],
            capture_output=True,
            text=True,
            check=True,
            env={
                k: v for k, v in os.environ.items() if not k.startswith("TF_")
            },
        )
        self.assertEqual(result.stderr, "")
        self.assertIn("Parameters", result.stdout)

    @pytest.mark.slow
    def test_classes_are_found_where_it_is_no_command(self):
        """`import tf_gpipe` alone lets Keras find its classes."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        path = os.path.join(folder, "a.keras")
        tf_gpipe.PipelinedSequential(
            [keras.Input((2,)), keras.layers.Dense(1)], num_stages=1
        ).save(path)
        code = f"import tf_gpipe, keras; keras.models.load_model({path!r})"
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.slow
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
