"""Sums of many tensors, to which functions add in place.

TensorFlow keeps what a function is given until the function is done: a sum
that goes in and comes out is there twice, beside what is added to it. Here
goes in the handle of a variable that holds the sum, as a pack. The function
takes the pack out, so that nobody else has its tensors, and each addition
writes where one of its operands was.

The variable lasts until the step is done.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.function_call import FunctionCall
from tf_gpipe.stage.pack import pack
from tf_gpipe.stage.pack import unpack


def create(like: Sequence[Any]) -> tf.Tensor:
    """Returns the handle of a sum that is zero.

    Args:
        like: List of tensors, or variables, of the dtypes and shapes.
    """

    def filled() -> tf.Tensor:
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.variant, shape=(), shared_name=upstream.anonymous_name()
        )
        # Zero, by an operation that TensorFlow cannot run beforehand: it would
        # keep the zeros of all tensors as constants.
        zero = tf.raw_ops.VarIsInitializedOp(resource=handle)
        # Those alike are one tensor until something is added to them.
        zeros = {(x.shape, x.dtype): None for x in like}
        for shape, dtype in zeros:
            zeros[shape, dtype] = tf.fill(shape, tf.cast(zero, dtype))
        _put(handle, [zeros[x.shape, x.dtype] for x in like])
        return handle

    # A function is done when its effects are. In the graph that TensorFlow
    # builds for the gradient of a function, effects have no other order.
    return FunctionCall(filled)()


def add(handle: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors to a sum. Returns a tensor that is ready afterwards."""
    sums = [a + b for a, b in zip(take(handle, tensors), tensors, strict=True)]
    return _put(handle, sums)


def take(handle: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    """Returns a sum, of which the variable keeps nothing.

    Args:
        handle: What `create` has returned.
        like: As of `create`.
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
