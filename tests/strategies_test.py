"""Tests do not disturb each other's replicas."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized


class StrategiesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(1, 2, 3)
    def test_shapes_differ(self, units):
        """Plain Keras trains replicas whatever an earlier test trained."""
        x = np.ones((4, 3), "float32")
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(units)]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
        before = model.evaluate(x, np.ones((4, units)), verbose=0)
        model.fit(x, np.ones((4, units)), verbose=0)
        self.assertLess(
            model.evaluate(x, np.ones((4, units)), verbose=0), before
        )


if __name__ == "__main__":
    tf.test.main()
