"""Graph search: operations that are reachable from others."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Container
from collections.abc import Iterable

import tensorflow as tf

# Operations whose result depends only on the shape of their input.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank", "OnesLike", "ZerosLike")


def followed_values(tensor: tf.Tensor) -> set[tf.Operation]:
    """Returns the operations whose values, not only shapes, a tensor needs.

    The operation that makes the tensor is one of them.
    """
    return reached(
        [tensor.op],
        lambda op: [] if op.type in _SHAPES else [x.op for x in op.inputs],
    )


def follows(tensor: tf.Tensor, sources: Container[tf.Operation]) -> bool:
    """Returns whether a tensor needs the values of one of some operations."""
    return any(op in sources for op in followed_values(tensor))


def reached(
    start: Iterable[tf.Operation],
    following: Callable[[tf.Operation], Iterable[tf.Operation]],
    without: Collection[tf.Operation] = (),
) -> set[tf.Operation]:
    """Returns the operations that can be reached from `start`, included.

    Args:
        start: Operations.
        following: Function from an operation to its neighbours.
        without: Operations at which the search stops; they are left out.
    """
    found: set[tf.Operation] = set()
    rest = list(start)
    while rest:
        op = rest.pop()
        if op not in found and op not in without:
            found.add(op)
            rest += following(op)
    return found
