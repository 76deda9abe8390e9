"""The variables that an optimizer keeps for each weight."""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import abstract


def of_optimizer(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> list[list[keras.Variable]]:
    """Returns the slots of each weight: momenta, moving averages and so on.

    Args:
        optimizer: A built Keras optimizer.
        weights: List of the weights that it has been built for.

    Returns:
        List with a list of variables for each weight.
    """
    slots: list[list[keras.Variable]] = [[] for _ in weights]
    for name, attribute in vars(optimizer).items():
        found: Sequence = []
        if isinstance(attribute, keras.optimizers.Optimizer):
            # The one in a LossScaleOptimizer.
            found = of_optimizer(attribute, weights)
        elif (
            isinstance(attribute, list)
            and len(attribute) == len(weights)
            and name not in ("_variables", "_trainable_variables")
        ):
            found = [[x] for x in attribute]
        for own, new in zip(slots, found, strict=False):
            own += [x for x in new if isinstance(x, keras.Variable)]
    return slots


def find_again(optimizer: keras.optimizers.Optimizer) -> None:
    """Tells an optimizer that its weights have moved to other devices.

    It finds the slots of a weight by the TensorFlow variable in it.
    """
    for x in _with_inner(optimizer):
        x._trainable_variables_indices = {
            x._var_key(weight): i
            for i, weight in enumerate(x._trainable_variables)
        }


def planned(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> list[list[keras.Variable]]:
    """As `of_optimizer`, of a copy that is built for weights without values.

    Nothing is allocated.
    """
    optimizer = type(optimizer).from_config(optimizer.get_config())
    for x in _with_inner(optimizer):
        # Keras's asks for the value of each weight.
        x._var_key = id
    # In a graph, the values that Keras asks for are only symbols.
    with tf.Graph().as_default(), abstract.no_values():
        with _values_deferred():
            optimizer.build(weights)
    found = of_optimizer(optimizer, weights)
    abstract.forget(optimizer.variables)
    return found


def _with_inner(optimizer: keras.optimizers.Optimizer) -> list:
    """Returns an optimizer, and the one in a LossScaleOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inner is None else [optimizer, inner]


@contextlib.contextmanager
def _values_deferred() -> Iterator[None]:
    """Variables may be made from a value where Keras asks for a function.

    As those of some of its optimizers are, such as Adafactor and Nadam.
    """
    init = keras.Variable.__init__

    def deferred(self, initializer, shape=None, dtype=None, **kwargs):
        if not callable(initializer) and not isinstance(initializer, str):
            value = np.asarray(initializer)
            initializer, shape = lambda *_, **__: value, value.shape
        init(self, initializer, shape=shape, dtype=dtype, **kwargs)

    keras.Variable.__init__ = deferred
    try:
        yield
    finally:
        keras.Variable.__init__ = init
