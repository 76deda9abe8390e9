"""Learning rates over the steps of a training run."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="trainers")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Rises from 0 in a straight line, then follows another schedule.

    Args:
        schedule: `keras.optimizers.schedules.LearningRateSchedule` or float,
            the learning rate after warm-up. Its step 0 is this one's.
        num_steps: Integer, steps of warm-up.

    Example:

    ```python
    schedule = WarmUp(0.1, num_steps=100)
    schedule(49)  # 0.05: half of the steps are done with this one.
    ```
    """

    def __init__(self, schedule, num_steps):
        self.schedule = schedule
        self.num_steps = num_steps

    def __call__(self, step):
        rate = self.schedule
        if callable(rate):
            rate = rate(step)
        done = ops.cast(step, "float32") + 1.0
        return rate * ops.minimum(1.0, done / max(1, self.num_steps))

    def get_config(self):
        return {"schedule": self.schedule, "num_steps": self.num_steps}

    @classmethod
    def from_config(cls, config):
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["num_steps"])


@keras.saving.register_keras_serializable(package="trainers")
class InverseSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """Falls with the square root of the number of steps.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 5.3,
    https://arxiv.org/abs/1706.03762, without its warm-up, which `WarmUp` adds.

    Args:
        initial_learning_rate: Float, the learning rate of the first
            `num_constant_steps` steps.
        num_constant_steps: Positive integer. After four times as many steps
            the learning rate is half the initial one.

    Example:

    ```python
    schedule = InverseSquareRoot(0.1, num_constant_steps=100)
    schedule(399)  # 0.05
    ```
    """

    def __init__(self, initial_learning_rate, num_constant_steps):
        self.initial_learning_rate = initial_learning_rate
        self.num_constant_steps = num_constant_steps

    def __call__(self, step):
        done = ops.cast(step, "float32") + 1.0
        ratio = self.num_constant_steps / done
        return self.initial_learning_rate * ops.sqrt(ops.minimum(1.0, ratio))

    def get_config(self):
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "num_constant_steps": self.num_constant_steps,
        }
