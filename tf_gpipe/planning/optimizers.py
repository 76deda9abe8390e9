"""The optimizer whose slots are planned, by its name or as it is."""

from typing import Any

import keras

from tf_gpipe.checks import near

# `LossScaleOptimizer` takes another optimizer.
_NOT_BY_NAME = ("Optimizer", "LossScaleOptimizer")
# What Keras raises for names of these, and for configurations that lack keys.
_REFUSALS = (AttributeError, KeyError, TypeError, ValueError)


def get(optimizer: Any) -> keras.optimizers.Optimizer:
    """Returns a Keras optimizer.

    Args:
        optimizer: Keras optimizer, or what `keras.optimizers.get` takes.

    Raises:
        ValueError: If it is something else; of a name, with the nearest one.
    """
    try:
        # Keras takes `None`, and returns it.
        if found := keras.optimizers.get(optimizer):
            return found
        raise ValueError
    except _REFUSALS as error:
        names = [
            name.lower()
            for name, found in vars(keras.optimizers).items()
            if isinstance(found, type) and name not in _NOT_BY_NAME
        ]
        raise ValueError(
            "`optimizer` must be a Keras optimizer, or the name of one. "
            f"Received: optimizer={optimizer!r}{near([optimizer], names)}"
        ) from error
