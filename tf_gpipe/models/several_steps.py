"""Several training steps of `steps_per_execution` in one graph.

Keras runs these steps in a TensorFlow loop, which begins a step when the whole
previous one is done. In one graph a stage begins the next step as soon as its
own weights are updated (U):

    device 0   F0 F1 .. B0 .. B1 U F0 F1 .. B0 .. B1 U
    device 1      F0 B0 F1 B1 U ..    F0 B0 F1 B1 U

Updates overlap, and so do the ends and starts of steps where the first stage is
not the last one to finish, as with `"zb_v"`. Steps do not overlap if an update
needs the gradients of all stages: clipping by the global norm, a dynamic loss
scale, which depends on whether they are all finite, accumulation of gradients
over steps, or averages of weights that overwrite the weights.
"""

import numbers
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream

# The time of tracing grows with the steps in a graph; the first few give most
# of the gain.
_MOST_STEPS = 8
# Arguments of an optimizer with which no weight is updated before all gradients
# are there.
_NEED_ALL = (
    *("ema_overwrite_frequency", "global_clipnorm"),
    "gradient_accumulation_steps",
)


def num_in_one_graph(steps: Any) -> int:
    """Returns the number of steps in a graph.

    The largest divisor of `steps_per_execution` that is at most 8.
    """
    if not isinstance(steps, numbers.Integral):
        return 1
    return max(n for n in range(1, _MOST_STEPS + 1) if steps % n == 0)


def number(model: Any) -> int:
    """Returns the number of steps in a graph of a compiled model."""
    # Replicas and eager steps are left to Keras's own loop.
    if model.run_eagerly or upstream.strategy_of(model):
        return 1
    return num_in_one_graph(model.steps_per_execution)


def waits(model: Any) -> str:
    """Returns a note on why stages wait for each other between steps.

    It is empty if they do not, or if an execution has only one step.
    """
    if not model.compiled or model.steps_per_execution == 1:
        return ""
    if number(model) == 1:
        why = "each step has a graph of its own"
    elif isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        why = "the loss scale depends on all gradients"
    else:
        named = [
            x
            for x in _NEED_ALL
            if getattr(model.optimizer, x, None)
            and (model.optimizer.use_ema or not x.startswith("ema"))
        ]
        why = f"the optimizer needs all gradients: {', '.join(named)}"
        if not named:
            return ""
    return f"Between steps, stages wait for each other ({why})."


def in_one_graph(
    model: Any, one_by_one: Callable[[Iterator], Any], count: int
) -> Callable[[Iterator], Any]:
    """Returns a `train_function` that runs several steps in one graph.

    Args:
        model: A pipeline.
        one_by_one: Keras's `train_function`, for data that is no `tf.data`
            iterator.
        count: Integer, the steps in a graph.
    """

    @tf.function(reduce_retracing=True, autograph=False)
    def draw(iterator: tf.data.Iterator) -> list[Any]:
        return [iterator.get_next_as_optional() for _ in range(count)]

    @tf.function(reduce_retracing=True, autograph=False)
    def run(drawn: list[Any]) -> Any:
        with model._steps_in_one_graph():
            for each in drawn:
                data = tf.nest.map_structure(_given, each.get_value())
                logs = model.train_step(data)
        return logs

    def function(iterator: Iterator) -> Any:
        if not isinstance(iterator, tf.data.Iterator):
            return one_by_one(iterator)
        logs = None
        for _ in range(model.steps_per_execution // count):
            drawn = draw(iterator)
            if drawn[-1].has_value():
                logs = run(drawn)
                continue
            # Mini-batches keep the dataset's static shapes, as in Keras, which
            # weighs the losses of outputs by rows if it knows how many.
            for x in drawn:
                if x.has_value():
                    logs = run([x])
            break
        if logs is None:
            raise StopIteration
        return logs

    return function


def _given(x: Any) -> Any:
    """Returns a component of a mini-batch as Keras passes it to a step.

    A `None` in a dataset arrives as an `Optional`.
    """
    return None if isinstance(x, tf.experimental.Optional) else x
