"""Many tensors as one, within a process."""

from collections.abc import Sequence

import tensorflow as tf


def pack(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors as a single one, or none if there are none.

    A function with hundreds of results, called once a micro-batch, costs
    TensorFlow more time than the layers in it before the first step. Nothing
    is copied. A pack cannot leave the process.
    """
    return [tf.raw_ops.OptionalFromValue(components=tensors)] if tensors else []


def unpack(
    packed: Sequence[tf.Tensor], like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the tensors of a pack.

    Their dtypes and shapes are those of `like`, tensors or variables.
    """
    if not packed:
        return []
    return tf.raw_ops.OptionalGetValue(
        optional=packed[0],
        output_types=[x.dtype for x in like],
        output_shapes=[x.shape for x in like],
    )
