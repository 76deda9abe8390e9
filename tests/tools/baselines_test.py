"""`python -m tools.benchmark baselines`, and the flags that it refuses."""

import contextlib
import io
import sys
import types
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.tools.benchmark_test import SMALL
from tests.tools.benchmark_test import benchmark
from tests.tools.benchmark_test import benchmark_here
from tests.tools.benchmark_test import devices_here
from tools.benchmark import __main__ as command
from tools.benchmark import baselines
from tools.benchmark import timed_runs


def pipelined(num_stages, num_micro_batches, **kwargs):
    return tf_gpipe.PipelinedSequential(
        [keras.Input((2,)), *(keras.layers.Dense(2) for _ in range(4))],
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        **kwargs,
    )


class BaselinesTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(
        num_stages=(2, 4), num_micro_batches=(1, 8), schedule=("gpipe", "1f1b")
    )
    def test_bound(self, num_stages, num_micro_batches, schedule):
        bound = num_stages * num_micro_batches
        bound /= num_micro_batches + num_stages - 1
        bounds = {
            remat: timed_runs.simulated_speedup(
                pipelined(
                    num_stages,
                    num_micro_batches,
                    schedule=schedule,
                    remat=remat,
                ),
            )
            for remat in ("never", "always")
        }
        self.assertAllClose(bounds["never"], bound)
        if num_micro_batches == 1:
            # Stages recompute while they would wait for the last one, which
            # recomputes nothing.
            self.assertAllClose(bounds["always"], bound)
        else:
            self.assertLess(bounds["always"], bound)

    @parameterized.parameters(
        ("baselines --num_stages=1", "--num_stages must be at least 2"),
        ("baselines --num_stages=3", "into 3 equal parts"),
        ("baselines --num_micro_batches=2,48", "into 48 equal parts"),
        ("baselines --num_micro_batches=2,x", "not a positive integer: 'x'"),
        ("baselines --num_micro_batches=0", "not a positive integer: '0'"),
        ("baselines --batch_size=0", "not a positive integer: '0'"),
        ("baselines --schedule=none", "invalid choice: 'none'"),
        ("baselines --remat=none", "invalid choice: 'none'"),
        ("baselines --workload=none", "invalid choice: 'none'"),
        (
            "pipeline --on=simulated --workload=transformer",
            "--workload is not for --on=simulated",
        ),
        ("pipeline --wait=1", "--wait is not for --on=workers"),
        ("pipeline --schedule=gpipe,x", "invalid choice: 'x'"),
        ("pipeline --num_stages=2,0", "not a positive integer: '0'"),
        (
            "trace --workload=resnet50 --num_blocks=2",
            "--num_blocks is not for --workload=resnet50",
        ),
        ("one_device --share=0.5", "--share needs --only"),
        ("one_device --only=unet_batch --way=plain", "needs --way and --size"),
    )
    def test_refused(self, args, message):
        errors = io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["benchmark", *args.split()]),
            contextlib.redirect_stderr(errors),
            self.assertRaises(SystemExit) as raised,
        ):
            command.main()
        self.assertEqual(raised.exception.code, 2)
        self.assertIn(message, errors.getvalue())
        self.assertIn(f"benchmark {args.split()[0]}: error", errors.getvalue())

    @pytest.mark.slow
    def test_rows(self):
        self.assert_rows(benchmark, "transformer", "1f1b", "never", [2, 4])

    @pytest.mark.slow
    def test_rows_of_resnet50(self):
        # Workers take long to start, and a pipeline of ResNet-50 takes long to
        # trace: the other test and the model zoo's tests have those. Here the
        # processes of the data-parallel baseline train the model.
        here = types.SimpleNamespace(connected=devices_here)
        small = {"resnet50": SMALL["convolutional"]}
        with (
            mock.patch.object(baselines, "workers", here),
            mock.patch.dict(baselines._WORKLOADS, small),
        ):
            self.assert_rows(benchmark_here, "resnet50", "gpipe", "always", [2])

    def assert_rows(self, run, workload, schedule, remat, num_micro_batches):
        rows = run(
            "baselines",
            f"--workload={workload}",
            f"--schedule={schedule}",
            f"--remat={remat}",
            f"--num_micro_batches={','.join(map(str, num_micro_batches))}",
            f"--batch_size={max(num_micro_batches)}",
            "--num_steps=1",
            "--num_repeats=1",
        )["rows"]
        bounds = {
            "one device": 1,
            "naive model parallel": 1,
            "data parallel": 2,
            **{
                f"pipeline, M={m}": timed_runs.simulated_speedup(
                    pipelined(2, m, schedule=schedule, remat=remat)
                )
                for m in num_micro_batches
            },
        }
        self.assertEqual(list(rows), list(bounds))
        one = rows["one device"]["samples_per_second"]
        for name, row in rows.items():
            self.assertAllClose(row["bound"], bounds[name])
            self.assertAllClose(row["fraction"], row["speedup"] / row["bound"])
            # With one repeat, medians are the figures themselves.
            self.assertAllClose(row["speedup"], row["samples_per_second"] / one)
            # It is zero if all takes less time than the clock can tell.
            self.assertGreaterEqual(row["cores_used"], 0)
