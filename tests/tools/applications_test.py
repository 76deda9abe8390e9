"""The table of `keras.applications`, and a sample of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import pairwise
from tools.applications import __main__ as command
from tools.applications import table
from tools.applications import trial

TRIAL = {
    "recipe": "whole",
    "K": 2,
    "M": 1,
    "calls": 9,
    "fullest": 1.25,
    "differs": {"gradients": 1e-12, "statistics": 0.0},
}


class TableTest(tf.test.TestCase):
    def test_of_a_good_one(self):
        row = {"names": ["A", "32"], "trials": [TRIAL]}
        self.assertEmpty(table.problems(row))
        self.assertIn(
            "| A | whole | 9 | 2 | 1 | 1.25 | 1e-12 |", table.markdown([row])
        )

    def test_of_a_bad_one(self):
        bad = {**TRIAL, "differs": {"gradients": 1e-3}}
        row = {"names": ["A", "32"], "trials": [TRIAL, bad]}
        (reason,) = table.problems(row)
        self.assertIn("whole in 2 stages, M=1", reason)
        row["errors"] = {"process": "more than 9 s"}
        self.assertLen(table.problems(row), 2)
        not_a_number = {**TRIAL, "differs": {"gradients": float("nan")}}
        row = {"names": ["A", "32"], "trials": [not_a_number]}
        self.assertLen(table.problems(row), 1)

    def test_all_are_there(self):
        for name, _ in command.models():
            self.assertTrue(hasattr(keras.applications, name))
        self.assertLen(command.models(), 14)


@pytest.mark.slow
class SampleTest(tf.test.TestCase, parameterized.TestCase):
    # `python -m tools.applications` tries them all.
    @parameterized.parameters(
        pairwise.some(("MobileNet", "MobileNetV3Small"), 1)
    )
    def test_trial(self, name):
        row = {"names": [name, "32"], **trial.run(name, 32)}
        self.assertEmpty(table.problems(row))
        self.assertLen(row["trials"], len(trial.TRIALS))
        worst = [max(x["differs"].values()) for x in row["trials"]]
        self.assertLess(np.max(worst), 1e-9)


if __name__ == "__main__":
    tf.test.main()
