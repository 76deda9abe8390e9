"""What TensorFlow does not tell of cuDNN's recurrent layers.

Keras takes them for LSTM and GRU layers where TensorFlow sees a GPU.
"""

import math
from typing import Any

import tensorflow as tf

from tf_gpipe.partition import flops

# Of an operation, by the name of what it computes.
_GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}
# The place, among the results, of what the backward pass reads.
_RESERVED = 3


def tell_shapes(graph: Any) -> None:
    """Sets the shapes of what recurrent layers keep for the backward pass.

    cuDNN tells how much that is when a layer runs, and TensorFlow nothing
    before. What is set is an estimate: the gates, the cell and the output of
    each position.

    Args:
        graph: A `tf.Graph` whose other shapes are known. Functions that it
            calls are included.
    """
    for op in graph.get_operations():
        for called in flops.called_by(op):
            tell_shapes(called)
        if op.type in ("CudnnRNNV2", "CudnnRNNV3"):
            positions, units = _sizes(op)
            gates = _GATES[op.get_attr("rnn_mode").decode()]
            op.outputs[_RESERVED].set_shape([positions * units * (gates + 2)])
            # Of bytes on the host: a description of the layer.
            op.outputs[_RESERVED + 1].set_shape([0])


def _sizes(op: tf.Operation) -> tuple[int, int]:
    """Returns the number of positions, of all rows, and that of units."""
    *positions, _ = flops.shape_of(op.inputs[0])
    return math.prod(positions), flops.shape_of(op.inputs[1])[-1]
