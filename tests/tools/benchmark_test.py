"""The benchmarks run, and say what they promise to."""

import json
import os
import subprocess
import sys
import tempfile

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

    @parameterized.product(
        # With the MiB that operations need while they run, which the plan
        # leaves out: those of convolutions about as much as the last cache.
        workload=(("transformer", 256, 0), ("convolutional", 1024, 96)),
    )
    @pytest.mark.slow
    def test_memory(self, workload):
        name, batch_size, working = workload
        rows = benchmark(
            "memory",
            f"--workload={name}",
            "--schedule=1f1b",
            f"--batch_size={batch_size}",
        )["rows"]
        for row in rows:
            self.assertBetween(
                row["measured"],
                0.85 * row["planned"],
                1.15 * row["planned"] + working * 2**20,
            )
        # The last stage of 1F1B recomputes nothing.
        always, _, never, _ = rows
        self.assertLess(always["measured"], 0.8 * never["measured"])

    @pytest.mark.slow
    def test_breakdown(self):
        picture = os.path.join(
            self.enterContext(tempfile.TemporaryDirectory()), "a.png"
        )
        found = benchmark(
            "breakdown",
            "--on=local",
            "--workload=convolutional",
            "--num_micro_batches=4",
            "--batch_size=8",
            "--num_steps=3",
            f"--plot={picture}",
        )
        seconds = found["seconds"]
        # Medians, which need not sum to the median.
        self.assertAllClose(sum(seconds.values()), found["step"], rtol=0.5)
        for name in ("forward", "recompute", "backward"):
            self.assertGreater(seconds[name], 0)
        self.assertEqual(seconds["weights"], 0)
        self.assertTrue(os.path.getsize(picture))

    @parameterized.parameters("table2", "table3")
    @pytest.mark.slow
    def test_tables(self, command):
        model = {"table2": "Transformer-48", "table3": "Transformer-24"}
        rows = benchmark(
            command,
            f"--model={model[command]}",
            "--wait=2",
            "--num_repeats=1",
        )["rows"]
        self.assertEqual(rows[0]["measured"], 1.0)
        self.assertEqual([row["K"] for row in rows[:3]], [2, 4, 8])
        ideals = {
            "table2": 8 * 32 / 39,
            "table3": (8 * 32 / 39) / (2 * 32 / 33),
        }
        self.assertAllClose(rows[-1]["ideal"], ideals[command])

    @pytest.mark.slow
    def test_peers(self):
        found = benchmark(
            "peers",
            "--torch=/usr/bin/false",
            "--workload=convolutional",
            "--num_micro_batches=2",
            "--batch_size=4",
            "--num_steps=1",
            "--num_repeats=1",
        )
        self.assertEqual(
            [(row["library"], row["schedule"]) for row in found["rows"]][:5],
            [
                ("tf_gpipe", "one core"),
                ("tf_gpipe", "1f1b"),
                ("tf_gpipe", "eager_1f1b"),
                ("tf_gpipe", "zero_bubble"),
                ("Keras fit", "one core"),
            ],
        )

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
