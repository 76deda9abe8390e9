"""Variables that layers assign within a loop or a branch.

TensorFlow traces the body of a loop, such as that of a recurrent layer, as a
graph of its own. A tensor of that graph, the new value of a variable, does not
exist outside of it. So such a variable is held in a variable of the run:

    value before -> held -> loop (reads held, assigns held) -> value after

That a variable is assigned in a body is known once the body is traced, and it
must be held before that. So the stage is traced a second time.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream


class AssignedWithin(ValueError):
    """Raised by a trace which has found variables that must be held."""

    def __init__(self, variable: keras.Variable, stage: int, device: str):
        super().__init__(
            f"Layers of stage {stage} on {device} assign variable "
            f"'{variable.path}' within a loop or a branch, such as that of a "
            "recurrent layer. That is not possible under XLA (TPUs, "
            "jit_compile=True), nor beside synchronized batch normalisation. "
            "Assign it outside of the loop; draw random numbers there, too."
        )


def retraced(trace: Callable[[], Any]) -> Any:
    """Returns the result of a function that traces stages.

    It is called again as long as it finds more variables that must be held,
    which each `StageFunction` notes.
    """
    while True:
        try:
            return trace()
        except AssignedWithin:
            pass


def is_within(graph: Any) -> bool:
    """Returns whether a loop or a branch of a graph is being traced."""
    around = upstream.graphs_being_built()[1:]
    return not tf.executing_eagerly() and graph in around


class Held:
    """A value that loops and branches of a graph may change.

    It has no gradient.

    Args:
        graph: The graph. One of a loop or a branch in it may be traced.
        value: The first value, a tensor of it.

    Attributes:
        handle: The handle of a variable that lasts until the graph has run.
    """

    def __init__(self, graph: tf.Graph, value: tf.Tensor):
        self._dtype = value.dtype
        self._shape = value.shape
        with graph.as_default():
            # Integers, for which TensorFlow looks for no gradient.
            self.handle = tf.raw_ops.VarHandleOp(
                dtype=tf.int64,
                shape=_as_integers(value).shape,
                shared_name=upstream.anonymous_name(),
            )
            self.assign(value)

    def assign(self, value: tf.Tensor) -> None:
        """Assigns a value of the same dtype and shape."""
        tf.raw_ops.AssignVariableOp(
            resource=self.handle, value=_as_integers(value)
        )

    def read(self) -> tf.Tensor:
        """Returns the current value."""
        found = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=tf.int64)
        if self._dtype.is_floating or self._dtype.is_complex:
            kind = _integers_of(self._dtype)
            found = tf.bitcast(tf.cast(found, kind), self._dtype)
        return tf.ensure_shape(tf.cast(found, self._dtype), self._shape)


def _as_integers(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_floating or value.dtype.is_complex:
        value = tf.bitcast(tf.stop_gradient(value), _integers_of(value.dtype))
    return tf.cast(value, tf.int64)


def _integers_of(dtype: tf.DType) -> tf.DType:
    return {2: tf.int16, 4: tf.int32}.get(dtype.size, tf.int64)
