"""Commands take a user's model, or say why they cannot."""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_gpipe.commands import models
from tf_gpipe.commands import plan
from tf_gpipe.commands import timeline
from tf_gpipe.commands import verify

MODULE = """
import keras
from keras import layers


def functional(units=4):
    a = keras.Input((3, 2), name="a")
    b = keras.Input((), dtype="int32", name="b")
    x = layers.Add()(
        [layers.Dense(units)(layers.Flatten()(a)),
         layers.Embedding(5, units)(b)]
    )
    return keras.Model({"a": a, "b": b}, {"x": layers.Dense(3)(x)})


def sequential(units=4):
    return keras.Sequential(several(units))


def several(units=4):
    return [keras.Input((3,)), layers.Dense(units), layers.Dense(2)]


def open_length():
    return [keras.Input((None, 3)), layers.Dense(4), layers.Dense(2)]


def no_input():
    return [layers.Dense(4), layers.Dense(2)]


def not_built():
    return keras.Sequential(no_input())


def nothing():
    pass


def fault():
    raise ValueError("of the model")


def ends():
    raise SystemExit


number = 3
"""


class ModelsTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        Path(folder, "models_of_a_user.py").write_text(MODULE)
        Path(folder, "faulty_models.py").write_text("import no_such_library")
        Path(folder, "ending_models.py").write_text("raise SystemExit")
        sys.path.insert(0, folder)
        cls.addClassCleanup(sys.path.remove, folder)

    def run_command(self, command, name, *flags):
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            status = command.main(
                [f"--model=models_of_a_user:{name}", "--json", *flags]
            )
        self.assertFalse(status, stdout.getvalue())
        return json.loads(stdout.getvalue().splitlines()[-1])

    @parameterized.parameters("functional", "sequential", "several")
    def test_plan(self, name):
        found = self.run_command(plan, name, "--model_args=units=6")
        model = models.get(f"models_of_a_user:{name}", {"units": 6})
        if not isinstance(model, keras.Model):
            model = keras.Sequential(model)
        self.assertEqual(found["parameters"], model.count_params())

    def test_find_largest(self):
        found = self.run_command(
            plan,
            "sequential",
            "--find_largest=units",
            "--device_memory=10KB",
            "--num_stages=1",
        )
        self.assertGreater(found["units"], 4)

    @parameterized.parameters(
        "functional", "sequential", "several", "open_length"
    )
    def test_verify(self, name):
        found = self.run_command(verify, name, "--num_micro_batches=2")
        self.assertTrue(found["ok"])

    @parameterized.parameters(
        ("int32", 7, {1, 2, 3, 4, 5, 6}),
        ("int32", 2, {0, 1}),
        ("int32", 1, {0}),
        ("int8", 10**6, set(range(1, 127))),
        ("int32", None, {0, 1}),
        ("bool", None, {False, True}),
        ("uint8", None, set(range(1, 255))),
    )
    def test_random_integers(self, dtype, rows, expected):
        inputs = keras.Input((4,), dtype=dtype)
        x = keras.layers.Rescaling(0.5)(inputs)
        if rows:
            x = keras.layers.Embedding(rows, 1)(inputs)
        model = models.pipelined(keras.Model(inputs, x), num_stages=1)
        drawn, _ = models.random_data(model, 1000)
        self.assertEqual(drawn.dtype, dtype)
        self.assertEqual(set(drawn.flatten().tolist()), expected)

    @pytest.mark.slow
    def test_timeline(self):
        found = self.run_command(
            timeline,
            "functional",
            "--num_stages=2",
            "--num_micro_batches=3",
            "--batch_size=6",
            "--num_steps=3",
        )
        self.assertEqual(found["peak_micro_batches"], [2, 1])

    @parameterized.parameters(
        ("no_such_models:f", "there is no module no_such_models"),
        ("models_of_a_user.x:f", "there is no module models_of_a_user.x"),
        ("models_of_a_user:f", "has no function f"),
        ("models_of_a_user:number", "has no function number"),
        ("models_of_a_user", "or package.module:function. Received: 'models_"),
        ("models_of_a_user:", "or package.module:function. Received: 'models_"),
        (":several", "or package.module:function. Received: ':several'"),
        ("models_of_a_user:nothing", "keras.Input. Received: NoneType"),
        ("models_of_a_user:not_built", "keras.Input. Received: Sequential"),
        (
            "models_of_a_user:no_input",
            "keras.Input. Received: list that begins with Dense",
        ),
        (
            "models_of_a_user:several",
            "takes (units=4). Received: --model_args with depth (got an",
            "--model_args=depth=3",
        ),
    )
    def test_refuses_in_one_line(self, name, message, *flags):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            with self.assertRaises(SystemExit) as raised:
                plan.main([f"--model={name}", *flags])
        self.assertEqual(raised.exception.code, 2)
        self.assertIn(message, stderr.getvalue().splitlines()[-1])

    @parameterized.parameters(
        ("models_of_a_user:fault", ValueError),
        ("faulty_models:f", ModuleNotFoundError),
        # Of a program that is no module, say. The status would be that of a
        # model which is right.
        ("models_of_a_user:ends", SystemExit),
        ("ending_models:f", SystemExit),
    )
    def test_errors_of_the_model_keep_their_traceback(self, name, cause):
        with self.assertRaisesRegex(RuntimeError, "has failed") as raised:
            plan.main([f"--model={name}"])
        self.assertIsInstance(raised.exception.__cause__, cause)


if __name__ == "__main__":
    tf.test.main()
