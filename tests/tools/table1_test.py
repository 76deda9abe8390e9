"""The command plans the paper's models, and measures small ones."""

import contextlib
import dataclasses
import io
import json
import subprocess
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

import model_zoo
import tf_gpipe
from tests import pairwise
from tests import quick_python
from tools.table1 import __main__ as command
from tools.table1 import measured
from tools.table1 import planned
from tools.table1.published import FAMILIES
from tools.table1.published import ROWS

GIB = 2**30


def run(*args):
    """Runs the command in this process: importing TensorFlow takes seconds."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        command.main(list(args))
    return stdout.getvalue()


def found(*args):
    return json.loads(run(*args, "--json").splitlines()[-1])


def message(*args):
    """Returns the last line of the error for refused arguments."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        with pytest.raises(SystemExit) as raised:
            command.main(list(args))
    assert raised.value.code == 2
    return stderr.getvalue().splitlines()[-1]


def row(model, name):
    return next(x for x in ROWS if x.model == model and x.name == name)


class Table1Test(parameterized.TestCase, tf.test.TestCase):
    @pytest.mark.slow
    def test_transformer(self):
        result = subprocess.run(
            [
                *quick_python.command(),
                "-m",
                "tools.table1",
                "--model=transformer_lm",
                "--rows",
                "Naive-1",
                "Pipeline-1",
                "Pipeline-8",
                "--json",
            ],
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        *text, last = result.stdout.splitlines()
        naive, one, eight = json.loads(last)["rows"]
        for x in (naive, one, eight):
            self.assertAllClose(
                x["parameters"], x["paper"]["parameters"], rtol=0.005
            )
            self.assertEqual(x["device_memory"], 16 * GIB)
            for name, count in x["by_bytes"].items():
                # All variables are weights, and each of them takes so many
                # bytes.
                self.assertEqual(
                    sum(count["parameter_bytes"]), int(name) * x["parameters"]
                )
                self.assertEqual(
                    count["needs"],
                    max(
                        a + b
                        for a, b in zip(
                            count["parameter_bytes"],
                            x["activation_bytes"],
                            strict=True,
                        )
                    ),
                )
                self.assertEqual(
                    count["fits"], count["needs"] <= x["device_memory"]
                )
        self.assertEqual(naive["num_micro_batches"], 1)
        self.assertEqual(
            [x["remat"] for x in (naive, one, eight)],
            ["never", "always", "always"],
        )
        for count in naive["by_bytes"].values():
            self.assertFalse(count["fits"])
            self.assertIsNone(count["largest"])
        for x in (one, eight):
            self.assertAllClose(
                sum(x["by_bytes"]["12"]["parameter_bytes"]) / GIB,
                x["paper"]["parameter_gb"],
                rtol=0.005,
            )
            self.assertEqual(x["num_micro_batches"], 32)
            self.assertLen(x["activation_bytes"], x["num_stages"])
            self.assertGreater(
                x["by_bytes"]["12"]["largest"]["num_layers"],
                x["by_bytes"]["16"]["largest"]["num_layers"],
            )
        # As in the paper, although the gradients of looked-up rows of 32
        # micro-batches take 0.3 GiB.
        self.assertEqual(one["by_bytes"]["16"]["largest"]["num_layers"], 13)
        self.assertTrue(eight["by_bytes"]["16"]["fits"])
        # What the table and the lines below it say.
        text = "\n".join(text)
        self.assertIn("Transformer-L on devices of 16 GiB, Adam", text)
        self.assertRegex(text, r"Pipeline-8 +paper +5.30B +59.50 +50.90 +yes")
        self.assertIn("the two seem to be swapped", text)
        self.assertNotIn("AmoebaNet", text)

    @pytest.mark.slow
    def test_largest(self):
        largest = found("--model=transformer_lm", "--rows", "Pipeline-1")
        by_bytes = largest["rows"][0]["by_bytes"]
        for name, count in by_bytes.items():
            for more in (0, 1):
                num_layers = count["largest"]["num_layers"] + more
                layers = model_zoo.get("transformer_lm", num_layers=num_layers)
                stage = tf_gpipe.plan(
                    layers[1:],
                    keras.KerasTensor((32, 1024), "int32"),
                    num_stages=1,
                    num_micro_batches=32,
                ).stages[0]
                needs = int(name) * stage.parameters + stage.activation_bytes
                self.assertEqual(needs <= 16 * GIB, not more)

    @parameterized.parameters(
        # A Transformer grows by a layer a stage.
        ("transformer_lm", "Pipeline-1", lambda n: (70 * n, 0), 14),
        ("transformer_lm", "Pipeline-1", lambda n: (0, 2 * n), 500),
        ("transformer_lm", "Pipeline-1", lambda n: (100, n), 900),
        ("transformer_lm", "Pipeline-1", lambda n: (1000, n), None),
        (
            "transformer_lm",
            "Pipeline-128",
            lambda n: (n / 4, 0),
            127 + 30 * 128,
        ),
        # An AmoebaNet by 16 filters, or by 3 layers.
        ("amoebanet_d", "Pipeline-1", lambda n: (n * n / 1e3, 0), 992),
        ("amoebanet_d", "Pipeline-1", lambda n: (n * n / 1e3, n / 2), 768),
        ("amoebanet_d", "Pipeline-4", lambda n: (0, 10 * n), 99),
    )
    def test_search(self, model, name, fullest, expected):
        largest = planned.largest(row(model, name), fullest, 1000)
        self.assertEqual(largest, expected)

    @pytest.mark.slow
    def test_amoebanet(self):
        # The search for the largest model takes long, and is made for each
        # count of bytes: one is enough here.
        count = planned.COUNTS["16"]
        self.enterContext(
            mock.patch.dict(planned.COUNTS, {"16": count}, clear=True)
        )
        (x,) = found("--model=amoebanet_d", "--rows", "Pipeline-1")["rows"]
        self.assertAllClose(
            x["parameters"], x["paper"]["parameters"], rtol=0.02
        )
        # Moving statistics have no gradients and no slots.
        self.assertAllClose(
            sum(x["by_bytes"]["16"]["parameter_bytes"]),
            16 * x["parameters"],
            rtol=0.005,
        )
        self.assertEqual(x["device_memory"], 8 * GIB)
        self.assertEqual(x["num_micro_batches"], 128)
        self.assertTrue(x["by_bytes"]["16"]["fits"])
        largest = x["by_bytes"]["16"]["largest"]
        self.assertEqual(largest["num_layers"], 18)
        self.assertGreater(largest["num_filters"], 416)

    @pytest.mark.slow
    def test_options_reach_the_planner(self):
        args = ["--model=transformer_lm", "--rows", "Pipeline-1"]
        (whole,) = found(*args)["rows"]
        (half,) = found(*args, "--dtype_policy=mixed_bfloat16")["rows"]
        # As a line below the table says.
        self.assertGreater(half["activation_bytes"], whole["activation_bytes"])
        self.assertEqual(keras.config.dtype_policy().name, "float32")
        (large,) = found(*args, "--micro_batch_size=3")["rows"]
        self.assertEqual(large["num_micro_batches"], 11)
        self.assertGreater(
            large["activation_bytes"][0], 2 * whole["activation_bytes"][0]
        )

    @parameterized.parameters(
        (["--model=x"], "--model: invalid choice: 'x'"),
        (["--rows", "Pipeline-3"], "--rows: invalid choice: 'Pipeline-3'"),
        (
            ["--model=amoebanet_d", "--rows", "Pipeline-128"],
            "amoebanet_d has no row Pipeline-128",
        ),
        (["--micro_batch_size=0"], "not a positive integer: '0'"),
        (["--micro_batch_size=33"], "a mini-batch has fewer rows"),
        (["--dtype_policy=x"], "--dtype_policy: invalid choice: 'x'"),
        (["--run", "--rows", "Naive-1"], "with --run need a GPU"),
        (["--run", "--micro_batch_size=2"], "with --run need a GPU"),
    )
    def test_refuses(self, args, expected):
        self.assertIn(expected, message(*args))

    def test_refuses_on_a_gpu(self):
        with mock.patch.object(
            tf.config, "list_physical_devices", return_value=["GPU"]
        ):
            self.assertIn(
                "trains amoebanet_d only",
                message("--run", "--model=transformer_lm"),
            )

    @pytest.mark.slow
    def test_measure(self):
        # With a model that is traced fast.
        family = dataclasses.replace(FAMILIES["transformer_lm"], batch_size=4)
        small = {**family.small, "num_layers": 1, "dim": 16, "length": 8}
        rows = [
            dataclasses.replace(
                row("amoebanet_d", name), model="transformer_lm", sizes=small
            )
            for name in ("Naive-1", "Pipeline-2", "Pipeline-4")
        ]
        args = command.make_parser().parse_args(
            ["--run", "--micro_batch_size=2", "--json"]
        )
        make = measured.pipeline

        def too_large(layers, family, devices, options):
            if len(devices) == 1:
                raise tf.errors.ResourceExhaustedError(None, None, "memory")
            self.assertEqual(options["num_micro_batches"], 2)
            return make(layers, family, devices, options)

        with (
            mock.patch.multiple(
                tf.config.experimental,
                reset_memory_stats=mock.Mock(),
                get_memory_info=lambda device: {"peak": len(device)},
            ),
            mock.patch.dict(FAMILIES, transformer_lm=family),
            mock.patch.object(measured, "pipeline", too_large),
            contextlib.redirect_stdout(io.StringIO()) as stdout,
        ):
            measured.on_gpu(rows, ["CPU:0", "CPU:1"], args)
        self.assertEqual(
            json.loads(stdout.getvalue().splitlines()[-1])["runs"],
            [
                {"name": "Naive-1", "result": "does not fit", "peaks": None},
                {"name": "Pipeline-2", "result": "fits", "peaks": [5, 5]},
                {
                    "name": "Pipeline-4",
                    "result": "needs 4 devices",
                    "peaks": None,
                },
            ],
        )

    # Tracing an AmoebaNet takes long. Tests of `tools.benchmark memory` have
    # convolutions, too.
    @parameterized.parameters(
        pairwise.some(("transformer_lm", "amoebanet_d"), 1)
    )
    @pytest.mark.slow
    def test_run(self, model):
        result = subprocess.run(
            [*quick_python.command(), "-m", "tools.table1", "--run", "--json"]
            + [f"--model={model}"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        runs = json.loads(result.stdout.splitlines()[-1])["runs"]
        self.assertLen(runs, 2)
        for x in runs:
            with self.subTest(model=x["model"], remat=x["remat"]):
                amoebanet = x["model"] == "amoebanet_d"
                for planned, measured in zip(
                    x["planned"], x["measured"], strict=True
                ):
                    # Where it differs by more, the command says why.
                    self.assertBetween(
                        measured / planned,
                        0.65 if amoebanet else 0.8,
                        1.4 if x["remat"] == "never" else 1.2,
                    )


if __name__ == "__main__":
    tf.test.main()
