"""Time stamps in a graph, taken on the device that runs a task."""

from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.stage.function_call import FunctionCall


class Clock:
    """Stamps of the time, which put nothing in order but what they follow.

    TensorFlow chains operations with side effects, `tf.timestamp` among them,
    in the order of the program, and with them a pipeline's devices. In a
    function whose call says that it has none, it does not.
    """

    def __init__(self) -> None:
        self._now = FunctionCall(
            lambda token: tf.timestamp() + token, stateless=True
        )

    def stamp(self, after: Sequence[tf.Tensor | tf.Operation]) -> tf.Tensor:
        """Returns the time in seconds when all of `after` are there.

        It runs on the device of the scope around it, by that host's clock.
        """
        with tf.control_dependencies(list(after)):
            token = tf.zeros((), tf.float64)
        return self._now(token)
