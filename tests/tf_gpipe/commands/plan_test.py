"""The command `plan` prints the planner's plan, and finds the largest model."""

import contextlib
import io
import json
import subprocess
import tempfile
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

import model_zoo
from tests import quick_python
from tf_gpipe.commands import plan as command
from tf_gpipe.planning import planner

# Small, so that a search plans it in no time.
SMALL = "--model_args=num_filters=8,num_blocks=2"


def run(*args):
    """Runs the command in this process: importing TensorFlow takes seconds."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        command.main(list(args))
    return stdout.getvalue()


def found(*args):
    return json.loads(run(*args, "--json").splitlines()[-1])


class PlanTest(tf.test.TestCase, parameterized.TestCase):
    def expected(self, batch_size=64, **kwargs):
        image, *layers = model_zoo.get(
            "resnet_small", num_filters=8, num_blocks=2
        )
        return planner.plan(
            layers, (batch_size, *image.output.shape[1:]), **kwargs
        )

    @pytest.mark.slow
    def test_pareto(self):
        with tempfile.TemporaryDirectory() as directory:
            picture = f"{directory}/pareto.png"
            flags = ["--pareto", f"--picture={picture}", SMALL]
            points = found(*flags, "--device_memory=250KB")["points"]
            with open(picture, "rb") as f:
                self.assertEqual(f.read(4), b"\x89PNG")
        self.assertEqual([x["name"] for x in points[:2]], ["never", "always"])
        # With all of the memory of "never", the time is also that of "never".
        self.assertEqual(points[-1]["time"], 1.0)
        self.assertFalse(points[0]["fits"])
        self.assertTrue(any(x["fits"] for x in points))
        for x in points[2:]:
            share = float(x["name"].split()[1].rstrip("%")) / 100
            self.assertLessEqual(x["share"], share + 1e-9)

    @pytest.mark.slow
    def test_command(self):
        result = subprocess.run(
            [
                *quick_python.command(),
                "-m",
                "tf_gpipe",
                "plan",
                "--num_stages=3",
                "--num_micro_batches=8",
                "--batch_size=32",
                "--balance=2,2,3",
                "--device_memory=1GiB",
                "--json",
                SMALL,
            ],
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        plan = self.expected(
            32,
            num_stages=3,
            num_micro_batches=8,
            balance=[2, 2, 3],
            device_memory=2**30,
        )
        text, last = result.stdout.rstrip().rsplit("\n", 1)
        self.assertEqual(text + "\n", str(plan))
        self.assertEqual(json.loads(last), plan.to_dict())

    def test_defaults(self):
        self.assertEqual(run(SMALL), str(self.expected(num_stages=2)))

    def test_options_reach_the_planner(self):
        plan = found(
            "--num_stages=4",
            "--num_micro_batches=4",
            "--schedule=interleaved",
            "--num_devices=2",
            "--balance=flops",
            "--remat=never",
            "--optimizer=sgd",
            SMALL,
        )
        expected = self.expected(
            num_stages=4,
            num_micro_batches=4,
            schedule="interleaved",
            num_devices=2,
            balance="flops",
            remat="never",
            optimizer="sgd",
        )
        self.assertEqual(plan, expected.to_dict())
        self.assertLen(plan["device_bytes"], 2)
        most = max(plan["device_bytes"])
        self.assertIn(
            f"the fullest device needs {most / 2**20:,.1f} MiB", str(expected)
        )

    def test_dtype_policy(self):
        whole = found(SMALL)
        half = found(SMALL, "--dtype_policy=mixed_bfloat16")
        for a, b in zip(half["stages"], whole["stages"], strict=True):
            self.assertEqual(a["parameter_bytes"], b["parameter_bytes"])
            self.assertLess(a["activation_bytes"], b["activation_bytes"])
        self.assertEqual(keras.config.dtype_policy().name, "float32")

    def test_functional_model(self):
        plan = found(
            "--model=unet",
            "--model_args=num_blocks=1,num_filters=4,input_shape=(8,8,1),"
            "depth=2",
            "--num_stages=4",
            "--balance=flops",
        )
        model = model_zoo.get(
            "unet", num_blocks=1, num_filters=4, input_shape=(8, 8, 1), depth=2
        )
        self.assertEqual(plan["parameters"], model.count_params())
        skips = [
            (k, int(to))
            for k, stage in enumerate(plan["stages"])
            for to in stage["sends"]
            if int(to) > k + 1
        ]
        self.assertNotEmpty(skips)

    def test_model_args(self):
        plan = found("--model_args=input_shape=(4, 4, 3),num_classes=7")
        layers = model_zoo.get(
            "resnet_small", input_shape=(4, 4, 3), num_classes=7
        )
        count = keras.Sequential(layers).count_params()
        self.assertEqual(plan["parameters"], count)

    @parameterized.parameters(
        ("123", 123),
        ("123B", 123),
        ("8GB", 8 * 10**9),
        ("512mb", 512 * 10**6),
        ("16GiB", 16 * 2**30),
        ("1.5KiB", 1536),
        ("2T", 2 * 10**12),
    )
    def test_sizes(self, text, size):
        args = command.make_parser().parse_args([f"--device_memory={text}"])
        self.assertEqual(args.device_memory, size)

    @parameterized.parameters("1", "1.", "1.0", "0.5", ".5", "300", "8GB")
    def test_limits(self, text):
        args = command.make_parser().parse_args([f"--memory_limit={text}"])
        share = float(text) if text[-1] != "B" and float(text) <= 1 else None
        self.assertIsInstance(args.memory_limit, float if share else int)
        self.assertEqual(args.memory_limit, share or args.memory_limit)

    @parameterized.parameters(1, 20)
    @pytest.mark.slow_after(1)
    def test_find_largest(self, start):
        args = ["--device_memory=300KB", "--num_stages=2"]
        model = "--model_args=num_filters=8,num_blocks="
        text = run(
            *args, f"{model}{start}", "--find_largest=num_blocks", "--json"
        )
        *_, line, last = text.splitlines()
        largest = json.loads(last)["num_blocks"]
        self.assertBetween(largest, 2, 19)
        self.assertEqual(line, f"the largest that fits: num_blocks={largest}")
        for num_blocks, fits in ((largest, True), (largest + 1, False)):
            plan = found(*args, f"{model}{num_blocks}")
            self.assertEqual(plan["fits"], fits)

    @pytest.mark.slow
    def test_find_largest_within_a_limit(self):
        args = ["--device_memory=300KB", "--num_stages=2", "--remat=auto"]
        args += ["--memory_limit=300KB", "--batch_size=16"]
        model = "--model_args=num_filters=8,num_blocks="
        text = run(*args, f"{model}1", "--find_largest=num_blocks", "--json")
        largest = json.loads(text.splitlines()[-1])["num_blocks"]
        self.assertTrue(found(*args, f"{model}{largest}")["fits"])
        with self.assertRaises(SystemExit):
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                run(*args, f"{model}{largest + 1}")
        self.assertIn("memory limit is too low", stderr.getvalue())

    @pytest.mark.slow
    def test_advice(self):
        self.assertIn("It would fit with", run("--device_memory=2MB"))

    @parameterized.parameters(
        (["--num_stages=0"], "--num_stages: not a positive integer: '0'"),
        (["--num_stages=8", SMALL], "`num_stages` must be at most"),
        (["--model=x"], "or package.module:function. Received: 'x'"),
        (["--model_args=x=3"], "Unknown hyper-parameters of model"),
        (["--model_args=3"], "--model_args: not of the form name=value"),
        (["--model_args=a=b"], "--model_args: not of the form name=value"),
        (["--model_args=num_blocks=1,num_blocks=2"], "with each name once"),
        (["--num_devices=2"], "--num_devices is for --schedule=interleaved"),
        (["--balance=speed"], "`balance` must be one of"),
        (["--balance=time"], "A plan measures nothing"),
        (["--balance=3,x"], "--balance: not a positive integer: 'x'"),
        (["--balance=3,4"], "`balance` must place every layer"),
        (["--optimizer=x"], "be a Keras optimizer, or the name of one"),
        (["--dtype_policy=x"], "Cannot convert 'x'"),
        (["--device_memory=8XB"], "--device_memory: not a size"),
        (["--device_memory=0"], "--device_memory: not a size"),
        (["--find_largest=num_blocks"], "--find_largest needs --device_memory"),
        (
            ["--find_largest=num_blocks", "--device_memory=1KB"],
            "not even num_blocks=1 fits",
        ),
        (
            ["--find_largest=momentum", "--device_memory=1GB"]
            + ["--model_args=momentum=0.9"],
            "needs a positive integer: momentum=0.9",
        ),
        (["--find_largest=x", "--device_memory=1GB"], "Unknown hyper-param"),
        (["--find_largest=name", "--device_memory=1GB"], "Unknown hyper-param"),
        (["--model_args=name='a'"], "Unknown hyper-parameters of model"),
        (["--model_args=num_blocks=2147483647"], "must be an integer of 1 or"),
        # A step would take infinite seconds.
        (["--device_flops=1e-300"], "`device_flops` must be a positive"),
    )
    def test_refuses(self, args, message):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            with self.assertRaises(SystemExit) as raised:
                command.main(args)
        self.assertEqual(raised.exception.code, 2)
        self.assertIn(message, stderr.getvalue().splitlines()[-1])

    @pytest.mark.slow
    def test_a_search_ends_where_nothing_grows(self):
        # Any momentum takes the same memory.
        self.enterContext(mock.patch.object(command, "_LIMIT", 8))
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            with self.assertRaises(SystemExit):
                command.main(
                    ["--find_largest=momentum", "--device_memory=1GB", SMALL]
                )
        self.assertIn("fits, as all do", stderr.getvalue())


if __name__ == "__main__":
    tf.test.main()
