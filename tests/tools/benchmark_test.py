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
        one, two = found["rows"]
        self.assertEqual((one["num_stages"], one["speedup"]), (1, 1.0))
        self.assertAllClose(two["ideal"], 2 * 4 / 5)
        self.assertAllClose(two["simulated"], 2 * 4 / 5)
        self.assertAllClose(two["fraction"], two["speedup"] / two["ideal"])

    @pytest.mark.slow
    def test_simulated(self):
        found = benchmark(
            "pipeline",
            "--on=simulated",
            "--wait=1",
            "--num_stages=2,3",
            "--num_micro_batches=6",
            "--schedule=gpipe,1f1b",
            "--remat=always",
            "--batch_size=6",
            "--num_steps=1",
            "--num_repeats=1",
        )
        self.assertEqual(
            [(row["num_stages"], row["schedule"]) for row in found["rows"][1:]],
            [(2, "gpipe"), (2, "1f1b"), (3, "gpipe"), (3, "1f1b")],
        )
        for row in found["rows"][1:]:
            ideal = row["num_stages"] * 6 / (5 + row["num_stages"]) * 3 / 4
            self.assertAllClose(row["ideal"], ideal)

    def test_local(self):
        found = benchmark(
            "pipeline",
            "--on=local",
            "--workload=convolutional",
            "--num_micro_batches=2",
            "--batch_size=4",
            "--num_steps=1",
            "--num_repeats=1",
        )
        self.assertLen(found["rows"], 2)

    def test_flags_that_do_not_fit(self):
        for flags in (
            ["--on=simulated", "--workload=transformer"],
            ["--wait=1"],
            ["--schedule=gpipe,x"],
            ["--num_stages=2,0"],
        ):
            result = subprocess.run(
                [sys.executable, "-m", "tools.benchmark", "pipeline", *flags],
                capture_output=True,
                text=True,
            )
            self.assertEqual(result.returncode, 2)
            self.assertIn(flags[-1].split("=")[0], result.stderr)

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
