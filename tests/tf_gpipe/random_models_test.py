"""Models, losses, optimizers and pipelines that are drawn by chance."""

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tools import random_models


class RandomModelsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(seed=(0, 1), has_state=(False, True))
    def test_has_no_problem(self, seed, has_state):
        drawing = random_models.Drawing(seed, has_state)
        self.assert_empty(drawing, random_models.problems(drawing))

    @parameterized.parameters(*range(2, 38))
    @pytest.mark.slow
    def test_trains_alike(self, seed):
        drawing = random_models.Drawing(seed, has_state=seed % 3 == 0)
        self.assert_empty(drawing, random_models.training_differs(drawing))

    def assert_empty(self, drawing, found):
        self.assertEmpty(found, "\n".join([*drawing.has(), *found]))


if __name__ == "__main__":
    tf.test.main()
