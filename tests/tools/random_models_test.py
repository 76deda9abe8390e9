"""Models, losses, optimizers and pipelines that are drawn at random."""

import contextlib
import io
import json
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import pairwise
from tools.random_models import __main__ as command
from tools.random_models import comparing
from tools.random_models.drawing import Drawing


class Fault(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class Rounds(keras.layers.Layer):
    """Differs in float32, like a layer that magnifies rounding."""

    def call(self, x):
        if x.dtype == "float64":
            return x
        return x - 1e-3 * keras.ops.mean(x, axis=0, keepdims=True)


class RandomModelsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(seed=(0, 1), has_state=(False, True))
    @pytest.mark.slow
    def test_has_no_problem(self, seed, has_state):
        drawing = Drawing(seed, has_state)
        self.assert_empty(drawing, comparing.problems(drawing))

    @parameterized.parameters(pairwise.some(range(2, 38), 6))
    @pytest.mark.slow
    def test_trains_alike(self, seed):
        drawing = Drawing(seed, has_state=seed % 3 == 0)
        self.assert_empty(drawing, comparing.training_differs(drawing))

    @pytest.mark.slow
    def test_command(self):
        # The model of this seed is traced fast.
        status, text = self.run_command("--num=1", "--seed=4", "--json")
        *_, line, last = text.splitlines()
        different = json.loads(last)["different"]
        self.assertEqual(json.loads(last)["models"], 1)
        self.assertEqual(line, f"{len(different)} of 1 models differ")
        self.assertEqual(status, 1 if different else 0)

    @pytest.mark.slow
    def test_command_with_a_difference(self):
        fault = mock.patch.object(Drawing, "layer", lambda *_: Fault(name=None))
        self.enterContext(fault)
        # The pipeline of this seed has three micro-batches.
        status, text = self.run_command("--num=1", "--seed=2")
        self.assertEqual(status, 1, text)
        self.assertIn("The first layer that differs: fault", text)

    @pytest.mark.slow
    def test_command_with_rounding(self):
        fault = mock.patch.object(
            Drawing, "layer", lambda *_: Rounds(name=None)
        )
        self.enterContext(fault)
        status, text = self.run_command("--num=1", "--seed=2")
        self.assertIn("magnifies rounding", text)
        self.assertIn("0 of 1 models differ", text)
        self.assertEqual(status, 0)

    def run_command(self, *args):
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            status = command.main(args)
        return status, stdout.getvalue()

    def assert_empty(self, drawing, found):
        self.assertEmpty(found, "\n".join([*drawing.has(), *found]))


if __name__ == "__main__":
    tf.test.main()
