"""The benchmarks run, and say what they promise to."""

import json
import subprocess
import sys

import pytest
import tensorflow as tf
from absl.testing import parameterized


def benchmark(*args):
    """Runs a benchmark with `--json` and returns the object it prints."""
    result = subprocess.run(
        [sys.executable, "-m", "tools.benchmark", *args, "--json"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found.pop("machine")["tensorflow"] == tf.__version__
    return found


class BenchmarkTest(parameterized.TestCase, tf.test.TestCase):
    @pytest.mark.slow
    def test_memory(self):
        peaks = benchmark("memory")["bytes"]
        self.assertLess(peaks["always"], peaks["never"] / 2)
        # All but one of eight micro-batches are recomputed.
        self.assertLess(peaks["except_last"], peaks["never"] / 2)
        self.assertLess(peaks["always"], peaks["except_last"])

    @pytest.mark.slow
    def test_trace(self):
        found = benchmark(
            "trace",
            "--num_stages=2",
            "--num_micro_batches=2",
            "--num_blocks=2",
            "--batch_size=2",
            "--num_repeats=1",
        )
        self.assertAllClose(found["ratio"], found["tf_gpipe"] / found["keras"])

    @pytest.mark.slow
    def test_pipeline(self):
        found = benchmark(
            "pipeline",
            "--num_micro_batches=4",
            "--batch_size=8",
            "--num_steps=1",
            "--num_repeats=1",
        )
        self.assertAllClose(found["ideal"], 2 * 4 / 5)
        self.assertAllClose(
            found["fraction"], found["speedup"] / found["ideal"]
        )
        self.assertLen(found["samples_per_second"], 2)

    @pytest.mark.slow
    def test_simulated(self):
        found = benchmark(
            "pipeline",
            "--workers",
            "--simulated",
            "--num_stages=3",
            "--num_micro_batches=6",
            "--batch_size=6",
            "--num_steps=1",
            "--num_repeats=1",
        )
        self.assertAllClose(found["ideal"], 3 * 6 / 8)
        self.assertAllClose(
            found["fraction"], found["speedup"] / found["ideal"]
        )

    @parameterized.product(
        # Large enough for the working memory of convolutions, some 32 MiB
        # each, to be small beside the activations.
        workload=(("transformer", 256), ("convolutional", 1024)),
        remat=("always", "never"),
    )
    @pytest.mark.slow
    def test_plan(self, workload, remat):
        name, batch_size = workload
        found = benchmark(
            "plan",
            f"--workload={name}",
            f"--remat={remat}",
            f"--batch_size={batch_size}",
        )
        self.assertAllClose(found["measured"], found["planned"], rtol=0.2)

    @pytest.mark.slow
    def test_step(self):
        found = benchmark("step", "--num_steps=1", "--num_repeats=1")
        self.assertCountEqual(found["ratios"], ["transformer", "convolutional"])

    def test_more_workers_than_cores(self):
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "tools.benchmark",
                "pipeline",
                "--num_stages=999",
            ],
            capture_output=True,
            text=True,
        )
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("999 workers", result.stderr)
