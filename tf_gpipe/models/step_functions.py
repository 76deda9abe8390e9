"""Step functions, made again if a callback changes the running model."""

import collections
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream

# Keras's default for arrays.
_BATCH_SIZE = 32


def _remade(kind: str) -> property:
    """Returns a property for `train_function` and its like, which remakes it.

    `compile` sets this attribute to `None`. If a callback compiles the model,
    plain Keras calls `None` at the next step. Here the function is made again
    when a running model reads the attribute.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
    """
    key = f"_{kind}_function"

    def get(self: Any) -> Any:
        running = vars(self).get("_running", {})
        if vars(self).get(key) is None and running.get(kind):
            self._check_steps()
            number = running.pop(kind)
            try:
                # Keras's method reads this property, which returns `None`
                # while `kind` is not in `running`.
                getattr(self, f"make_{kind}_function")()
            finally:
                running[kind] += number
        return vars(self).get(key)

    def put(self: Any, function: Any) -> None:
        if function is not None:
            function = upstream.optimized_once(function)
        vars(self)[key] = function

    doc = f"The function of a step, kept from `make_{kind}_function`."
    return property(get, put, doc=doc)


def while_running(kind: str, method: Callable) -> Callable:
    """Wraps `fit`, `evaluate` or `predict`: notes that it runs, and its rows.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
        method: The method.
    """

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
    """Returns the rows of the largest mini-batch that `fit` or its like makes.

    Infinity if that is not known: for any data but arrays.
    """
    try:
        signature = inspect.signature(method)
        given = signature.bind(model, *args, **kwargs).arguments
        x = given.get("x")
        batch_size = given.get("batch_size")
        if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)):
            return math.inf
        rows = min(int(each.shape[0]) for each in keras.tree.flatten(x))
        if batch_size is not None:
            return min(rows, int(batch_size))
        steps = given.get("steps_per_epoch", given.get("steps"))
        whole = steps or "batch_size" not in signature.parameters
        return rows if whole else min(rows, _BATCH_SIZE)
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError):
        # Data without a length, such as a generator, or arguments that Keras
        # will refuse.
        return math.inf


class StepFunctions(upstream.Mixin):
    """Mixin: changes by callbacks take effect at a running model's next step.

    It must come before the `keras.Model` among the bases.
    """

    # The values of the properties below.
    _train_function: Any
    _test_function: Any
    _predict_function: Any
    # By kind of step: how many of `fit` and its like run, one in another.
    _running: collections.Counter
    # `steps_per_execution` when the outermost of them started.
    _running_steps: int
    # For each of them, the rows of its largest mini-batch.
    _expected_rows: list[float]
    # By kind of step: the most rows that the function was traced for.
    _traced_rows: dict[str, float]

    train_function = _remade("train")
    test_function = _remade("test")
    predict_function = _remade("predict")

    def train_on_batch(self, *args, **kwargs):
        # `fit` may have traced the step for fewer rows.
        method = keras.Model.train_on_batch
        rows = _rows_of_arrays(method, self, args, kwargs)
        self._expect_rows("train", rows)
        return super().train_on_batch(*args, **kwargs)

    def _expect_rows(self, kind: str, rows: float) -> None:
        """Drops a step function traced for fewer micro-batches than needed.

        A function is traced for a largest number of rows, as `_rows_at_most`
        returns it, which bounds its number of micro-batches.
        """
        attributes: Any = vars(self)
        traced = attributes.setdefault("_traced_rows", {})
        asked = self._pipeline and self._pipeline.num_micro_batches
        if asked and min(asked, rows) > traced.get(kind, math.inf):
            setattr(self, f"{kind}_function", None)
            del traced[kind]

    def _rows_at_most(self) -> float:
        """Returns the most rows of a mini-batch of the methods that run.

        Called while a step function is traced. The static number of rows is
        then unknown, if the last mini-batch of an epoch has fewer.
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
        # By `repr`: Keras has not checked the new value, which may be anything.
        if repr(self.steps_per_execution) != repr(prepared):
            raise ValueError(
                "`steps_per_execution` cannot change while the model runs, "
                f"because the data has been prepared for {prepared}. "
                f"Received: steps_per_execution={self.steps_per_execution}"
            )
