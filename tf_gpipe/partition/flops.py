"""Floating-point operations of a TensorFlow graph, counted from its shapes.

A multiplication and an addition are two operations. Elementwise operations,
transcendental ones too, count one for each element of the result, reductions
one for each element of the operand, and moving data counts nothing.
"""

import math
from collections.abc import Iterable

import tensorflow as tf

# What only moves data, makes it up, or works on shapes and integers.
_FREE = frozenset(
    """
    Assert AssignAddVariableOp AssignSubVariableOp AssignVariableOp
    BatchToSpaceND BroadcastArgs BroadcastGradientArgs BroadcastTo Cast Const
    ConcatV2 DepthToSpace DynamicStitch Enter EnsureShape ExpandDims Fill
    Gather GatherNd GatherV2 Identity IdentityN InvertPermutation MirrorPad
    MirrorPadGrad NoOp OneHot OnesLike Pack Pad PadV2 Placeholder
    PlaceholderWithDefault PreventGradient Rank ReadVariableOp Reshape
    ReverseV2 ResourceGather ScatterNd Shape ShapeN Size Slice SpaceToBatchND
    SpaceToDepth Split SplitV Squeeze StopGradient StridedSlice
    StridedSliceGrad TensorListElementShape TensorListFromTensor
    TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack
    TensorListReserve TensorListSetItem TensorListStack TensorScatterUpdate
    TensorShape Tile Transpose Unpack VarHandleOp Where ZerosLike
    StatelessRandomUniformV2 StatelessRandomNormalV2
    StatelessRandomGetKeyCounter StatelessRandomGetAlg RandomUniform
    """.split()
)
_REDUCTIONS = frozenset("Sum Mean Prod Max Min All Any L2Loss".split())


_POOL_GRADIENTS = frozenset(
    "MaxPoolGrad AvgPoolGrad MaxPool3DGrad AvgPool3DGrad".split()
)


def count(operations: Iterable[tf.Operation]) -> int:
    """Returns the floating-point operations of `operations`.

    Args:
        operations: List of operations of a graph, of static shapes.

    Returns:
        Integer.

    Raises:
        ValueError: If a shape, or how often a loop runs, is not known.
    """
    return sum(_count(op) for op in operations)


def _count(op: tf.Operation) -> int:
    kind = op.type
    if kind in _FREE:
        return 0
    if kind == "MatMul":
        a = op.inputs[0].shape
        depth = a[0 if op.get_attr("transpose_a") else 1]
        return 2 * _size(op.outputs[0]) * depth
    if kind.startswith("BatchMatMul"):
        a = op.inputs[0].shape
        depth = a[-2 if op.get_attr("adj_x") else -1]
        return 2 * _size(op.outputs[0]) * depth
    if kind == "Einsum":
        return _einsum(op)
    if kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2d")):
        return _convolution(op)
    if kind.startswith("FusedBatchNormGrad"):
        return 11 * _size(op.outputs[0])
    if kind.startswith("FusedBatchNorm"):
        # Mean 1, squared difference and its mean 2, a product and a sum 2.
        return (5 if op.get_attr("is_training") else 2) * _size(op.outputs[0])
    if kind in ("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"):
        return _size(op.outputs[0]) * math.prod(op.get_attr("ksize"))
    if kind in _POOL_GRADIENTS:
        return _size(op.inputs[-1]) * math.prod(op.get_attr("ksize"))
    if kind in ("Softmax", "LogSoftmax"):
        # Maximum, subtraction, exponential, sum, division.
        return 5 * _size(op.outputs[0])
    if kind == "BiasAddGrad" or kind in _REDUCTIONS:
        return _size(op.inputs[0]) if op.inputs[0].dtype.is_floating else 0
    if kind == "AddN":
        return _size(op.outputs[0]) * (len(op.inputs) - 1)
    if kind in ("While", "StatelessWhile"):
        return iterations(op) * _count_function(op, op.get_attr("body").name)
    if kind in ("If", "StatelessIf", "Case", "StatelessCase"):
        names = (
            [op.get_attr("then_branch"), op.get_attr("else_branch")]
            if kind.endswith("If")
            else op.get_attr("branches")
        )
        return max(_count_function(op, f.name) for f in names)
    if kind in ("PartitionedCall", "StatefulPartitionedCall"):
        return _count_function(op, op.get_attr("f").name)
    return sum(_size(x) for x in op.outputs if x.dtype.is_floating)


def _einsum(op: tf.Operation) -> int:
    inputs, _, output = op.get_attr("equation").decode().partition("->")
    sizes: dict[str, int] = {}
    labels = ""
    for term, operand in zip(inputs.split(","), op.inputs, strict=True):
        shape = _shape(operand)
        head, dots, tail = term.partition("...")
        sizes.update(zip(head, shape, strict=False))
        sizes.update(zip(reversed(tail), reversed(shape), strict=False))
        if dots:
            middle = shape[len(head) : len(shape) - len(tail)]
            sizes["."] = max(sizes.get(".", 1), math.prod(middle))
            labels += "."
        labels += head + tail
    total = math.prod(sizes[label] for label in set(labels))
    contracted = set(labels) - set(output)
    return total * (2 if contracted and len(op.inputs) > 1 else 1)


def _convolution(op: tf.Operation) -> int:
    """Returns the operations of a convolution or of one of its gradients.

    All three multiply each element of the forward pass's output with each
    element of the filter that it depends on.
    """
    if "BackpropInput" in op.type:
        kernel, output = _shape(op.inputs[1]), op.inputs[2]
    elif "BackpropFilter" in op.type:
        kernel, output = _shape(op.outputs[0]), op.inputs[2]
    else:
        kernel, output = _shape(op.inputs[1]), op.outputs[0]
    if op.type.startswith("Depthwise"):
        taps = kernel[:-2]
    else:
        taps = kernel[:-1]
    return 2 * _size(output) * math.prod(taps)


def iterations(op: tf.Operation) -> int:
    """Returns how often a loop runs."""
    # TensorFlow's while loops count in their first variable, and carry the
    # most that they may run in the second.
    limit = op.inputs[1]
    if limit.op.type == "Max":  # as Keras's recurrent layers make it
        limit = limit.op.inputs[0]
    limit = tf.get_static_value(limit)
    if limit is None or limit < 0:
        raise ValueError(f"how often the loop '{op.name}' runs is not known")
    return int(limit)


def _count_function(op: tf.Operation, name: str) -> int:
    function = op.graph._get_function(name)
    if function is None:
        raise ValueError(f"the function '{name}' is not known")
    return count(function.graph.get_operations())


def _size(x: tf.Tensor) -> int:
    return math.prod(_shape(x))


def _shape(x: tf.Tensor) -> list[int]:
    if not x.shape.is_fully_defined():
        raise ValueError(f"the shape of '{x.name}' is not known")
    return x.shape.as_list()
