"""Copies of layers that are not built, made by their own configs."""

import textwrap
import types
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_gpipe import upstream


class NoCopyError(ValueError):
    """A layer has methods by which it cannot be copied."""


def copied(
    layer: keras.Operation, policies: Sequence[dict] = ()
) -> keras.Operation:
    """Returns a copy of a layer, not built and not compiled.

    What the layer holds are the user's own objects, not those of a file: they
    need not be registered with Keras, and lambdas are kept as they are. A layer
    that has learnt from data what no config and no weight has, such as the
    vocabulary of a `TextVectorization`, shares that with its copy.

    Args:
        layer: Layer; or an operation without weights, of which the copy has
            not been called.
        policies: The config of a dtype policy, and that which replaces it.

    Raises:
        NoCopyError: If the layer's config does not make a layer.
    """
    if not isinstance(layer, keras.Layer) or (
        not policies
        and not layer.variables
        # What these save is more than their config and weights.
        and any(
            hasattr(x, "save_assets") for x in upstream.layers_within(layer)
        )
    ):
        return upstream.uncalled(layer)

    def changed(config: Any) -> Any:
        if isinstance(config, dict):
            if policies and config == policies[0]:
                return policies[1]
            return {
                name: changed(x)
                for name, x in config.items()
                if name != "compile_config"
            }
        if type(config) in (list, tuple):
            return type(config)(map(changed, config))
        return config

    try:
        with (
            keras.saving.custom_object_scope(_custom_objects(layer)),
            upstream.unsafe_deserialization(),
        ):
            copy = type(layer).from_config(
                changed(_without_arrays(layer).get_config())
            )
    except Exception as error:  # whatever a layer's own methods raise
        raise NoCopyError(
            f"Layer '{layer.name}' (of type {type(layer).__name__}) cannot be "
            "copied. Its `from_config` must take what its `get_config` "
            f"returns. Received: {textwrap.shorten(str(error), 300)}"
        ) from error
    for new, old in zip(
        upstream.layers_within(copy),
        upstream.layers_within(layer),
        strict=False,
    ):
        # Configs have `trainable` of the layer, not of the layers within it.
        upstream.set_trainable_alone(new, old.trainable)
        for name, x in vars(new).items():
            if upstream.made_from_code(x):
                vars(new)[name] = vars(old).get(name, x)
    return copy


def _without_arrays(layer: keras.Layer) -> keras.Layer:
    """Returns a twin of a layer whose initial values are no arrays.

    The copy needs no such values, such as the vectors of words, of which a
    config has a list.
    """
    twin = upstream.renamed(layer, layer.name)
    for name, x in vars(layer).items():
        if isinstance(x, keras.initializers.Constant) and np.ndim(x.value):
            vars(twin)[name] = keras.initializers.Zeros()
    return twin


def _custom_objects(layer: keras.Layer) -> dict[str, Any]:
    """Returns the classes and functions in a layer, by names in its config.

    Without names that stand for several of them.
    """
    found: dict[str, Any] = {}
    several = set()
    for each in upstream.layers_within(layer):
        for x in (each, *vars(each).values()):
            if not isinstance(x, types.FunctionType):
                x = type(x)
            for name in {x.__name__, upstream.registered_name(x)}:
                if found.setdefault(name, x) is not x:
                    several.add(name)
    return {
        name: x
        for name, x in found.items()
        if name not in several
        and str(x.__module__).split(".")[0] not in ("builtins", "keras")
    }
