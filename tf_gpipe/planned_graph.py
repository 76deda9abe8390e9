"""The graph of what a plan is made of, with all sizes."""

from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from tf_gpipe.graph import Graph
from tf_gpipe.graph import chain
from tf_gpipe.graph import functional


def of(model: Any, input_spec: Any) -> Graph:
    """Returns the graph of what `plan` is given, with the input spec."""
    if isinstance(model, Functional):
        graph = functional(model)
        flat = keras.tree.flatten(_standardized(input_spec))
        expected = [value.spec for value in graph.inputs]
        if len(flat) != len(expected) or any(
            len(x.shape) != len(y.shape)
            for x, y in zip(flat, expected, strict=False)
        ):
            raise ValueError(
                "`input_spec` must be like the inputs of the model, "
                f"{model.input}. Received: input_spec={input_spec}"
            )
        for value, x in zip(graph.inputs, flat, strict=True):
            value.spec = keras.KerasTensor(x.shape, value.spec.dtype)
        return graph
    if isinstance(model, keras.Model) and not isinstance(
        model, keras.Sequential
    ):
        raise TypeError(
            "A plan is made from layers, or from a functional or sequential "
            f"model. Received: model={model.name!r} (of type "
            f"{type(model).__name__}), whose layers only its `call` knows."
        )
    layers = model.layers if isinstance(model, keras.Sequential) else model
    layers = [
        x
        for x in layers
        if not isinstance(x, (keras.KerasTensor, keras.layers.InputLayer))
    ]
    if not layers:
        raise ValueError("A plan needs layers. Received none.")
    return chain(layers, _standardized(input_spec))


def _standardized(spec: Any) -> Any:
    """Returns an input spec as `KerasTensor`s with a batch size."""

    def standardize(x):
        if isinstance(x, tf.TensorShape):
            x = x.as_list()
        if isinstance(x, dict):
            return {key: standardize(part) for key, part in x.items()}
        if isinstance(x, (tuple, list)):
            if not all(n is None or isinstance(n, int) for n in x):
                return type(x)(map(standardize, x))
            return keras.KerasTensor(tuple(x), "float32")
        return keras.KerasTensor(
            tuple(x.shape), keras.backend.standardize_dtype(x.dtype)
        )

    spec = standardize(spec)
    for x in keras.tree.flatten(spec):
        if not x.shape or None in x.shape:
            raise ValueError(
                "`input_spec` must give all sizes, that of the mini-batch "
                f"first. Received a shape of {x.shape}"
            )
    return spec
