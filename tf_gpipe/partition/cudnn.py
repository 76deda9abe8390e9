"""Shapes that TensorFlow cannot infer for cuDNN's recurrent layers.

Keras runs LSTM and GRU layers with cuDNN where TensorFlow sees a GPU.
"""

import math
from typing import Any

import tensorflow as tf

from tf_gpipe.partition import flops

# The number of gates, by the attribute `rnn_mode` of an operation.
_GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}
# The index of the output `reserve_space`, which the backward pass reads.
_RESERVED = 3


def tell_shapes(graph: Any) -> None:
    """Sets the shapes of the tensors that recurrent layers keep for backward.

    Their size is known to cuDNN once the layer runs, and to TensorFlow not at
    all. The shape set here is an estimate: the gates, the cell and the output
    of each position.

    Args:
        graph: A `tf.Graph` whose other shapes are known. The functions that it
            calls are changed too.
    """
    for op in graph.get_operations():
        for called in flops.called_by(op):
            tell_shapes(called)
        if op.type in ("CudnnRNNV2", "CudnnRNNV3"):
            positions, units = _sizes(op)
            gates = _GATES[op.get_attr("rnn_mode").decode()]
            op.outputs[_RESERVED].set_shape([positions * units * (gates + 2)])
            # `host_reserved`, a description of the layer, takes no device
            # memory.
            op.outputs[_RESERVED + 1].set_shape([0])


def _sizes(op: tf.Operation) -> tuple[int, int]:
    """Returns the number of positions of all rows together, and of units."""
    *positions, _ = flops.shape_of(op.inputs[0])
    return math.prod(positions), flops.shape_of(op.inputs[1])[-1]
