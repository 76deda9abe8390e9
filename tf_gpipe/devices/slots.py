"""The variables that an optimizer keeps for each weight."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import placement
from tf_gpipe.devices import replicas


def of_optimizer(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> list[list[keras.Variable]]:
    """Returns the slots of each weight: momenta, moving averages and so on.

    The optimizer must have been built for these weights.
    """
    found: dict[int, list[keras.Variable]] = {id(w): [] for w in weights}
    for x in with_inner(optimizer):
        # An optimizer in a MultiOptimizer may have no weights: it is not built.
        own = upstream.weights_of(x)
        for attribute in upstream.lists_of(x):
            if len(attribute) == len(own):
                for weight, slot in zip(own, attribute, strict=True):
                    if isinstance(slot, keras.Variable):
                        found[id(weight)].append(slot)
    return [found[id(w)] for w in weights]


def place(optimizer: keras.optimizers.Optimizer) -> None:
    """Puts the slots of a built optimizer where their weights are.

    Keras makes most of them there, but not those of another shape, such as
    Adafactor's.
    """
    # Weights that have been frozen since the optimizer was built, too.
    weights = upstream.weights_of(optimizer)
    for weight, own in zip(
        weights, of_optimizer(optimizer, weights), strict=True
    ):
        for slot in own:
            placement.place(slot, replicas.devices_of(weight.value))


def find_again(optimizer: keras.optimizers.Optimizer) -> None:
    """Tells an optimizer that its weights have moved to other devices."""
    for x in with_inner(optimizer):
        if x.built:
            upstream.find_weights_again(x)


def with_inner(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Returns an optimizer, and the optimizers in it.

    A LossScaleOptimizer has another one in it, a MultiOptimizer several.
    """
    inner = list(getattr(optimizer, "optimizers", []))
    inner += filter(None, [getattr(optimizer, "inner_optimizer", None)])
    return [optimizer, *(x for each in inner for x in with_inner(each))]


def planned(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> list[list[keras.Variable]]:
    """As `of_optimizer`, of a copy that is built for weights without values.

    Nothing is allocated.
    """
    config = optimizer.get_config()
    # The variables of a graph have no memory until it runs.
    with tf.Graph().as_default():
        optimizer = type(optimizer).from_config(config)
        own = [
            keras.Variable("zeros", w.shape, w.dtype, name=w.name)
            for w in weights
        ]
        for variable, weight in zip(own, weights, strict=True):
            # The path by which a MultiOptimizer tells weights apart.
            upstream.set_path(variable, weight.path)
        optimizer.build(own)
    return of_optimizer(optimizer, own)
