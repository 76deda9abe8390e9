"""The command `timeline` shows what the library draws."""

import contextlib
import io
import json
import os
import subprocess
import tempfile

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import quick_python
from tf_gpipe.commands import timeline as command


def timeline(*args):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [*quick_python.command(), "-m", "tf_gpipe", "timeline", *args],
        capture_output=True,
        text=True,
    )


def found_here(*args):
    """Returns the JSON that the command prints, run in this process.

    Another process would need seconds to import TensorFlow.
    """
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        command.main([*args, "--json"])
    return json.loads(stdout.getvalue().splitlines()[-1])


class TimelineTest(parameterized.TestCase):
    def test_chart_and_files(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        trace = os.path.join(folder, "a.json")
        picture = os.path.join(folder, "a.png")
        result = timeline(
            "--num_stages=2",
            "--num_micro_batches=2",
            "--schedule=gpipe",
            "--width=46",
            f"--trace={trace}",
            f"--picture={picture}",
            "--json",
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        *lines, last = result.stdout.splitlines()
        self.assertEqual(
            lines,
            [
                "device 0  F0-F1--R1-..........B1----R0-B0-----",
                "device 1  ...F0--F1-R1-B1-----R0-B0----.......",
                "makespan 11, bubble 27.3%",
                "F forward, R recompute, B backward,",
                "with the micro-batch; . idle",
                "most micro-batches kept, by stage: 2, 2",
            ],
        )
        self.assertEqual(
            json.loads(last),
            {
                "makespan": 11.0,
                "busy": [8.0, 8.0],
                "bubble": 0.272727272727,
                "peak_micro_batches": [2, 2],
            },
        )
        with open(trace) as f:
            events = json.load(f)["traceEvents"]
        # The process's name; each thread's name and place; two tasks of each of
        # three kinds a device.
        self.assertLen(events, 1 + 2 * 2 + 2 * 3 * 2)
        with open(picture, "rb") as f:
            self.assertEqual(f.read(4), b"\x89PNG")

    def test_costs_of_each_stage(self):
        found = found_here(
            "--num_stages=4",
            "--num_micro_batches=2",
            "--schedule=interleaved",
            "--num_devices=2",
            "--remat=never",
            "--forward=1,2,3,4",
            "--backward=2",
            "--transfer=0,0.5,0",
        )
        self.assertEqual(found["busy"], [16.0, 20.0])
        self.assertEqual(found["peak_micro_batches"], [2, 2, 2, 1])

    @parameterized.parameters(
        (["--num_stages=0"], "--num_stages: not a positive integer: '0'"),
        (["--schedule=x"], "--schedule: invalid choice: 'x'"),
        (["--num_devices=2"], "--num_devices is for --schedule=interleaved"),
        (
            ["--schedule=interleaved", "--num_devices=3"],
            "`num_stages` to be a multiple",
        ),
        (["--model_args=x=1"], "--model_args needs --model"),
        (["--workers"], "--workers needs --model"),
        (["--batch_size=8"], "--batch_size needs --model"),
        (
            ["--model=resnet_small", "--transfer=1"],
            "--transfer is for a step on paper",
        ),
        (["--model=resnet_small", "--num_steps=2"], "must be at least 3"),
        (["--forward=1,2"], "`forward` must be a number or a list of 4"),
        (["--backward=1,,2"], "--backward: not a number"),
        (["--transfer=inf"], "--transfer: not a number"),
        (["--forward=nan"], "--forward: not a number"),
        # Sums of such numbers would be infinite.
        (["--forward=1e308"], "--forward: not a number"),
        # The columns of a unit of such times would be.
        (["--forward=1e-320"], "--forward: not a number"),
        (["--transfer=0,1e-310,1"], "--transfer: not a number"),
        (["--picture=a.unknown"], "Format 'unknown' is not supported"),
        (["--trace=/no/such/folder/a.json"], "No such file or directory"),
    )
    def test_refuses(self, args, message):
        # In this process: another one would need seconds to import TensorFlow.
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            with self.assertRaises(SystemExit) as raised:
                command.main(args)
        self.assertEqual(raised.exception.code, 2)
        self.assertIn(message, stderr.getvalue().splitlines()[-1])

    def test_refuses_in_one_line(self):
        result = timeline("--num_devices=2")
        self.assertEqual(result.returncode, 2)
        self.assertIn("error: --num_devices", result.stderr.splitlines()[-1])
        self.assertNotIn("Traceback", result.stderr)
        self.assertEmpty(result.stdout)

    @pytest.mark.slow
    def test_tokens_and_hyper_parameters(self):
        found = found_here(
            "--model=transformer_lm",
            "--model_args=num_layers=1,dim=8,ffn_dim=16,num_heads=2,"
            "vocabulary=5,length=4",
            "--num_stages=2",
            "--num_micro_batches=3",
            "--batch_size=6",
            "--num_steps=3",
        )
        self.assertEqual(found["peak_micro_batches"], [2, 1])

    @pytest.mark.slow
    def test_functional_model(self):
        found = found_here(
            "--model=transformer_nmt",
            "--model_args=num_layers=1,dim=8,ffn_dim=16,num_heads=2,"
            "vocabulary=5,source_length=4,target_length=4",
            "--num_stages=3",
            "--num_micro_batches=4",
            "--batch_size=8",
            "--num_steps=3",
        )
        self.assertEqual(found["peak_micro_batches"], [3, 2, 1])

    @pytest.mark.slow
    def test_workers(self):
        result = timeline(
            "--model=resnet_small",
            "--model_args=num_blocks=1,num_filters=4",
            "--workers",
            "--num_stages=2",
            "--num_micro_batches=3",
            "--batch_size=6",
            "--num_steps=3",
            "--width=100",
            "--json",
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        for task, line in enumerate(lines[:2]):
            self.assertStartsWith(line, f"worker:{task}/CPU:0")
        self.assertEqual(json.loads(lines[-1])["peak_micro_batches"], [2, 1])


if __name__ == "__main__":
    absltest.main()
