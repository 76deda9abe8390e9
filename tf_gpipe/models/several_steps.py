"""Several training steps of `steps_per_execution` in one graph.

Keras runs these steps in a TensorFlow loop, which begins a step when the whole
previous one is done. In one graph a stage begins the next step as soon as its
own weights are updated (U):

    device 0   F0 F1 .. B0 .. B1 U F0 F1 .. B0 .. B1 U
    device 1      F0 B0 F1 B1 U ..    F0 B0 F1 B1 U

Updates overlap, and so do the ends and starts of steps where the first stage is
not the last one to finish, as with `"zb_v"`. Steps do not overlap if an update
needs the gradients of all stages: clipping by the global norm, or a dynamic
loss scale, which depends on whether they are all finite.
"""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream

# The time of tracing grows with the steps in a graph; the first few give most
# of the gain.
_MOST_STEPS = 8


def num_in_one_graph(steps: Any) -> int:
    """Returns the number of steps in a graph.

    The largest divisor of `steps_per_execution` that is at most 8.
    """
    if not isinstance(steps, int):
        return 1
    return max(n for n in range(1, _MOST_STEPS + 1) if steps % n == 0)


def make_train_function(
    model: Any, keras_makes: Callable[..., Any], force: bool
) -> None:
    """Makes a model's `train_function`, with several steps in a graph.

    Args:
        model: A pipeline.
        keras_makes: The `make_train_function` of `keras.Model`, bound to it.
        force: Boolean, whether to replace an existing function.
    """
    if model.train_function is not None and not force:
        return
    keras_makes(force=force)
    number = num_in_one_graph(model.steps_per_execution)
    # Replicas and eager steps are left to Keras's own loop.
    if number > 1 and not (model.run_eagerly or upstream.strategy_of(model)):
        model.train_function = _in_one_graph(
            model, model.train_function, number
        )


def _in_one_graph(
    model: Any, one_by_one: Callable[[Iterator], Any], number: int
) -> Callable[[Iterator], Any]:
    """Returns a `train_function` that runs several steps in one graph.

    Args:
        model: A pipeline.
        one_by_one: Keras's `train_function`, for data that is no `tf.data`
            iterator.
        number: Integer, the steps in a graph.
    """

    @tf.function(reduce_retracing=True, autograph=False)
    def draw(iterator: tf.data.Iterator) -> list[Any]:
        return [iterator.get_next_as_optional() for _ in range(number)]

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
        for _ in range(model.steps_per_execution // number):
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
