"""Time stamps in a graph, taken when a device starts and ends a task."""

from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.stage.function_call import FunctionCall


class Clock:
    """Time stamps that depend only on the operations they are taken after.

    TensorFlow chains operations with side effects, `tf.timestamp` among them,
    in program order, which would make a pipeline's devices wait for each
    other. It does not order a `FunctionCall`. The call is still marked as
    having side effects, so that TensorFlow neither evaluates it while it
    optimises the graph nor merges several calls into one.
    """

    def __init__(self) -> None:
        self._now = FunctionCall(tf.timestamp)
        self._marker = FunctionCall(_marker)
        self._now_after = FunctionCall(lambda zero: tf.timestamp() + zero)

    def stamp(
        self, after: Sequence[tf.Tensor | tf.Operation], device: str
    ) -> tf.Tensor:
        """Returns the time in seconds when all of `after` are computed.

        By the clock of the host of `device`. The caller must be in the scope
        of `device`.

        For TensorFlow an operation on a GPU is done once its kernels are
        queued. So the time is taken when a scalar that the GPU makes after
        these kernels has been copied to the host:

            GPU     kernels of `after` -> marker
                                            | copy
            host                            '-> timestamp
        """
        with tf.control_dependencies(list(after)):
            if tf.DeviceSpec.from_string(device).device_type != "GPU":
                return self._now()
            # A profile shows this name in the name scope of the task.
            marker = tf.abs(self._marker(), name="kernels_done")
        with tf.device("CPU:0"):
            return self._now_after(marker)


def _marker() -> tf.Tensor:
    """Returns a zero that constant folding cannot evaluate."""
    return tf.raw_ops.Empty(shape=[], dtype=tf.float64, init=True)
