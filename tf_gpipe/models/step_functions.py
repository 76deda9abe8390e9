"""The functions of a model's steps, made again while it trains."""

import collections
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# A `keras.Model` supplies the rest, of which no types are known.
_Mixin: Any = object

# Of Keras, where it is given none.
_BATCH_SIZE = 32


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

    doc = f"The function of a step, kept from `make_{kind}_function`."
    return property(get, put, doc=doc)


def while_running(kind: str, method: Callable) -> Callable:
    """Returns a method of Keras that calls the function at each step."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        running = vars(self).setdefault("_running", collections.Counter())
        if not any(running.values()):
            vars(self)["_running_steps"] = self.steps_per_execution
        rows = _rows_of_arrays(method, self, args, kwargs)
        self._expect_rows(kind, rows)
        running[kind] += 1
        expected = vars(self).setdefault("_expected_rows", [])
        expected.append(rows)
        try:
            return method(self, *args, **kwargs)
        finally:
            expected.remove(rows)
            running[kind] -= 1

    return run


def _rows_of_arrays(
    method: Callable, model: Any, args: tuple, kwargs: dict[str, Any]
) -> float:
    """Returns how many rows the mini-batches of a call of Keras have at most.

    Infinity if that is not known: of anything but arrays.
    """
    try:
        given = inspect.signature(method).bind(model, *args, **kwargs).arguments
        x = given.get("x")
        batch_size = given.get("batch_size")
        if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)):
            return math.inf
        rows = min(int(each.shape[0]) for each in keras.tree.flatten(x))
        if batch_size is not None:
            return min(rows, int(batch_size))
        steps = given.get("steps_per_epoch", given.get("steps"))
        return rows if steps else min(rows, _BATCH_SIZE)
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError):
        # Of generators, say; or what Keras refuses.
        return math.inf


class StepFunctions(_Mixin):
    """What callbacks change while a model runs takes effect at the next step.

    Mixed into a `keras.Model`, before the class whose `fit` it has.
    """

    train_function = _remade("train")
    test_function = _remade("test")
    predict_function = _remade("predict")

    def _expect_rows(self, kind: str, rows: float) -> None:
        """Forgets a function that was traced for fewer rows, where it matters.

        See `_rows_at_most`.
        """
        attributes: Any = vars(self)
        traced = attributes.setdefault("_traced_rows", {})
        asked = self._pipeline and self._pipeline.num_micro_batches
        if asked and min(asked, rows) > traced.get(kind, math.inf):
            setattr(self, f"{kind}_function", None)
            del traced[kind]

    def _rows_at_most(self) -> float:
        """Returns how many rows the mini-batches of a running method have.

        Asked for while a function is traced whose mini-batches have another
        number of rows at the end of an epoch, so that it is not known there.
        """
        attributes: Any = vars(self)
        rows = max(attributes.get("_expected_rows") or [math.inf])
        traced = attributes.setdefault("_traced_rows", {})
        for kind, number in attributes.get("_running", {}).items():
            if number:
                traced[kind] = min(rows, traced.get(kind, math.inf))
        return rows

    def _check_steps(self) -> None:
        prepared = vars(self)["_running_steps"]
        # Which Keras has not looked at: it may be anything.
        if repr(self.steps_per_execution) != repr(prepared):
            raise ValueError(
                "`steps_per_execution` cannot change while the model runs, "
                f"because the data has been prepared for {prepared}. "
                f"Received: steps_per_execution={self.steps_per_execution}"
            )
