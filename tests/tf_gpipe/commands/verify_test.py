"""The command prints what `verify` finds; its exit status says it, too."""

import contextlib
import io
import json
import subprocess

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import quick_python
from tf_gpipe.commands import verify as command

SMALL = "--model_args=num_filters=8,num_blocks=1,input_shape=(8,8,3)"


def run(*args):
    """Runs the command in this process: importing TensorFlow takes seconds."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        status = command.main(list(args))
    return status, stdout.getvalue()


class VerifyTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.slow
    def test_command(self):
        result = subprocess.run(
            [
                *quick_python.command(),
                "-m",
                "tf_gpipe",
                "verify",
                "--num_stages=2",
                "--num_micro_batches=1",
                "--schedule=gpipe",
                "--remat=never",
                "--batch_size=4",
                "--json",
                SMALL,
            ],
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        text, last = result.stdout.rstrip().rsplit("\n", 1)
        self.assertIn("The pipeline has the plain model's numbers", text)
        found = json.loads(last)
        self.assertTrue(found["ok"])
        self.assertIsNone(found["first_layer"])
        self.assertLess(found["worst"]["gradient"]["difference"], 1e-4)

    @pytest.mark.slow
    def test_a_functional_model_with_tokens(self):
        status, text = run(
            "--model=transformer_nmt",
            "--model_args=num_layers=1,ffn_dim=8,num_heads=2,dim=8,"
            "vocabulary=11,head_size=4",
            "--num_micro_batches=2",
            "--batch_size=4",
        )
        self.assertEqual(status, 0, text)

    @pytest.mark.slow
    def test_fewer_devices_than_there_are(self):
        # On four of the devices, two micro-batches would be too few.
        status, text = run(
            "--num_stages=4",
            "--num_devices=2",
            "--schedule=interleaved",
            "--num_micro_batches=2",
            "--batch_size=4",
            SMALL,
        )
        self.assertEqual(status, 0, text)

    @parameterized.parameters(
        (["--batch_size=0"], "--batch_size: not a positive integer: '0'"),
        (["--model=x"], "or package.module:function. Received: 'x'"),
        (["--model_args=x=3"], "Unknown hyper-parameters of model"),
        (["--num_devices=2"], "--num_devices is for --schedule=interleaved"),
        (["--optimizer=x", SMALL], "be a Keras optimizer, or the name of one"),
        (["--optimizer=LossScaleOptimizer", SMALL], "be a Keras optimizer"),
        (["--dtype_policy=x"], "Cannot convert 'x'"),
    )
    def test_refuses(self, args, message):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            with self.assertRaises(SystemExit) as raised:
                command.main(args)
        self.assertEqual(raised.exception.code, 2)
        self.assertIn(message, stderr.getvalue().splitlines()[-1])


if __name__ == "__main__":
    tf.test.main()
