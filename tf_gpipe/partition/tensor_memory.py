"""How much memory tensors of a graph take, and which of them share it."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.partition import flops

# Operations whose result shares the memory of their first input.
_ALIASES = frozenset(
    """Identity IdentityN Reshape Squeeze ExpandDims StopGradient
    PreventGradient EnsureShape""".split()
)
# Operations that may write their result where an operand was.
_IN_PLACE = frozenset(
    """Abs Add AddN AddV2 BiasAdd Cos Div EluGrad Erf Exp LeakyReluGrad Log Mul
    Neg RealDiv Relu6Grad ReluGrad Rsqrt RsqrtGrad SeluGrad Sigmoid SigmoidGrad
    Sign Sin Softmax Sqrt Square SquaredDifference Sub Tanh TanhGrad""".split()
)


def size_in_bytes(tensors: Any) -> int:
    """Returns the size of the tensors in a nested structure.

    An unknown number of rows is taken for 1.
    """
    return sum(
        math.prod(n or 1 for n in x.shape) * tf.as_dtype(x.dtype).size
        for x in keras.tree.flatten(tensors)
        if x is not None
    )


def peak(operations: Sequence[tf.Operation], results: Any) -> int:
    """Returns the most bytes that operations hold at a time of what they make.

    They run one after another. A tensor is there until its last use, the
    results until the end, and what is made element by element may be where an
    operand was that is not used again.
    """
    last: dict[str, int] = {}
    for place, op in enumerate(operations):
        last |= {holder(x).name: place for x in op.inputs}
    last |= {holder(x).name: len(operations) for x in results if x is not None}
    held = most = 0
    there: dict[str, int] = {}
    for place, op in enumerate(operations):
        made = {
            x.name: size_in_bytes(x)
            for x in op.outputs
            if holder(x) is x
            and x.dtype != tf.variant
            and x.shape.is_fully_defined()
        }
        done = {
            name: there.pop(name)
            for name in {holder(x).name for x in op.inputs}
            if name in there and last[name] == place
        }
        reused = 0
        if op.type in _IN_PLACE and made:
            reused = max(
                (x for x in done.values() if x in made.values()), default=0
            )
        most = max(most, held + sum(made.values()) - reused)
        held += sum(made.values()) - sum(done.values())
        there |= made
        for name in made:
            if name not in last:
                held -= there.pop(name)
    return most


def holder(x: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory `x` shares."""
    op = x.op
    if op.type in _ALIASES:
        return holder(op.inputs[x.value_index if op.type == "IdentityN" else 0])
    # Functions return whatever their gradients need, their arguments, too.
    if op.type.endswith(("PartitionedCall", "While")):
        (body,) = flops.called_by(op)
        root = holder(body.outputs[x.value_index])
        for i, given in enumerate(body.inputs):
            # A loop variable keeps its first value if no iteration changes it.
            if root is given and not (
                op.type.endswith("While") and i != x.value_index
            ):
                return holder(op.inputs[i])
    return x


def kept_bytes(x: tf.Tensor) -> int:
    """Returns the size of a tensor, or of a loop's list with one a step."""
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
