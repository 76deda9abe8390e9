"""The gradient of rows of matrices times one matrix, as one product.

Keras multiplies the projections of `MultiHeadAttention` and `EinsumDense`, of
shape `(rows, steps, width)`, by a matrix of weights. TensorFlow's gradient of
the weights is one product for each row, and the sum of these:

    x (rows, steps, width) ----> rows x (width, out) ----> sum (width, out)
    g (rows, steps, out)

One product over all rows and steps gives the same sum without the matrices in
between, as in `Dense`:

    x (rows * steps, width) ---> (width, out)
    g (rows * steps, out)
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream


def compute(gradients: Callable[[], Any]) -> Any:
    """Calls a function within which such gradients are one product."""
    return upstream.with_gradient("BatchMatMulV2", _gradient, gradients)


def _gradient(operation: Any, gradient: tf.Tensor) -> tuple | None:
    """Returns the gradients by both factors, or `None` for TensorFlow's."""
    x, matrix = operation.inputs
    if (
        operation.get_attr("adj_x")
        or (x.shape.rank or 0) < 3
        or matrix.shape.rank != 2
        # A size must be known, and `tf.reshape` finds no other beside a 0.
        or not (x.shape[-1] and gradient.shape[-1])
    ):
        return None
    transposed = operation.get_attr("adj_y")
    x_rows = tf.reshape(x, (-1, x.shape[-1]))
    rows = tf.reshape(gradient, (-1, gradient.shape[-1]))
    by_x = tf.matmul(rows, matrix, adjoint_b=not transposed)
    if transposed:
        by_matrix = tf.matmul(rows, x_rows, adjoint_a=True)
    else:
        by_matrix = tf.matmul(x_rows, rows, adjoint_a=True)
    return tf.reshape(by_x, tf.shape(x)), by_matrix
