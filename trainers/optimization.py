"""The optimizer of a training run and its learning-rate schedule."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
from absl import flags

from model_zoo import hyper_parameters
from tf_gpipe.commands.flags import keyword_arguments
from tf_gpipe.planning import optimizers
from trainers.command_line import UserError
from trainers.command_line import define_flags
from trainers.command_line import setting
from trainers.learning_rates import InverseSquareRoot
from trainers.learning_rates import WarmUp

# A bound against typing errors, for which TensorFlow has no float32.
_LARGEST = 1e6
SCHEDULES = ("constant", "cosine", "exponential", "inverse_sqrt")


@dataclasses.dataclass(frozen=True)
class Optimization:
    """Optimizer, learning rate and weight average. Each field is a flag."""

    optimizer: str = setting("adamw", "A Keras optimizer, by its name.")
    optimizer_args: Mapping[str, Any] = setting(
        "",
        "Other arguments of the optimizer, such as "
        "weight_decay=0.1,beta_2=0.98. By default those that this "
        "trainer uses with its default --optimizer, and none with another.",
        parse=keyword_arguments,
    )
    learning_rate: float = setting(0.001, "The highest learning rate.")
    learning_rate_schedule: str = setting(
        "cosine",
        "How the learning rate falls: not at all; to 0 as a cosine; by "
        "--decay_rate every --decay_epochs; or with the square root of the "
        "number of steps.",
        enum_values=SCHEDULES,
    )
    warmup_steps: int = setting(
        0, "Steps in which the learning rate rises from 0.", lower_bound=0
    )
    decay_rate: float | None = setting(
        None,
        "Factor of --learning_rate_schedule=exponential. Default: 0.97.",
        kind=float,
        lower_bound=0.0,
        upper_bound=_LARGEST,
    )
    decay_epochs: float | None = setting(
        None,
        "Epochs after which --decay_rate is applied once. Default: 2.4.",
        kind=float,
        lower_bound=0.0,
        upper_bound=_LARGEST,
    )
    ema: float | None = setting(
        None,
        "Momentum of an exponential moving average of the weights, which are "
        "tested in place of the last ones, such as 0.999.",
        kind=float,
        lower_bound=0.0,
        upper_bound=1.0,
    )

    def of_the_state(self):
        """Returns the flags, by name, that determine the optimizer's slots."""
        return {
            "optimizer": self.optimizer,
            "optimizer_args": dict(self.optimizer_args),
            "ema": self.ema,
        }

    def make(self, num_steps, steps_per_epoch):
        """Returns the `keras.Optimizer`.

        Args:
            num_steps: Integer, steps of the whole training run.
            steps_per_epoch: Integer.

        Raises:
            UserError: If the attributes do not fit one another, or the
                optimizer.
        """
        given = set(self.optimizer_args) & {
            "learning_rate",
            "use_ema",
            "ema_momentum",
            "ema_overwrite_frequency",
        }
        if given:
            raise UserError(
                "The learning rate and the average of weights have flags of "
                "their own. Received in --optimizer_args: "
                f"{', '.join(sorted(given))}"
            )
        config = {
            "learning_rate": self._learning_rate(num_steps, steps_per_epoch),
            **self.optimizer_args,
        }
        if self.ema is not None:
            config |= {"use_ema": True, "ema_momentum": self.ema}
        try:
            # By the class, since `get` with a configuration expects serialised
            # arguments.
            optimizer = type(optimizers.get(self.optimizer))
            hyper_parameters.check(optimizer, self.optimizer_args)
            return optimizer(**config)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"--optimizer={self.optimizer}, --optimizer_args="
                f"{dict(self.optimizer_args)}: {error}"
            ) from error

    def _learning_rate(self, num_steps, steps_per_epoch):
        schedules = keras.optimizers.schedules
        name, rate = self.learning_rate_schedule, self.learning_rate
        if name != "exponential":
            for key in ("decay_rate", "decay_epochs"):
                if getattr(self, key) is not None:
                    raise UserError(
                        f"--{key} is for --learning_rate_schedule=exponential. "
                        f"Received: {name}"
                    )
        if name == "cosine":
            rate = schedules.CosineDecay(rate, max(1, num_steps))
        elif name == "exponential":
            epochs = 2.4 if self.decay_epochs is None else self.decay_epochs
            rate = schedules.ExponentialDecay(
                rate,
                max(1, round(epochs * steps_per_epoch)),
                0.97 if self.decay_rate is None else self.decay_rate,
                staircase=True,
            )
        elif name == "inverse_sqrt":
            rate = InverseSquareRoot(rate, max(1, self.warmup_steps))
        elif name != "constant":
            raise ValueError(
                f"`learning_rate_schedule` must be one of {SCHEDULES}. "
                f"Received: learning_rate_schedule={name!r}"
            )
        return WarmUp(rate, self.warmup_steps) if self.warmup_steps else rate


define_flags(Optimization)
flags.register_validator(
    "ema",
    lambda value: value is None or value < 1,
    message="should be below 1, at which the average never moves",
)
flags.register_validator(
    "learning_rate",
    lambda value: 0 < value < float("inf"),
    message="should be positive",
)
