"""The command `tune` prints the plan that it chooses, and saves it."""

import contextlib
import io
import os
import tempfile
from unittest import mock

import keras
import tensorflow as tf

from tf_gpipe.commands import tune as command
from tf_gpipe.planning.plans import Plan

ARGS = [
    "--model=resnet_small",
    "--model_args=num_filters=8,num_blocks=2",
    "--num_devices=2",
    "--batch_size=8",
    "--num_stages=2",
    "--schedule=1f1b",
    "--remat=never",
]


def make():
    inputs = keras.Input((None, 2))
    return [inputs, keras.layers.Dense(2), keras.layers.Dense(2)]


def run(*args):
    """Runs the command in this process: importing TensorFlow takes seconds."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        command.main([*ARGS, *args])
    return stdout.getvalue()


class TuneTest(tf.test.TestCase):
    def test_save(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "plan.json")
            text = run(f"--save={path}")
            self.assertEqual(text, str(Plan.load(path)))
            self.assertEqual(os.listdir(directory), ["plan.json"])

    def test_a_plan_that_cannot_be_saved_is_not_made(self):
        with (
            mock.patch("tf_gpipe.tuning.tune.tune") as tuned,
            contextlib.redirect_stderr(io.StringIO()) as stderr,
            self.assertRaises(SystemExit),
        ):
            run("--save=/no/such/directory/plan.json")
        tuned.assert_not_called()
        self.assertIn("`save` must be the path", stderr.getvalue())

    def test_a_model_of_open_length(self):
        model = (
            "--model=tests.tf_gpipe.commands.tune_test:make",
            "--model_args=",
        )
        found = run(*model, "--length=4", "--bandwidth=1e10")
        self.assertIn("schedule 1f1b", found)
        with (
            contextlib.redirect_stderr(io.StringIO()) as stderr,
            self.assertRaises(SystemExit),
        ):
            run(*model)
        self.assertIn("Give a --length", stderr.getvalue())

    def test_it_is_printed_before_it_is_saved(self):
        stdout = io.StringIO()
        with (
            tempfile.TemporaryDirectory() as directory,
            mock.patch.object(Plan, "save", side_effect=ValueError("full")),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(io.StringIO()) as stderr,
            self.assertRaises(SystemExit),
        ):
            command.main([*ARGS, f"--save={directory}/plan.json"])
        self.assertIn("schedule 1f1b", stdout.getvalue())
        self.assertIn("full", stderr.getvalue())


if __name__ == "__main__":
    tf.test.main()
