"""Many tensors as one, within a process."""

from collections.abc import Sequence

import tensorflow as tf

# How many tensors a pack holds itself. TensorFlow notes the types of all of
# them for each of them: with hundreds that takes longer than their layers.
_WIDTH = 16


def pack(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors as a single one, or none if there are none.

    A function with hundreds of results, called once a micro-batch, costs
    TensorFlow more time than the layers in it before the first step. Nothing
    is copied. A pack cannot leave the process.

    Many tensors are a pack of packs: ((a b c d) (e f g h) (i j)).
    """
    if len(tensors) > _WIDTH:
        return pack([x for part in _parts(tensors) for x in pack(part)])
    return [tf.raw_ops.OptionalFromValue(components=tensors)] if tensors else []


def unpack(
    packed: Sequence[tf.Tensor], like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the tensors of a pack.

    Their dtypes and shapes are those of `like`, tensors or variables.
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
