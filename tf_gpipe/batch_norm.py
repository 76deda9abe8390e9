"""Batch normalisation over micro-batches with statistics of mini-batches."""

from collections.abc import Callable

import keras
import tensorflow as tf


def between_variance(
    moving_means: tf.Tensor,
    mean: Callable[[tf.Tensor], tf.Tensor],
    momentum: float,
) -> tf.Tensor:
    """Returns what the mean of the micro-batches' moving variances lacks.

    A micro-batch with mean u_m and variance s_m, of weight w_m, moves the
    statistics to `a * old + (1 - a) * (u_m, s_m)`, a being the momentum. The
    variance of the mini-batch, with mean u, is

        sum_m w_m * s_m  +  sum_m w_m * (u_m - u)^2

    The weighted mean of the moved variances has the first term. This is the
    second one, times (1 - a), taken from the moved means, which lie (1 - a)
    times as far apart as the u_m do.

    Args:
        moving_means: Tensor of shape `(M, channels)`, the moved means of M
            micro-batches.
        mean: Function that returns the weighted mean over the first axis.
        momentum: Float, the layer's momentum.

    Returns:
        Tensor to add to the weighted mean of the moved variances.
    """
    spread = mean(tf.square(moving_means - mean(moving_means)))
    return spread / (1.0 - momentum) if momentum < 1 else spread


def check(layer: keras.Layer) -> None:
    """Refuses batch normalisation whose statistics micro-batches can't give.

    Raises:
        ValueError: If `layer` holds a renormalising batch normalisation.
    """
    for x in layer._flatten_layers():
        if isinstance(x, keras.layers.BatchNormalization) and x.renorm:
            raise ValueError(
                f"Layer '{x.name}' is a BatchNormalization with renorm=True, "
                "whose statistics cannot be put together from micro-batches. "
                "Use renorm=False, or num_micro_batches=1."
            )


def synchronized(layer: keras.Layer) -> bool:
    """Returns whether `layer` takes statistics over replicas."""
    return any(
        isinstance(x, keras.layers.BatchNormalization) and x.synchronized
        for x in layer._flatten_layers()
    )
