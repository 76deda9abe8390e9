"""Time stamps in a graph, taken when a device has run a task."""

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
        self._marker = FunctionCall(_marker)
        self._now_after = FunctionCall(lambda zero: tf.timestamp() + zero)

    def stamp(
        self, after: Sequence[tf.Tensor | tf.Operation], device: str
    ) -> tf.Tensor:
        """Returns the time in seconds when all of `after` are computed.

        It is by the clock of the host of `device`, in whose scope the caller
        is.

        TensorFlow takes an operation of a GPU for done once its kernels are
        queued. So the time is taken after a copy to the host of a scalar that
        the GPU makes after these kernels:

            GPU     kernels of `after` -> marker
                                            | copy
            host                            '-> timestamp
        """
        with tf.control_dependencies(list(after)):
            if tf.DeviceSpec.from_string(device).device_type != "GPU":
                return self._now()
            # Under its name, in the scope of a task, a profile has it.
            marker = tf.abs(self._marker(), name="kernels_done")
        with tf.device("CPU:0"):
            return self._now_after(marker)


def _marker() -> tf.Tensor:
    """Returns a zero that TensorFlow does not know while it makes a graph."""
    return tf.raw_ops.Empty(shape=[], dtype=tf.float64, init=True)
