import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from trainers.command_line import UserError
from trainers.learning_rates import InverseSquareRoot
from trainers.learning_rates import WarmUp
from trainers.optimization import Optimization


def rates(optimization, steps, num_steps=100, steps_per_epoch=10):
    optimizer = optimization.make(num_steps, steps_per_epoch)
    found = []
    for step in steps:
        optimizer.iterations.assign(step)
        found.append(float(optimizer.learning_rate))
    return found


class OptimizationTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"learning_rate_schedule": "constant"}, [0.2, 0.2, 0.2]),
        ({"learning_rate_schedule": "cosine"}, [0.2, 0.1, 0.0]),
        (
            {"learning_rate_schedule": "exponential"},
            [0.2, 0.2 * 0.97**2, 0.2 * 0.97**4],
        ),
        (
            {
                "learning_rate_schedule": "exponential",
                "decay_rate": 0.5,
                "decay_epochs": 2.5,
            },
            [0.2, 0.05, 0.0125],
        ),
        (
            {"learning_rate_schedule": "inverse_sqrt", "warmup_steps": 4},
            [0.05, 0.2 * (4 / 51) ** 0.5, 0.2 * (4 / 101) ** 0.5],
        ),
        (
            {"learning_rate_schedule": "constant", "warmup_steps": 102},
            [0.2 / 102, 0.1, 0.2 * 101 / 102],
        ),
    )
    def test_learning_rate(self, kwargs, expected):
        received = rates(
            Optimization(learning_rate=0.2, **kwargs), (0, 50, 100)
        )
        self.assertAllClose(received, expected)

    def test_schedules_are_saved(self):
        for schedule in (
            WarmUp(0.1, 10),
            WarmUp(InverseSquareRoot(0.1, 10), 10),
            WarmUp(keras.optimizers.schedules.CosineDecay(0.1, 30), 10),
        ):
            optimizer = keras.optimizers.SGD(schedule)
            config = keras.saving.serialize_keras_object(optimizer)
            copy = keras.saving.deserialize_keras_object(config)
            for step in (0, 7, 25):
                self.assertAllClose(
                    copy._learning_rate(step), optimizer._learning_rate(step)
                )

    def test_any_keras_optimizer(self):
        optimizer = Optimization(
            "RMSprop", {"rho": 0.8, "momentum": 0.7}, ema=0.9
        ).make(1, 1)
        self.assertIsInstance(optimizer, keras.optimizers.RMSprop)
        self.assertEqual(optimizer.rho, 0.8)
        self.assertEqual(optimizer.momentum, 0.7)
        self.assertTrue(optimizer.use_ema)
        self.assertEqual(optimizer.ema_momentum, 0.9)

    @parameterized.parameters(
        ({"optimizer": "nonsuch"}, "--optimizer=nonsuch"),
        # Keras's error for it is a `KeyError`.
        ({"optimizer": "LossScaleOptimizer"}, "must be a Keras optimizer"),
        ({"optimizer": "adm"}, r"Did you mean adam\?"),
        ({"optimizer_args": {"rho": 1.0}}, "rho"),
        ({"optimizer_args": {"use_ema": True}}, "flags of their own.*use_ema"),
        ({"decay_rate": 0.5}, "--decay_rate is for .* Received: cosine"),
        ({"decay_epochs": 0.5}, "--decay_epochs is for"),
        ({"ema": 2.0}, "ema_momentum"),
    )
    def test_refused(self, kwargs, message):
        with self.assertRaisesRegex(UserError, message):
            Optimization(**kwargs).make(10, 10)

    def test_average_of_weights_is_tested(self):
        # By hand: SGD of a loss whose gradient is 1, and its average.
        optimization = Optimization(
            "sgd",
            learning_rate=1.0,
            learning_rate_schedule="constant",
            ema=0.5,
        )
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False)]
        )
        model.compile(optimization.make(3, 3), lambda y, z: z)
        model.set_weights([np.array([[4.0]])])
        model.fit(np.ones((3, 1)), np.ones((3, 1)), batch_size=1, verbose=0)
        # Weights 3, 2, 1; the average starts with the first of them.
        self.assertAllClose(model.get_weights(), [[[1.75]]])
