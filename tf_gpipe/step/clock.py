"""Time stamps in a graph, taken on the device that runs a task."""

from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.stage.function_call import FunctionCall


class Clock:
    """Stamps of the time, which put nothing in order but what they follow.

    TensorFlow chains operations with side effects, `tf.timestamp` among them,
    in the order of the program, and with them a pipeline's devices. A
    `FunctionCall` it leaves in no order. Nor does TensorFlow compute the call
    while it optimises the graph, or take several for one, as it would if the
    call said that it had no side effects.
    """

    def __init__(self) -> None:
        self._now = FunctionCall(tf.timestamp)

    def stamp(self, after: Sequence[tf.Tensor | tf.Operation]) -> tf.Tensor:
        """Returns the time in seconds when all of `after` are there.

        It runs on the device of the scope around it, by that host's clock.
        """
        with tf.control_dependencies(list(after)):
            return self._now()
