"""Random wrong uses end with an error that somebody has written."""

import os

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tools.wrong_uses import __main__ as wrong_uses
from tools.wrong_uses import outcome

# These environment variables set another seed, and more uses.
SEED = int(os.environ.get("TF_GPIPE_WRONG_USES_SEED", "0"))
NUM = int(os.environ.get("TF_GPIPE_WRONG_USES", "250"))
NUM_FAST = 30


def told():
    raise ValueError("`x` must be 1. Received: x=2")


class WrongUsesTest(tf.test.TestCase, parameterized.TestCase):
    def test_some(self):
        self.assert_ends_well(range(SEED, SEED + NUM_FAST))

    @pytest.mark.slow
    def test_many(self):
        self.assert_ends_well(range(SEED + NUM_FAST, SEED + NUM))

    def assert_ends_well(self, seeds):
        found = [f"{x}: {wrong_uses.use_problem(x)}" for x in seeds]
        self.assertEmpty([x for x in found if not x.endswith(": None")])

    def test_an_accident_is_told_from_an_error(self):
        _, error = outcome.end_of(told)
        self.assertIsNone(outcome.problem(error, None))
        _, error = outcome.end_of(lambda: self.fail("of another type"))
        self.assertIn("another type", outcome.problem(error, None))

    @parameterized.parameters(
        "'NoneType' object has no attribute 'shape'",
        "zip() argument 2 is longer than argument 1",
        "see _pipeline",
    )
    def test_words_of_the_code(self, text):
        self.assertIn("tells of", outcome.problem(ValueError(text), None) or "")

    def test_difference(self):
        self.assertIsNone(outcome.difference([1.0], [1.0]))
        self.assertIsNotNone(outcome.difference([1.0], [1.1]))
        self.assertIsNotNone(outcome.difference([1.0], [1.0, 2.0]))


if __name__ == "__main__":
    tf.test.main()
