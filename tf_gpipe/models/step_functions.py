"""The functions of a model's steps, made again while it trains."""

import collections
import functools
from collections.abc import Callable
from typing import Any

# A `keras.Model` supplies the rest, of which no types are known.
_Mixin: Any = object


def _remade(kind: str) -> property:
    """Returns the attribute that Keras keeps the function of a step in.

    Keras forgets the function when the model is compiled, and calls `None` at
    the next step if a callback has done so. Here it is made anew at that step.
    """
    key = f"_{kind}_function"

    def get(self: Any) -> Any:
        running = vars(self).get("_running", {})
        if vars(self).get(key) is None and running.get(kind):
            self._check_steps()
            number = running.pop(kind)
            try:
                # It asks for the function itself.
                getattr(self, f"make_{kind}_function")()
            finally:
                running[kind] += number
        return vars(self).get(key)

    def put(self: Any, function: Any) -> None:
        vars(self)[key] = function

    return property(get, put)


def while_running(kind: str, method: Callable) -> Callable:
    """Returns a method of Keras that calls the function at each step."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        running = vars(self).setdefault("_running", collections.Counter())
        if not any(running.values()):
            vars(self)["_running_steps"] = self.steps_per_execution
        running[kind] += 1
        try:
            return method(self, *args, **kwargs)
        finally:
            running[kind] -= 1

    return run


class StepFunctions(_Mixin):
    """What callbacks change while a model runs takes effect at the next step.

    Mixed into a `keras.Model`, before the class whose `fit` it has.
    """

    train_function = _remade("train")
    test_function = _remade("test")
    predict_function = _remade("predict")

    def _check_steps(self) -> None:
        prepared = vars(self)["_running_steps"]
        if self.steps_per_execution != prepared:
            raise ValueError(
                "`steps_per_execution` cannot change while the model runs, "
                f"because the data has been prepared for {prepared}. "
                f"Received: steps_per_execution={self.steps_per_execution}"
            )
