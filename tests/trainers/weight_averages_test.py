import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from trainers.weight_averages import SwapAverages
from trainers.weight_averages import averaged


def make_model(optimizer, strategy=None):
    layers = [keras.Input((3,)), *map(keras.layers.Dense, (4, 4, 3))]
    with (strategy or tf.distribute.get_strategy()).scope():
        model = tf_gpipe.PipelinedSequential(
            layers, num_stages=2, num_micro_batches=2
        )
        model.compile(optimizer(), "mse")
    return model


def values(variables):
    return [v.numpy() for v in variables]


class WeightAveragesTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")

    def assert_same(self, variables, expected):
        for variable, value in zip(variables, expected, strict=True):
            self.assertAllEqual(variable, value, msg=variable.path)

    @parameterized.parameters(False, True)
    @pytest.mark.slow_after(1)
    def test_weights_are_given_back_to_the_last_bit(self, replicas):
        strategy = None
        if replicas:
            strategy = tf.distribute.MirroredStrategy(
                [f"CPU:{i}" for i in range(4)]
            )
        model = make_model(
            lambda: keras.optimizers.Adam(1.0, use_ema=True, ema_momentum=0.5),
            strategy,
        )
        model.train_on_batch(self.x, self.x)
        model.train_on_batch(self.x, self.x)
        averages = model.optimizer._model_variables_moving_average
        weights = values(model.trainable_variables)
        means = values(averages)
        with averaged(model):
            self.assert_same(model.trainable_variables, means)
            predicted = model.predict(self.x, verbose=0)
            loss = model.evaluate(self.x, self.x, verbose=0)
        self.assert_same(model.trainable_variables, weights)
        self.assert_same(averages, means)

        self.assertEqual(
            model.evaluate(
                self.x, self.x, verbose=0, callbacks=[SwapAverages()]
            ),
            loss,
        )
        self.assert_same(model.trainable_variables, weights)
        self.assertNotAllClose(predicted, model.predict(self.x, verbose=0))

    def test_loss_scale(self):
        model = make_model(
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1, use_ema=True)
            )
        )
        # After one step, the average is of one value.
        model.train_on_batch(self.x, self.x)
        model.train_on_batch(self.x, self.x)
        before = model.predict(self.x, verbose=0)
        with averaged(model):
            self.assertNotAllClose(before, model.predict(self.x, verbose=0))
        self.assertAllEqual(before, model.predict(self.x, verbose=0))

    def test_nothing_to_average(self):
        for model in (make_model(lambda: "sgd"), keras.Sequential()):
            with averaged(model):
                pass


if __name__ == "__main__":
    tf.test.main()
