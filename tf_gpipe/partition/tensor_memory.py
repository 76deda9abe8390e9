"""The sizes in bytes of a graph's tensors, and which of them share memory."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.partition import flops

# Operations whose result shares the memory of their first input.
_ALIASES = frozenset(
    """Identity IdentityN Reshape Squeeze ExpandDims StopGradient
    PreventGradient EnsureShape""".split()
)


def size_in_bytes(tensors: Any) -> int:
    """Returns the bytes of all tensors in a nested structure.

    Unknown sizes count as 1.
    """
    return sum(
        math.prod(n or 1 for n in x.shape) * tf.as_dtype(x.dtype).size
        for x in keras.tree.flatten(tensors)
        if x is not None
    )


def memory_owner(x: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory `x` shares, or `x` itself."""
    op = x.op
    if op.type in _ALIASES:
        return memory_owner(
            op.inputs[x.value_index if op.type == "IdentityN" else 0]
        )
    # The outputs of a function include all that its gradient reads. Where that
    # is an argument, the caller's tensor holds it.
    if op.type.endswith(("PartitionedCall", "While")):
        (body,) = flops.called_by(op)
        root = memory_owner(body.outputs[x.value_index])
        for i, given in enumerate(body.inputs):
            # A loop variable keeps its first value if no iteration changes it.
            if root is given and not (
                op.type.endswith("While") and i != x.value_index
            ):
                return memory_owner(op.inputs[i])
    return x


def kept_bytes(x: tf.Tensor) -> int:
    """Returns the bytes of a tensor, or of a while loop's `TensorList`.

    Such a list has one tensor for each iteration of the loop.
    """
    if x.dtype != tf.variant or not x.op.type.endswith("While"):
        return size_in_bytes(x)
    start = x.op.inputs[x.value_index]
    if start.op.type not in ("EmptyTensorList", "TensorListReserve"):
        return 0
    (body,) = flops.called_by(x.op)
    push = body.outputs[x.value_index].op
    if push.type == "Identity":
        push = push.inputs[0].op
    return flops.iterations(x.op) * size_in_bytes(push.inputs[-1])
