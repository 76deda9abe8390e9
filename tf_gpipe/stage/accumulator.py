"""Sums of many tensors, to which functions add in place.

TensorFlow keeps the inputs of a function alive until the function is done: a
sum passed in and returned would be in memory twice, beside the addends. Here
the function is passed the handle of a variable that holds the sum as a pack.
It takes the pack out of the variable, so that it has the only reference to
the tensors, and each addition reuses the buffer of one of its operands.

The variable lasts until the step is done. In a function that `tf.saved_model`
has loaded it lasts as long as that: TensorFlow gives it a name there.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.function_call import FunctionCall
from tf_gpipe.stage.pack import pack
from tf_gpipe.stage.pack import unpack

_numbers = itertools.count()


def create(like: Sequence[Any]) -> tf.Tensor:
    """Returns the handle of a new accumulator, whose sums are zero.

    Args:
        like: List of tensors, or variables, with the dtypes and shapes of the
            sums.
    """

    def filled() -> tf.Tensor:
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.variant,
            shape=(),
            shared_name=upstream.anonymous_name(),
            # Tells accumulators apart once a loaded function names them.
            container=f"accumulator_{next(_numbers)}",
        )
        # In a loaded function, the variable of the call before.
        destroyed = tf.raw_ops.DestroyResourceOp(
            resource=handle, ignore_lookup_error=True
        )
        # Zero, from an operation that constant folding cannot evaluate: folded,
        # the zeros of all tensors would be constants of the graph.
        with tf.control_dependencies([destroyed]):
            zero = tf.raw_ops.VarIsInitializedOp(resource=handle)
        # Sums of one shape and dtype share a tensor of zeros at first.
        zeros = {(x.shape, x.dtype): None for x in like}
        for shape, dtype in zeros:
            zeros[shape, dtype] = tf.fill(shape, tf.cast(zero, dtype))
        _put(handle, [zeros[x.shape, x.dtype] for x in like])
        return handle

    # A function call ends after its side effects. In the graph that TensorFlow
    # builds for the gradient of a function, nothing else orders them.
    return FunctionCall(filled)()


def add(handle: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors to the sums.

    Returns a tensor that is ready once they have been added.
    """
    sums = [a + b for a, b in zip(take(handle, tensors), tensors, strict=True)]
    return _put(handle, sums)


def take(handle: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    """Takes the sums out of the variable, which is empty afterwards.

    Args:
        handle: Handle from `create`.
        like: As in `create`.
    """
    packed = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.variant)
    with tf.control_dependencies([packed]):
        tf.raw_ops.AssignVariableOp(
            resource=handle, value=tf.raw_ops.OptionalNone()
        )
    return unpack([packed], like)


def _put(handle: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    (packed,) = pack(tensors)
    done = tf.raw_ops.AssignVariableOp(resource=handle, value=packed)
    with tf.control_dependencies([done]):
        return tf.zeros(())
