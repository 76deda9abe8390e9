"""A tensor whose gradient goes to another one."""

import tensorflow as tf


def straight_through(value: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Returns `value`, whose gradient is taken for that of `source`.

    Args:
        value: Tensor. It gets no gradient.
        source: Tensor of the same shape and dtype.
    """

    @tf.custom_gradient
    def of_source(source):
        del source
        return tf.stop_gradient(value), lambda gradient: gradient

    return of_source(source)
