"""The variables of a model that a training step may change."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.checkpoints.store import Saved
from tf_gpipe.devices import slots
from tf_gpipe.stage import seeds
from tf_gpipe.stage import tensorflow_state
from tf_gpipe.stage.call_overrides import builds_optimizer

# Kinds of variables, in the order of a checkpoint.
WEIGHTS = "weights"
OTHER_STATE = "other state"
OPTIMIZER = "optimizer"
METRICS = "metrics"
MODEL = (WEIGHTS, OTHER_STATE, OPTIMIZER)
KINDS = (*MODEL, METRICS)

# Parts of a model whose attributes may be variables that Keras does not track.
_PARTS = (
    keras.Loss,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.random.SeedGenerator,
    tf.Module,
)


def variables_of(model: keras.Model) -> dict[str, list]:
    """Returns the variables that a step may change, by kind, each once.

    Their order depends neither on how the model is cut nor on names that Keras
    gives. Seeds are among the weights and the other state. Variables of metrics
    exist once Keras has built them, in the first step.
    """
    layers = upstream.layers_within(model)
    of_optimizers = [v for x in optimizers_of(model) for v in x.variables]
    found: dict[str, list] = {}
    seen: set[int] = set()
    for kind, variables in (
        (WEIGHTS, model.variables),
        (
            OTHER_STATE,
            [
                *seeds.global_seed(),
                *tensorflow_state.find([model], generators=True),
                # A `Sequential` has no weights but those of its stack.
                *_of_layers(tensorflow_state.held([vars(model)])),
            ],
        ),
        # What is left of the model's attributes is part of what it is compiled
        # with: without it, as for an evaluation, it is not restored.
        (OPTIMIZER, [*of_optimizers, *_within_parts(model)]),
        (
            METRICS,
            [
                *(v for x in layers for v in x.metrics_variables),
                *model.metrics_variables,
            ],
        ),
    ):
        found[kind] = []
        for v in variables:
            inner = inner_of(v)
            if id(inner) not in seen:
                seen.add(id(inner))
                found[kind] += _parts(v)
    return found


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns a model's optimizer, and the others that it has.

    As attributes, or those of models that are attributes: a `train_step` of the
    user's own may use them.
    """
    first = getattr(model, "optimizer", None)
    found = [] if first is None else [first]
    for x in tensorflow_state.held([vars(model)], (tf.Module, keras.Model)):
        if isinstance(x, keras.optimizers.Optimizer) and not any(
            x is y for each in found for y in slots.with_inner(each)
        ):
            found.append(x)
    return found


def _within_parts(model: keras.Model) -> list[Any]:
    """Returns the variables in attributes of a model, and of its `_PARTS`.

    Such as the seeds of an optimizer, or the factor of a loss; and those of
    layers and metrics there, such as a layer that normalises what a loss
    compares.
    """
    found = list(tensorflow_state.held([vars(model)], _PARTS))
    generators = [x for x in found if isinstance(x, tf.random.Generator)]
    losses = [vars(x) for x in found if isinstance(x, keras.Loss)]
    # Nothing resets those as an epoch begins, unlike the model's own.
    metrics = [
        x
        for x in tensorflow_state.held(losses, _PARTS)
        if isinstance(x, keras.Metric)
    ]
    return [
        *(x for x in found if isinstance(x, (keras.Variable, tf.Variable))),
        *(x.state for x in generators),
        *_of_layers(found),
        *(v for x in metrics for v in x.variables),
    ]


def _of_layers(objects: Iterable[Any]) -> list[Any]:
    """Returns the variables of those objects that are layers."""
    layers = [x for x in objects if isinstance(x, keras.Layer)]
    return [
        *(v for x in layers for v in x.variables),
        *tensorflow_state.find(layers, generators=True),
    ]


def weights_of_optimizers(
    model: keras.Model, variables: dict[str, list]
) -> list[list[int]]:
    """Returns the weights for which each of `optimizers_of` was built.

    By their numbers among the model's weights and other state; an empty list if
    it was not built.

    Args:
        model: The `keras.Model`.
        variables: What `variables_of` returns of it.

    Raises:
        ValueError: If an optimizer was built for variables of something else.
    """
    trained = may_be_trained(variables)
    numbers = {id(inner_of(v)): i for i, v in enumerate(trained)}
    found = []
    for x in optimizers_of(model):
        weights = upstream.weights_of(x)
        for v in weights:
            if id(inner_of(v)) not in numbers:
                raise ValueError(
                    f"Optimizer '{x.name}' of model '{model.name}' trains "
                    f"variable '{getattr(v, 'path', v.name)}', which is not "
                    "one of the model, so that a checkpoint would not hold it. "
                    "Make it, or the layer that it is of, an attribute of the "
                    "model."
                )
        found.append([numbers[id(inner_of(v))] for v in weights])
    return found


def names_of_optimizers(model: keras.Model) -> list[str] | None:
    """Returns the class names of the model's optimizers and those within them.

    `None` if the model is not compiled.
    """
    if not model.compiled:
        return None
    return [
        type(x).__name__
        for each in optimizers_of(model)
        for x in slots.with_inner(each)
    ]


def build_optimizers(model: keras.Model, saved: Saved) -> None:
    """Builds a model's optimizers, so that their slots can be restored.

    The one that it is compiled with for its trainable weights; those which only
    a step would build, for the weights that they had in a checkpoint.
    """
    if not model.compiled:
        return
    numbers = saved.content.get("weights of optimizers", [])
    if model.optimizer is not None and not (
        numbers and builds_optimizer(model)
    ):
        slots.build(model)
    trained = may_be_trained(variables_of(model))
    for x, own in zip(optimizers_of(model), numbers, strict=False):
        if not x.built and own and max(own) < len(trained):
            slots.build_for(
                model.distribute_strategy, x, [trained[i] for i in own]
            )


def may_be_trained(variables: dict[str, list]) -> list[Any]:
    """Returns the variables of a model that its optimizers may train."""
    return variables[WEIGHTS] + variables[OTHER_STATE]


def _parts(v: Any) -> list:
    """Returns a variable; or each replica's own, where their values differ."""
    value = inner_of(v)
    if not isinstance(value, tf.distribute.DistributedValues):
        return [v]
    strategy = value.distribute_strategy
    if (
        value.synchronization != tf.VariableSynchronization.ON_READ
        or not isinstance(strategy, tf.distribute.MirroredStrategy)
    ):
        return [v]
    return list(strategy.experimental_local_results(value))


def inner_of(v: Any) -> tf.Variable:
    """Returns the `tf.Variable`, which an autocast scope does not cast."""
    if isinstance(v, keras.Variable):
        return upstream.tensorflow_variable(v)
    return v
