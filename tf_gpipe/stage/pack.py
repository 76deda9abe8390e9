"""Packs: many tensors as one variant tensor, within a process."""

from collections.abc import Sequence

import tensorflow as tf

# The most tensors in a pack without inner packs. TensorFlow notes the types of
# all of them for each of them: with hundreds that takes longer to trace than
# the layers that make them.
_WIDTH = 16


def pack(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns a list of one tensor that holds all `tensors`, or an empty list.

    A function with hundreds of results, called once per micro-batch, takes
    TensorFlow longer to prepare for the first step than the layers in it.
    Nothing is copied. A pack cannot be sent to another process.

    Many tensors are a pack of packs: ((a b c d) (e f g h) (i j)).
    """
    if len(tensors) > _WIDTH:
        return pack([x for part in _parts(tensors) for x in pack(part)])
    return [tf.raw_ops.OptionalFromValue(components=tensors)] if tensors else []


def unpack(
    packed: Sequence[tf.Tensor], like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the tensors of a pack.

    Args:
        packed: List from `pack`.
        like: Tensors or variables with the dtypes and shapes of the packed
            tensors.
    """
    if not packed:
        return []
    if len(like) > _WIDTH:
        parts = _parts(like)
        inner = unpack(packed, [tf.TensorSpec((), tf.variant)] * len(parts))
        pairs = zip(inner, parts, strict=True)
        return [x for each, part in pairs for x in unpack([each], part)]
    return tf.raw_ops.OptionalGetValue(
        optional=packed[0],
        output_types=[x.dtype for x in like],
        output_shapes=[x.shape for x in like],
    )


def _parts(tensors: Sequence[tf.Tensor]) -> list[Sequence[tf.Tensor]]:
    starts = range(0, len(tensors), _WIDTH)
    return [tensors[i : i + _WIDTH] for i in starts]
