"""What operations of a graph lead to, or follow from."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable

import tensorflow as tf

# Operations that take no more of a tensor than its shape.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank", "OnesLike", "ZerosLike")


def followed_values(tensor: tf.Tensor) -> set[tf.Operation]:
    """Returns the operations whose values, not shapes, a tensor follows from.

    That which made the tensor is one of them.
    """
    return reached(
        [tensor.op],
        lambda op: [] if op.type in _SHAPES else [x.op for x in op.inputs],
    )


def reached(
    start: Iterable[tf.Operation],
    following: Callable[[tf.Operation], Iterable[tf.Operation]],
    without: Collection[tf.Operation] = (),
) -> set[tf.Operation]:
    """Returns operations, and those that `following` leads to from there."""
    found: set[tf.Operation] = set()
    rest = list(start)
    while rest:
        op = rest.pop()
        if op not in found and op not in without:
            found.add(op)
            rest += following(op)
    return found
