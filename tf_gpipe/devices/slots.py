"""Slots: the variables that an optimizer keeps for each weight."""

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
        # Empty for an optimizer in a MultiOptimizer that has no weights, so
        # that it has not been built.
        own = upstream.weights_of(x)
        for attribute in upstream.slot_lists(x):
            if len(attribute) == len(own):
                for weight, slot in zip(own, attribute, strict=True):
                    if isinstance(slot, keras.Variable):
                        found[id(weight)].append(slot)
    return [found[id(w)] for w in weights]


def build(model: keras.Model) -> None:
    """Makes the slots of a model's optimizer on the devices of their weights.

    Call it before the step is traced: slots created within the trace would not
    be on those devices. Those of an optimizer that was built before its weights
    moved, for a plain model, follow them.
    """
    if model.trainable_variables:
        build_for(
            model.distribute_strategy,
            model.optimizer,
            model.trainable_variables,
        )


def build_for(
    strategy: tf.distribute.Strategy,
    optimizer: keras.optimizers.Optimizer,
    weights: Sequence[keras.Variable],
) -> None:
    """As `build`, for an optimizer of weights that a strategy has made."""
    within_step = not tf.executing_eagerly() or replicas.within_one()
    if not (optimizer.built and within_step):
        with (
            tf.init_scope(),
            placement.eagerly_alone(),
            strategy.scope(),
        ):
            if not optimizer.built:
                optimizer.build(weights)
            place(optimizer)
    find_again(optimizer)


def place(optimizer: keras.optimizers.Optimizer) -> None:
    """Moves the slots of a built optimizer to the devices of their weights.

    Keras makes most slots there, but not those whose shape differs from the
    weight's, such as Adafactor's.
    """
    # Includes weights that have been frozen since the optimizer was built.
    weights = upstream.weights_of(optimizer)
    for weight, own in zip(
        weights, of_optimizer(optimizer, weights), strict=True
    ):
        value = weight if isinstance(weight, tf.Variable) else weight.value
        for slot in own:
            placement.place(slot, replicas.devices_of(value))


def find_again(optimizer: keras.optimizers.Optimizer) -> None:
    """Renews an optimizer's look-up of weights, which have moved."""
    for x in with_inner(optimizer):
        upstream.rekey_weights(x, placement.newest_id)


def with_inner(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Returns a list of an optimizer and the optimizers that it wraps.

    A LossScaleOptimizer wraps one, a MultiOptimizer several; of a function it
    knows them once it is built.
    """
    inner = list(getattr(optimizer, "optimizers", []))
    inner += filter(None, [getattr(optimizer, "inner_optimizer", None)])
    return [optimizer, *(x for each in inner for x in with_inner(each))]


def planned(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> list[list[keras.Variable]]:
    """Returns the slots that an optimizer would have for each weight.

    As `of_optimizer`, for a copy of the optimizer that is built in a graph, so
    that no memory is allocated. The weights need no values.
    """
    # The variables of a graph have no memory until it runs.
    with tf.Graph().as_default():
        optimizer = upstream.unbuilt(optimizer)
        own = [
            keras.Variable("zeros", w.shape, w.dtype, name=w.name)
            for w in weights
        ]
        for variable, weight in zip(own, weights, strict=True):
            # The path by which a MultiOptimizer tells weights apart.
            upstream.set_path(variable, weight.path)
        optimizer.build(own)
    return of_optimizer(optimizer, own)
