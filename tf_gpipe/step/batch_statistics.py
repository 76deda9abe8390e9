"""Batch normalisation: its moving statistics after several micro-batches."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping

import keras
import tensorflow as tf

from tf_gpipe import upstream


def batch_norms(
    layers: Iterable[keras.Operation],
) -> list[keras.layers.BatchNormalization]:
    """Returns the batch normalisation layers among layers and within them."""
    return [
        x
        for layer in layers
        for x in upstream.layers_within(layer)
        if isinstance(x, keras.layers.BatchNormalization)
    ]


def check(layer: keras.Operation) -> None:
    """Raises an error for batch normalisation that cannot be merged."""
    for x in batch_norms([layer]):
        if x.renorm:
            raise ValueError(
                f"Layer '{x.name}' is a BatchNormalization with renorm=True, "
                "whose statistics cannot be put together from micro-batches. "
                "Use renorm=False, or num_micro_batches=1."
            )


def variances(
    norms: Iterable[keras.layers.BatchNormalization],
    means: Mapping[int, tf.Tensor],
    spreads: Mapping[int, tf.Tensor],
    device_of: Callable[[keras.Variable], str],
) -> dict[int, tf.Tensor]:
    """Returns moving variances, as if the mini-batch had been normalised whole.

    A micro-batch with mean u_m and variance s_m, of weight w_m, moves the
    statistics to `a * old + (1 - a) * (u_m, s_m)`, a being the momentum. The
    variance of the mini-batch, with mean u, is

        sum_m w_m * s_m  +  sum_m w_m * (u_m - u)^2

    The weighted mean of the moved variances has the first term. The second one,
    times (1 - a), comes from the moved means, which lie (1 - a) times as far
    apart as the u_m do.

    Args:
        norms: Layers whose moving mean has been updated.
        means: Dict from ids of variables to the weighted mean of their values
            after each micro-batch.
        spreads: Dict from ids of moving means to the weighted mean of their
            squared distances from `means`.
        device_of: Function that returns the device of a variable.

    Returns:
        Dict from the ids of moving variances that have been updated, too.
    """
    found = {}
    for x in norms:
        mean = means.get(id(x.moving_variance))
        lacking = spreads[id(x.moving_mean)]
        if mean is None:
            continue
        with tf.device(device_of(x.moving_variance)):
            if x.momentum < 1:
                lacking /= 1.0 - x.momentum
            lacking = tf.cast(lacking, mean.dtype)
            found[id(x.moving_variance)] = mean + lacking
    return found
