"""Training steps that follow one another in one graph.

Keras's `steps_per_execution` runs steps in a loop of TensorFlow, which begins
a step when all of the one before is done. In one graph a stage begins the
next step when its own weights are updated:

    device 0   F0 F1 .. .. B0 B1 U F0 F1 .. .. B0 B1 U
    device 1      F0 B0 F1 B1 U  .. F0 B0 F1 B1 U

so that the bubble at the end of a step and that at the beginning of the next
one are one. What takes the gradients of all stages keeps them apart: a norm
over all of them, or a loss scale that follows from whether they are finite.
"""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream

# What is traced grows with them, and the gain is that of few.
_MOST_STEPS = 8


def num_in_one_graph(steps: Any) -> int:
    """Returns how many of `steps_per_execution` are in one graph.

    The largest divisor up to 8.
    """
    if not isinstance(steps, int):
        return 1
    return max(n for n in range(1, _MOST_STEPS + 1) if steps % n == 0)


def make_train_function(
    model: Any, keras_makes: Callable[..., Any], force: bool
) -> None:
    """Makes the function of a model's training steps, of several in a graph.

    Args:
        model: A pipeline.
        keras_makes: Its `make_train_function` as Keras has it.
        force: Boolean, whether to replace one that there is.
    """
    if model.train_function is not None and not force:
        return
    keras_makes(force=force)
    number = num_in_one_graph(model.steps_per_execution)
    # Keras's own loop runs replicas, and what is run eagerly.
    if number > 1 and not (model.run_eagerly or upstream.strategy_of(model)):
        model.train_function = _in_one_graph(
            model, model.train_function, number
        )


def _in_one_graph(
    model: Any, one_by_one: Callable[[Iterator], Any], number: int
) -> Callable[[Iterator], Any]:
    """Returns Keras's function of a model's steps with several in one graph.

    Args:
        model: A pipeline.
        one_by_one: That function as Keras makes it, for data that is no
            `tf.data` iterator.
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
            # With shapes as the dataset tells them, as Keras has them: it
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
    """Returns what Keras gives a step: `None` where a dataset has that."""
    return None if isinstance(x, tf.experimental.Optional) else x
