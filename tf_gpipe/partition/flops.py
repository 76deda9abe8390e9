"""Floating-point operations of a TensorFlow graph, counted from its shapes.

A multiplication and an addition are two operations. Elementwise operations,
transcendental ones too, count one for each element of the result, reductions
one for each element of the operand, and moving data counts nothing.
"""

import math
from collections.abc import Iterable
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tf_gpipe import upstream

# Operations without arithmetic: they only move numbers, or generate them.
_NO_ARITHMETIC = frozenset(
    """
    BatchToSpaceND BroadcastTo Cast ConcatV2 Const DepthToSpace DynamicStitch
    EnsureShape Enter ExpandDims Fill Gather GatherNd GatherV2 Identity
    IdentityN MirrorPad MirrorPadGrad OneHot OnesLike Pack Pad PadV2
    Placeholder PlaceholderWithDefault PreventGradient RandomUniform
    ReadVariableOp Reshape ResourceGather ReverseV2 ScatterNd Slice
    SpaceToBatchND SpaceToDepth Split SplitV Squeeze StatelessRandomNormalV2
    StatelessRandomUniformV2 StopGradient StridedSlice StridedSliceGrad
    TensorListGetItem TensorListPopBack TensorListStack TensorScatterUpdate
    Tile Transpose Unpack ZerosLike
    """.split()
)
# Operations without memory traffic, as their result is in the memory of an
# operand, argument or variable.
_NO_TRAFFIC = frozenset(
    """
    Const EnsureShape Enter ExpandDims Identity IdentityN NoOp Placeholder
    PlaceholderWithDefault PreventGradient ReadVariableOp Reshape Shape Squeeze
    StopGradient
    """.split()
)
_REDUCTIONS = frozenset("Sum Mean Prod Max Min All Any L2Loss".split())
_POOLS = frozenset("MaxPool AvgPool MaxPool3D AvgPool3D".split())
# By kind of operation, the attributes that name the functions it calls.
_CALLS = {
    "PartitionedCall": ("f",),
    "While": ("body",),
    "If": ("then_branch", "else_branch"),
}


def count(operations: Iterable[tf.Operation]) -> int:
    """Returns the number of floating-point operations (FLOPs).

    Raises:
        ValueError: If a shape, or how often a loop runs, is not known.
    """
    return sum(_count(op) for op in operations)


class Traffic(NamedTuple):
    """The cost of operations beside their arithmetic.

    Attributes:
        moved: Integer, the bytes that they read and write.
        operations: Integer, the number of operations that a device launches.
    """

    moved: int = 0
    operations: int = 0


def traffic(operations: Iterable[tf.Operation]) -> Traffic:
    """Returns the `Traffic` of operations of a graph.

    Each operation is taken to read its operands from memory and to write its
    results there: fusion is not considered.

    Raises:
        ValueError: If a shape, or how often a loop runs, is not known.
    """
    moved = started = 0
    for op in operations:
        called = [traffic(graph.get_operations()) for graph in called_by(op)]
        if called:
            times = iterations(op) if op.type.endswith("While") else 1
            most = max(called)
            moved += times * most.moved
            started += times * most.operations
        elif op.type not in _NO_TRAFFIC:
            moved += sum(_bytes(x) for x in (*op.inputs, *op.outputs))
            started += 1
    return Traffic(moved, started)


def _bytes(x: tf.Tensor) -> int:
    # Integer tensors are mostly axes and shapes: small, often of unknown size.
    return _size(x) * x.dtype.size if x.dtype.is_floating else 0


def _count(op: tf.Operation) -> int:
    kind = op.type
    if kind in _NO_ARITHMETIC:
        return 0
    if kind == "MatMul" or kind.startswith("BatchMatMul"):
        name = "transpose_a" if kind == "MatMul" else "adj_x"
        depth = shape_of(op.inputs[0])[-2 if op.get_attr(name) else -1]
        return 2 * _size(op.outputs[0]) * depth
    if kind == "Einsum":
        return _einsum(op)
    if kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2d")):
        return _convolution(op)
    if kind.startswith("CudnnRNN"):
        # Each position is multiplied with all weights; in the backward pass
        # twice, for the gradients by the weights and by the position.
        positions = math.prod(shape_of(op.inputs[0])[:-1])
        passes = 2 if "Backprop" in kind else 1
        return 2 * passes * positions * _size(op.inputs[3])
    if kind.startswith("FusedBatchNormGrad"):
        return 11 * _size(op.outputs[0])
    if kind.startswith("FusedBatchNorm"):
        # For each element: mean 1, squared difference and its mean 2, scale
        # and offset 2.
        return (5 if op.get_attr("is_training") else 2) * _size(op.outputs[0])
    if kind.removesuffix("Grad") in _POOLS:
        pooled = op.inputs[-1] if kind.endswith("Grad") else op.outputs[0]
        return _size(pooled) * math.prod(op.get_attr("ksize"))
    if kind in ("Softmax", "LogSoftmax"):
        # Maximum, subtraction, exponential, sum, division.
        return 5 * _size(op.outputs[0])
    if kind == "BiasAddGrad" or kind in _REDUCTIONS:
        return _size(op.inputs[0]) if op.inputs[0].dtype.is_floating else 0
    if kind == "AddN":
        return _size(op.outputs[0]) * (len(op.inputs) - 1)
    called = [count(graph.get_operations()) for graph in called_by(op)]
    if called:
        # One of several branches runs.
        times = iterations(op) if kind.endswith("While") else 1
        return times * max(called)
    return sum(_size(x) for x in op.outputs if x.dtype.is_floating)


def _einsum(op: tf.Operation) -> int:
    inputs, _, output = op.get_attr("equation").decode().partition("->")
    # The size of the axis of each label; "." stands for the ellipsis's axes.
    sizes: dict[str, int] = {}
    for term, operand in zip(inputs.split(","), op.inputs, strict=True):
        shape = shape_of(operand)
        head, dots, tail = term.partition("...")
        sizes.update(zip(head, shape, strict=False))
        sizes.update(zip(reversed(tail), reversed(shape), strict=False))
        if dots:
            middle = shape[len(head) : len(shape) - len(tail)]
            sizes["."] = max(sizes.get(".", 1), math.prod(middle))
    contracts = not set(output).issuperset(sizes) and len(op.inputs) > 1
    return math.prod(sizes.values()) * (2 if contracts else 1)


def _convolution(op: tf.Operation) -> int:
    """Returns the FLOPs of a convolution, or of either of its gradients.

    The three are equal: each multiplies every element of the forward pass's
    output with every element of the filter that it depends on.
    """
    output = op.inputs[2] if "Backprop" in op.type else op.outputs[0]
    kernel = op.outputs[0] if "BackpropFilter" in op.type else op.inputs[1]
    taps = shape_of(kernel)[: -2 if op.type.startswith("Depthwise") else -1]
    return 2 * _size(output) * math.prod(taps)


def iterations(op: tf.Operation) -> int:
    """Returns the number of iterations of a while loop.

    Raises:
        ValueError: If it is not known from the graph.
    """
    # The first loop variable of TensorFlow's while loops is the counter, the
    # second one the maximum number of iterations.
    limit = op.inputs[1]
    if limit.op.type == "Max":  # as Keras's recurrent layers make it
        limit = limit.op.inputs[0]
    limit = tf.get_static_value(limit)
    if limit is None or limit < 0:
        raise ValueError(f"how often the loop '{op.name}' runs is not known")
    return int(limit)


def called_by(op: tf.Operation) -> list[Any]:
    """Returns the graphs of the functions that an operation calls."""
    kind = op.type.removeprefix("Stateless").removeprefix("Stateful")
    functions = [op.get_attr(name) for name in _CALLS.get(kind, ())]
    if kind == "Case":
        functions = op.get_attr("branches")
    found = [
        upstream.function_of(op.graph, function.name) for function in functions
    ]
    for function, known in zip(functions, found, strict=True):
        if known is None:
            raise ValueError(f"the function '{function.name}' is not known")
    return [x.graph for x in found]


def _size(x: tf.Tensor) -> int:
    return math.prod(shape_of(x))


def shape_of(x: tf.Tensor) -> list[int]:
    """Returns the shape of a tensor.

    Raises:
        ValueError: If a size of it is unknown.
    """
    if not x.shape.is_fully_defined():
        raise ValueError(f"the shape of '{x.name}' is not known")
    return x.shape.as_list()
