"""Methods that a model's class overrides.

A `call` or penalty of its own is refused: a pipeline would leave it out.
"""

from typing import Any

import keras

from tf_gpipe import upstream

# Methods that compute a model's outputs; a pipeline replaces them.
CALLS = ("call", "__call__")


def overrides(model: keras.Model, name: str) -> bool:
    """Returns whether the user has overridden a method or property.

    In the model's class, or on the instance.
    """
    if name in vars(model):
        return True
    for owner in type(model).__mro__:
        if name in vars(owner):
            return not (
                is_library(owner) or upstream.forwards_to_keras(owner, name)
            )
    return False


def builds_optimizer(model: Any) -> bool:
    """Returns whether it is a user's step that builds the optimizer.

    As in Keras, for the weights whose gradients it applies first. The others
    are built before, for all weights: by Keras under a strategy, and a
    `LossScaleOptimizer`, which would scale by a constant.
    """
    return (
        overrides(model, "train_step")
        and not upstream.strategy_of(model)
        and not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    )


def check(model: Any) -> None:
    """Refuses a model of which no pipeline can be made.

    Anything that has no graph is left to others to refuse.

    Raises:
        TypeError: If it overrides how its outputs are computed.
        ValueError: If it has a penalty of its own outputs.
    """
    if isinstance(model, (keras.Sequential, upstream.Functional)):
        check_calls(model)
        check_penalty(model)


def check_calls(model: keras.Model) -> None:
    """Refuses a model that overrides how its outputs are computed."""
    for name in (*CALLS, "_run_through_graph"):
        if overrides(model, name):
            raise TypeError(
                f"{type(model).__name__} overrides `{name}`, in whose place a "
                f"pipeline runs: model {model.name!r} would lose it. Make what "
                "it does layers of the model, so that it is a part of its "
                "graph; or put the model's largest stack of layers into a "
                "`PipelinedSequential`, which `call` can use as a layer."
            )


def check_penalty(model: keras.Model) -> None:
    """Refuses a penalty of a model's own outputs, which `fit` would not see."""
    if model.activity_regularizer is not None:
        raise ValueError(
            f"Model '{model.name}' has an `activity_regularizer` of its own, "
            "but a pipeline is trained layer by layer. Give it to the model's "
            "last layer, or add a layer that has it: "
            "keras.layers.ActivityRegularization(l2=...)."
        )


def is_library(x: Any) -> bool:
    """Returns whether a class or function is Keras's, Python's or of here."""
    return is_ours(x) or _package(x) in ("keras", "builtins")


def is_ours(x: Any) -> bool:
    """Returns whether a class or function is one of this library."""
    return _package(x) == "tf_gpipe"


def _package(x: Any) -> str:
    # What `exec` has made may be of no module.
    return (x.__module__ or "").split(".")[0]
