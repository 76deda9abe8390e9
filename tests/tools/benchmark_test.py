"""The benchmarks run, and say what they promise to."""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import types
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import quick_python
from tools import worker_usage
from tools.benchmark import __main__ as command
from tools.benchmark import device_step
from tools.benchmark import fresh
from tools.benchmark import memory
from tools.benchmark import one_device
from tools.benchmark import paper_models
from tools.benchmark import peers
from tools.benchmark import plan
from tools.benchmark import planned_models
from tools.benchmark import report
from tools.benchmark import table2
from tools.benchmark import table3
from tools.benchmark import timed_runs
from tools.benchmark import timing
from tools.benchmark import workloads

# Small models, which are traced fast.
SMALL = {
    "transformer": functools.partial(workloads.transformer, 1, 16, 8),
    "convolutional": functools.partial(workloads.convolutional, 2, 4, 8),
}


def benchmark(*args):
    """Runs a benchmark with `--json` and returns the object it prints.

    It runs in a process of its own, which connects to workers.
    """
    result = subprocess.run(
        [*quick_python.command(), "-m", "tools.benchmark", *args, "--json"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    # TensorFlow prints this if workers end before models are deleted.
    assert "remotely" not in result.stderr, result.stderr
    return _found(result.stdout)


def benchmark_here(*args):
    """Like `benchmark`, in this process: importing TensorFlow takes seconds."""
    return _found(printed_here(*args, "--json"))


def printed_here(*args):
    """Returns what the command prints to stdout."""
    with (
        mock.patch.object(sys, "argv", ["benchmark", *args]),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
    ):
        command.main()
    return stdout.getvalue()


def only_here(*args):
    """Returns the object that one case, run by itself, prints."""
    return json.loads(printed_here(*args).splitlines()[-1])


def _found(stdout):
    found = json.loads(stdout.splitlines()[-1])
    assert found.pop("machine")["tensorflow"] == tf.__version__
    return found


def devices_here(num_workers, **kwargs):
    """Like `workers.connected`, with devices of this process.

    Each worker would need seconds to import TensorFlow.
    """
    process = types.SimpleNamespace(pid=os.getpid())
    return [
        types.SimpleNamespace(device=name, process=process)
        for name in [f"CPU:{k}" for k in range(num_workers)]
    ]


class BenchmarkTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters((["--help"],), (["one_device", "--help"],))
    def test_help(self, args):
        with (
            mock.patch.object(sys, "argv", ["benchmark", *args]),
            contextlib.redirect_stdout(io.StringIO()) as stdout,
            self.assertRaises(SystemExit) as ended,
        ):
            command.main()
        self.assertEqual(ended.exception.code, 0)
        self.assertIn("largest batch, image or", stdout.getvalue())

    @parameterized.parameters(
        ("trace --batch_size=4 --num_micro_batches=8", "has fewer rows than"),
        ("pipeline --batch_size=4 --num_micro_batches=8", "has fewer rows"),
        ("pipeline --num_devices=2", "--num_devices is not for --schedule"),
        ("pipeline --num_stages=3 --schedule=zb_v", "must be even"),
        ("pipeline --num_stages=999", "999 workers"),
        ("peers --batch_size=4", "has fewer rows than"),
        ("peers --results=x", "--results is for --all"),
        ("peers --torch=/nope", "No such file"),
        ("trace --only=keras --plot=x.png", "--plot is not for --only"),
        (
            "trace --only=tf_gpipe --num_stages=8 --num_blocks=1",
            "num_stages=8",
        ),
        ("trace --only=tf_gpipe --num_stages=999", "999 devices are needed"),
        ("breakdown --on=local --num_stages=3 --schedule=zb_v", "must be even"),
        ("memory --num_devices=999", "999 workers"),
        ("one_device --case=unet_batch --results=/", "Is a directory"),
    )
    def test_refused(self, line, message):
        with (
            contextlib.redirect_stderr(io.StringIO()) as stderr,
            self.assertRaises(SystemExit) as ended,
        ):
            printed_here(*line.split())
        self.assertEqual(ended.exception.code, 2)
        self.assertIn(message, stderr.getvalue())

    def test_an_error_that_is_no_flag_s(self):
        """It has a traceback, which tells where it comes from."""
        with (
            mock.patch.object(workloads, "data", side_effect=ValueError("x")),
            self.assertRaisesRegex(ValueError, "x"),
        ):
            printed_here("trace", "--only=keras")

    @parameterized.parameters(
        ("transformer", "sequential"), ("dense", "functional")
    )
    @pytest.mark.slow
    def test_trace(self, workload, model):
        found = benchmark_here(
            "trace",
            f"--workload={workload}",
            f"--model={model}",
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
            "--workload=convolutional",
            "--num_micro_batches=2",
            "--batch_size=4",
            "--num_steps=1",
            "--num_repeats=1",
        )
        one, two = found["rows"]
        self.assertEqual((one["num_stages"], one["speedup"]), (1, 1.0))
        self.assertAllClose(two["ideal"], 2 * 2 / 3)
        self.assertAllClose(two["simulated"], 2 * 2 / 3)
        self.assertAllClose(two["fraction"], two["speedup"] / two["ideal"])

    @pytest.mark.slow
    def test_simulated(self):
        found = benchmark(
            "pipeline",
            "--on=simulated",
            "--wait=0.1",
            "--num_stages=2,3",
            "--num_micro_batches=3",
            "--schedule=gpipe,1f1b",
            "--remat=always,auto",
            "--memory_limit=0.75",
            "--num_layers=8",
            "--batch_size=3",
            "--num_steps=1",
            "--num_repeats=1",
        )
        always, auto = found["rows"][1::2], found["rows"][2::2]
        self.assertEqual(
            [(row["num_stages"], row["schedule"]) for row in always],
            [(2, "gpipe"), (2, "1f1b"), (3, "gpipe"), (3, "1f1b")],
        )
        for row, some in zip(always, auto, strict=True):
            self.assertEqual(
                (some["remat"], some["memory_limit"]), ("auto", 0.75)
            )
            ideal = row["num_stages"] * 3 / (2 + row["num_stages"]) * 3 / 4
            self.assertAllClose(row["ideal"], ideal)
            self.assertGreater(some["simulated"], ideal)

    @mock.patch.dict(workloads.WORKLOADS, SMALL)
    def test_local(self):
        found = benchmark_here(
            "pipeline",
            "--on=local",
            "--workload=convolutional",
            "--num_micro_batches=2",
            "--batch_size=4",
            "--num_steps=1",
            "--num_repeats=1",
        )
        self.assertLen(found["rows"], 2)

    @mock.patch.dict(workloads.WORKLOADS, SMALL)
    @pytest.mark.slow
    def test_replicas(self):
        one, alone, both = benchmark_here(
            "pipeline",
            "--on=local",
            "--workload=convolutional",
            "--num_replicas=1,2",
            "--num_micro_batches=2",
            "--batch_size=4",
            "--num_steps=1",
            "--num_repeats=1",
        )["rows"]
        copies = [x["num_replicas"] for x in (one, alone, both)]
        self.assertEqual(copies, [1, 1, 2])
        for name in ("ideal", "simulated"):
            self.assertAllClose(both[name], 2 * alone[name])
        for row in (alone, both):
            speedup = row["samples_per_second"] / one["samples_per_second"]
            self.assertAllClose(row["speedup"], speedup)

    def test_a_run_measures_whole_executions(self):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", steps_per_execution=2)
        data = tf.ones((4, 2))
        run = timed_runs.Run(model, data, data, [], 3)
        self.assertGreater(run(), 0)
        self.assertEqual(run.num_steps, 4)
        self.assertEqual(model.optimizer.iterations, 4)
        self.assertEqual(run.cores, [0])
        self.assertLen(run.client, 1)

    def test_numbers_are_read_around_the_steps(self):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        read = []

        def count():
            read.append(int(model.optimizer.iterations))
            return [read[-1]]

        data = tf.ones((4, 2))
        self.assertEqual(timing.used(model, data, data, 3, count), [3])
        self.assertEqual(read, [0, 1, 2, 3])

    @parameterized.parameters(
        ("local", "2,3", "1 and another one"),
        ("simulated", "1,2,4", "1 and another one"),
        ("workers", "2", "needs --on=local or --on=simulated"),
    )
    def test_replicas_that_no_strategy_has(self, where, numbers, message):
        flags = (f"--on={where}", f"--num_replicas={numbers}")
        with (
            contextlib.redirect_stderr(io.StringIO()) as stderr,
            self.assertRaises(SystemExit),
        ):
            benchmark_here("pipeline", *flags)
        self.assertIn(message, stderr.getvalue())

    @mock.patch.dict(workloads.WORKLOADS, SMALL)
    @pytest.mark.slow
    def test_one_stage_with_xla(self):
        rows = benchmark_here(
            "pipeline",
            "--on=local",
            "--jit_compile",
            "--num_stages=1",
            "--num_micro_batches=1",
            "--batch_size=4",
            "--num_steps=1",
            "--num_repeats=1",
        )["rows"]
        # The baseline is without.
        self.assertEqual([x["jit_compile"] for x in rows], [False, True])

    @parameterized.product(
        # Workload, batch size, and the MiB that operations need while they run,
        # which the plan leaves out: for convolutions about as much as the
        # last-level cache has.
        workload=(("transformer", 96, 0), ("convolutional", 384, 96)),
    )
    @pytest.mark.slow
    def test_memory(self, workload):
        name, batch_size, working = workload
        rows = benchmark(
            "memory",
            f"--workload={name}",
            "--schedule=1f1b",
            # One more than the first stage may keep.
            "--num_micro_batches=3",
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

    @mock.patch.dict(
        workloads.WORKLOADS,
        transformer=functools.partial(workloads.transformer, 2, 16, 8),
    )
    @pytest.mark.slow
    def test_memory_of_as_many_devices(self):
        with mock.patch.multiple(
            memory,
            workers=types.SimpleNamespace(connected=devices_here),
            worker_usage=types.SimpleNamespace(
                GIVE_BACK={},
                peak_memory=lambda processes, _: [0] * len(processes),
            ),
        ):
            rows = benchmark_here(
                "memory",
                "--schedule=1f1b,v_half",
                "--remat=never",
                "--batch_size=8",
            )["rows"]
        self.assertEqual(
            [x["stages"] for x in rows], [[0], [1], [0, 3], [1, 2]]
        )

    @mock.patch.dict(
        workloads.WORKLOADS,
        convolutional=functools.partial(workloads.convolutional, 2),
    )
    def test_breakdown(self):
        picture = os.path.join(
            self.enterContext(tempfile.TemporaryDirectory()), "a.png"
        )
        found = benchmark_here(
            "breakdown",
            "--on=local",
            "--workload=convolutional",
            "--num_micro_batches=2",
            "--batch_size=8",
            "--num_steps=3",
            f"--plot={picture}",
        )
        seconds = found["seconds"]
        # These are medians, which need not sum to the median of the step.
        self.assertAllClose(sum(seconds.values()), found["step"], rtol=0.5)
        for name in ("forward", "recompute", "backward"):
            self.assertGreater(seconds[name], 0)
        self.assertEqual(seconds["weights"], 0)
        self.assertTrue(os.path.getsize(picture))

    @parameterized.parameters(
        (table2, "Transformer-48", (2, 4, 8), 8 * 2 / 9),
        # A link is a worker as well, and there are eight devices.
        (table3, "Transformer-24", (2, 4), (4 * 4 / 7) / (2 * 4 / 5)),
    )
    @pytest.mark.slow
    def test_tables(self, table, model, num_stages, ideal):
        num_micro_batches = {table2: (1, 2), table3: 4}
        self.enterContext(
            mock.patch.multiple(
                table,
                _NUM_STAGES=num_stages,
                _NUM_MICRO_BATCHES=num_micro_batches[table],
                _BATCH_SIZE=4,
                # `test_simulated` has such layers on workers.
                workers=types.SimpleNamespace(connected=devices_here),
            )
        )
        small = ("transformer_lm", {"num_layers": 8})
        self.enterContext(mock.patch.dict(paper_models.MODELS, {model: small}))
        paper_models.stages.cache_clear()
        self.addCleanup(paper_models.stages.cache_clear)
        rows = benchmark_here(
            table.__name__.rpartition(".")[-1],
            f"--model={model}",
            "--wait=0.1",
            "--num_repeats=1",
        )["rows"]
        self.assertEqual(rows[0]["measured"], 1.0)
        first = rows[: len(num_stages)]
        self.assertEqual([row["K"] for row in first], list(num_stages))
        self.assertAllClose(rows[-1]["ideal"], ideal)

    @pytest.mark.slow
    def test_generate(self):
        pytest.importorskip("keras_hub")
        flags = {
            "num_stages": "1,2",
            "num_layers": 2,
            "hidden_dim": 16,
            "length": 4,
            "num_repeats": 1,
        }
        rows = benchmark_here(
            "generate", *(f"--{k}={v}" for k, v in flags.items())
        )["rows"]
        names = [row["task"] for row in rows]
        self.assertEqual(names, ["plain", "K=1", "K=2", "loaded again"])
        self.assertTrue(all(row["same tokens"] for row in rows))

    @pytest.mark.slow
    def test_plan(self):
        def make():
            return keras.Sequential(workloads.convolutional(2, 4, 8))

        results = os.path.join(
            self.enterContext(tempfile.TemporaryDirectory()), "plan.json"
        )
        for patch in (
            mock.patch.dict(planned_models.MODELS, small=(make, 8, None, True)),
            mock.patch.object(plan.workers, "connected", devices_here),
        ):
            self.enterContext(patch)
        flags = (
            "plan",
            "--case=small",
            "--num_micro_batches=2",
            "--num_repeats=1",
            "--measuring_seconds=3",
            f"--results={results}",
        )
        found = {
            x: only_here(*flags, "--only=small", f"--quantity={x}")
            for x in ("memory", "time")
        }
        for rows in found.values():
            self.assertEqual([x["remat"] for x in rows], ["always", "never"])
        for row in found["memory"]:
            for name in ("planned_bytes", "measured_bytes"):
                self.assertLen(row[name], 2)
        for row in found["time"]:
            self.assertAllClose(
                row["time"], row["planned_seconds"] / row["measured_seconds"]
            )

        def measure(args, environment, *, quantity, **options):
            return found[quantity]

        with mock.patch.object(fresh, "measure", measure):
            self.assertLen(benchmark_here(*flags)["rows"], 2)
        with (
            contextlib.redirect_stderr(io.StringIO()) as stderr,
            self.assertRaises(SystemExit),
        ):
            only_here(*flags, "--only=small", "--num_stages=9")
        self.assertIn("no pipeline has --num_stages=9", stderr.getvalue())

    def test_kept_results(self):
        results = os.path.join(
            self.enterContext(tempfile.TemporaryDirectory()), "tune.json"
        )
        found = {
            **{"chosen": "", "seconds": 1.0, "best": "a", "others": {"a": 1.0}},
            **{"ratio": 1.0, "tuning_seconds": 1.0},
        }
        for flags, is_new in (
            (["--batch_size=8"], True),
            (["--batch_size=8"], False),
            (["--batch_size=4"], True),
            (["--batch_size=8", "--case=logical2_dense,logical4_dense"], True),
            (["--batch_size=4", "--case=logical2_dense"], False),
        ):
            # Each measurement would be a process.
            with mock.patch.object(
                fresh, "measure", return_value=found
            ) as measure:
                benchmark_here(
                    *("tune", "--case=logical2_dense", f"--results={results}"),
                    *flags,
                )
            self.assertEqual(measure.call_count, is_new)
        # On another machine all is measured again.
        other = {**report.machine(), "cores": 1000}
        with (
            mock.patch.object(report, "machine", return_value=other),
            mock.patch.object(fresh, "measure", return_value=found) as measure,
        ):
            benchmark_here(
                *("tune", "--case=logical2_dense", f"--results={results}"),
                "--batch_size=8",
            )
        measure.assert_called_once()
        self.assertLen(os.listdir(os.path.dirname(results)), 1)
        for damaged in ('{"a": 1', "3", "\x00"):
            with open(results, "w") as file:
                file.write(damaged)
            with (
                contextlib.redirect_stderr(io.StringIO()) as stderr,
                self.assertRaises(SystemExit),
            ):
                benchmark_here(
                    "tune", "--case=logical2_dense", f"--results={results}"
                )
            self.assertIn(f"{results}, which is damaged", stderr.getvalue())

    @pytest.mark.slow
    def test_auto_remat(self):
        def make():
            return keras.Sequential(workloads.convolutional(2, 4, 8))

        results = os.path.join(
            self.enterContext(tempfile.TemporaryDirectory()), "found.json"
        )
        self.enterContext(
            mock.patch.dict(planned_models.MODELS, small=(make, 64, None, True))
        )
        flags = (
            "auto_remat",
            "--case=small",
            "--num_micro_batches=2",
            f"--results={results}",
        )
        found = only_here(*flags, "--only=small")
        self.assertLen(found, 3)
        for row in found:
            self.assertLessEqual(row["planned"], row["limit"])
            self.assertGreater(row["measured"], 0)
            self.assertLess(row["difference"], 1e-4)
        self.assertGreater(found[0]["recomputed"], 0)
        kernels = {"small": "onednn", "amoebanet_d": "tensorflow"}
        with mock.patch.object(fresh, "measure", return_value=found) as measure:
            rows = benchmark_here(*flags, f"--case={','.join(kernels)}")["rows"]
        self.assertEqual({x["model"]: x["kernels"] for x in rows}, kernels)
        self.assertEqual(
            [x.args[1] for x in measure.call_args_list],
            [worker_usage.KERNELS[x] for x in kernels.values()],
        )

    @parameterized.parameters("plain", "remat", "accumulate", "tf_gpipe")
    @pytest.mark.slow
    def test_a_step_on_one_device(self, way):
        def make(size):
            return workloads.convolutional(2, 4, size)

        for name, value in {
            "MODELS": {"small": (make, 8, 4)},
            "CASES": {
                "small_batch": ("small", device_step.BATCH),
                "small_single": ("small", device_step.SINGLE),
            },
        }.items():
            self.enterContext(mock.patch.object(device_step, name, value))
        sizes = {"batch": 4, "single": 12}
        if way == "accumulate":
            del sizes["single"]  # One row cannot be split.
        for what, size in sizes.items():
            flags = (
                f"--case=small_{what}",
                f"--only=small_{what}",
                f"--way={way}",
                f"--size={size}",
                "--num_micro_batches=2",
            )
            found = only_here("one_device", *flags)
            self.assertGreater(found["fixed"], 0)
            self.assertGreater(found["bytes"], 0)
            self.assertGreater(found["cpu"], 0)

    def test_the_largest_on_one_device(self):
        needed = {"plain": 1.0, "remat": 0.8, "accumulate": 0.1}

        def planned(args, case, share, start):
            # Operations need more than the plan tells.
            return int((share * 256 - 10) / 0.025)

        def measure(args, environment, way, size, share=None, **kwargs):
            # In MiB; ten of them are fixed.
            used = 10 + size * needed.get(way, 0.03)
            if used > 400:
                used = math.nan  # The process was ended.
            return {
                "bytes": None if math.isnan(used) else used * 2**20,
                "fixed": 10 * 2**20,
                "seconds": 1.0,
                "cpu": 1.0,
            }

        results = os.path.join(
            self.enterContext(tempfile.TemporaryDirectory()), "found.json"
        )
        # Each measurement would be a process.
        with (
            mock.patch.object(fresh, "measure", measure),
            mock.patch.object(one_device, "_planned", planned),
        ):
            rows = benchmark_here(
                "one_device",
                "--case=unet_batch",
                "--ways=remat,accumulate,tf_gpipe",
                f"--results={results}",
            )["rows"]
        self.assertEqual(
            [x["way"] for x in rows],
            ["plain", "remat", "accumulate", "tf_gpipe"],
        )
        for row in rows:
            most = (256 - 10) / needed.get(row["way"], 0.03)
            self.assertBetween(row["largest"], most / 1.3, most)
        with open(results) as file:
            self.assertLess(len(json.load(file)), 5 * len(rows))

    def test_all_peers(self):
        """Some of the grid; a row with all libraries is measured once."""
        found = {
            "best": {
                "schedule": "1f1b",
                "samples_per_second": 9.0,
                "fraction": 0.9,
                **dict.fromkeys(("other", "other_samples_per_second")),
                **dict.fromkeys(("other_fraction", "ratio")),
            }
        }
        folder = self.enterContext(tempfile.TemporaryDirectory())
        for absent, count in ((["Lingvo"], 2), ([], 2), ([], 0)):
            found["absent"] = absent
            with mock.patch.object(
                fresh, "measure", return_value=found
            ) as measure:
                rows = benchmark_here(
                    *("peers", "--all", "--workload=convolutional"),
                    *("--remat=always", f"--results={folder}/found.json"),
                )["rows"]
            self.assertEqual(measure.call_count, count)
            self.assertEqual([x["num_micro_batches"] for x in rows], [8, 16])

    @pytest.mark.slow
    def test_peers(self):
        flags = (
            "--torch=/usr/bin/false",
            "--workload=convolutional",
            "--num_micro_batches=2",
            "--batch_size=4",
            "--num_steps=1",
            "--num_repeats=1",
        )
        parser = argparse.ArgumentParser()
        peers.add_arguments(parser)
        flags += ("--remat=never",)
        programs, missing = peers._programs(parser.parse_args(flags))
        self.assertEqual(
            list(programs)[:6],
            [
                ("tf_gpipe", ""),
                ("tf_gpipe", "1f1b"),
                ("tf_gpipe", "eager_1f1b"),
                ("tf_gpipe", "zero_bubble"),
                ("tf_gpipe", "eager_zero_bubble"),
                ("Keras fit", ""),
            ],
        )
        self.assertIn("torchgpipe", missing)
        # Each pipeline takes three processes, and each of them seconds.
        one = dataclasses.replace(
            peers._PEERS["tf_gpipe"], schedules=("zero_bubble",)
        )
        with mock.patch.dict(peers._PEERS, tf_gpipe=one):
            found = benchmark_here("peers", *flags)
        # That a library has no remat never, no installation changes.
        self.assertIn("torchgpipe", found["absent"])
        for name in set(found["missing"]).difference(found["absent"]):
            self.assertIn("it has no remat never", found["missing"][name])
        rows = found["rows"]
        self.assertEqual(
            [(row["library"], row["schedule"]) for row in rows][:3],
            [
                ("tf_gpipe", "one core"),
                ("tf_gpipe", "zero_bubble"),
                ("Keras fit", "one core"),
            ],
        )

    @mock.patch.dict(workloads.WORKLOADS, SMALL)
    @pytest.mark.slow
    def test_step(self):
        found = benchmark_here(
            "step", "--batch_size=4", "--num_steps=1", "--num_repeats=1"
        )
        self.assertCountEqual(found["ratios"], ["transformer", "convolutional"])
