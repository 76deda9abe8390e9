"""The GPU kit runs on a CPU, and reports planted faults."""

import contextlib
import io
import json
import pathlib
import subprocess

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.devices import KIND
from tests.tools import gpu_faults
from tf_gpipe.commands import models
from tools.gpu import __main__ as command
from tools.gpu import contract
from tools.gpu import task_times
from tools.gpu.checking import Check
from tools.gpu.checking import Failed

SCRIPT = pathlib.Path(__file__).parents[2] / "tools/gpu/check.sh"
# These take minutes on a CPU, and other tests train their models.
LONG = {f"contract_{name}" for name in contract.RUNS if name != "resnet_small"}
# What cannot run on a CPU.
SKIPPED = {
    "gpu_seen",
    "memory_transformer_lm",
    "memory_amoebanet_d",
    *(f"table1_{name}" for name in command._TABLE1),
    "tests",
}


def check(name, *arguments, seconds=60):
    """Returns the check that runs a function of `gpu_faults`."""
    return Check(name, f"{gpu_faults.__name__}:{name}", seconds, arguments)


def reported(checks, cpu=True):
    """Returns the exit status, and the printed results by check."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        status = command.report(checks, cpu)
    lines = map(json.loads, stdout.getvalue().splitlines())
    return status, {line["check"]: line for line in lines}


class Fault(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)

    def compute_output_shape(self, input_shape):
        return input_shape


class GpuCheckTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.slow
    def test_on_a_cpu(self):
        names = [x.name for x in command.CHECKS]
        self.assertContainsSubset(LONG | SKIPPED, names)
        names = [name for name in names if name not in LONG]
        result = subprocess.run(
            ["bash", str(SCRIPT), "--cpu", "--only", *names],
            capture_output=True,
            text=True,
        )
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual([line["check"] for line in lines], names)
        for line in lines:
            skipped = line["check"] in SKIPPED
            self.assertEqual(line["status"], "skipped" if skipped else "ok")
            if skipped:
                self.assertNotEmpty(line["value"]["why"])

    @pytest.mark.slow
    def test_planted_faults(self):
        status, lines = reported(
            [
                check("differs"),
                check("raises"),
                check("crashes"),
                check("hangs", seconds=10),
                check("takes_all_memory"),
                check("skips"),
                check("holds", 3),
            ]
        )
        self.assertEqual(status, 1)
        self.assertEqual(
            [line["status"] for line in lines.values()],
            ["failed"] * 5 + ["skipped", "ok"],
        )
        whys = {name: line["value"].get("why") for name, line in lines.items()}
        self.assertEqual(lines["differs"]["value"]["difference"], 0.5)
        self.assertEqual(whys["raises"], "KeyError: 'x'")
        self.assertEqual(whys["crashes"], "the process ended with status -6")
        self.assertEqual(whys["hangs"], "not done within 10 seconds")
        self.assertEqual(lines["hangs"]["value"]["printed"], ["still there"])
        self.assertIn("in hangs", lines["hangs"]["value"]["where"][0])
        self.assertIn("MemoryError", whys["takes_all_memory"])
        self.assertEqual(whys["skips"], "needs a GPU")
        self.assertEqual(lines["holds"]["value"], {"number": 3, "cpu": True})

    @pytest.mark.slow
    def test_nothing_is_skipped_on_a_gpu(self):
        status, lines = reported([check("skips"), check("holds", 3)], cpu=False)
        self.assertEqual(status, 1)
        self.assertEqual(lines["skips"]["status"], "failed")
        self.assertEqual(lines["holds"]["status"], "ok")

    @pytest.mark.slow
    def test_a_fault_in_a_model(self):
        if KIND == "GPU":
            self.skipTest("Checks would split a GPU that is split.")
        self.addCleanup(setattr, models, "pipelined", models.pipelined)
        models.pipelined = lambda *_, **__: tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), keras.layers.Dense(4), Fault()],
            num_stages=2,
            num_micro_batches=4,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            with self.assertRaisesRegex(Failed, "differ") as raised:
                contract.contract(True, "resnet_small")
        for result in raised.exception.value["results"].values():
            self.assertFalse(result["ok"], result)
            self.assertStartsWith(result["first_layer"], "fault")

    def test_spans(self):
        self.assertEqual(task_times._length([(0, 2), (1, 3), (5, 6)]), 4)
        self.assertEqual(
            task_times._overlap([(0, 4), (6, 8)], [(1, 2), (1, 3), (7, 9)]), 3
        )


if __name__ == "__main__":
    tf.test.main()
