"""Models, losses, optimizers and pipelines that are drawn by chance."""

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tools import random_models


class RandomModelsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(seed=list(range(4)), has_state=(False, True))
    def test_trains_alike(self, seed, has_state):
        self.assert_trains_alike(seed, has_state)

    @parameterized.product(seed=list(range(4, 14)), has_state=(False, True))
    @pytest.mark.slow
    def test_more_of_them_train_alike(self, seed, has_state):
        self.assert_trains_alike(seed, has_state)

    def assert_trains_alike(self, seed, has_state):
        drawing = random_models.Drawing(seed, has_state)
        found = random_models.problems(drawing)
        self.assertEmpty(found, "\n".join([*drawing.has(), *found]))


if __name__ == "__main__":
    tf.test.main()
