"""The graph of a model to be planned: all sizes known, no variable values."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe import upstream
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition.parameter_bytes import bytes_of
from tf_gpipe.planning import layer_copies
from tf_gpipe.planning import optimizers
from tf_gpipe.stage import layers_within
from tf_gpipe.stage import model_graph
from tf_gpipe.stage import no_values
from tf_gpipe.stage.graph import Graph

# What a list of layers may begin with.
_INPUTS = (keras.KerasTensor, keras.layers.InputLayer)


def of(model: Any, input_spec: Any) -> tuple[Graph, Any, set[int]]:
    """Returns the graph of layers or a model, and the spec of its inputs.

    The spec has the structure and the sizes of `input_spec`, and the dtypes of
    the model's own inputs, if it has any: Keras converts what it is given. The
    third item has the `open_sizes` of these inputs.
    """
    if isinstance(model, upstream.Functional):
        return _of_functional(model, input_spec)
    if isinstance(model, keras.Model) and not isinstance(
        model, keras.Sequential
    ):
        raise TypeError(
            "A plan is made from layers, or from a functional or sequential "
            f"model. Received: model={model.name!r} (of type "
            f"{type(model).__name__}), whose layers only its `call` knows."
        )
    return _of_layers(model, input_spec)


def _of_functional(model: Any, input_spec: Any) -> tuple[Graph, Any, set[int]]:
    """As `of`, for a functional model."""
    spec = _spec_of(input_spec)
    flat = keras.tree.flatten(spec)
    graph = model_graph.of_model(model)
    if isinstance(spec, dict):  # by the names of inputs
        call = upstream.arguments_of_call(model, (spec,), {})
        flat = [] if call is None else call[0]
    inputs = [x.spec for x in graph.inputs]
    _check(inputs, flat, input_spec)
    for value, x in zip(graph.inputs, flat, strict=True):
        value.spec = keras.KerasTensor(x.shape, value.spec.dtype)
    return graph, _converted(spec, flat, inputs), open_sizes(inputs, flat)


def _of_layers(model: Any, input_spec: Any) -> tuple[Graph, Any, set[int]]:
    """As `of`, for a `keras.Sequential`, a layer or a list of layers."""
    spec = _spec_of(input_spec)
    flat = keras.tree.flatten(spec)
    layers = model.layers if isinstance(model, keras.Sequential) else model
    if isinstance(layers, keras.Layer):
        layers = [layers]
    expected = (
        "`layers` must be a list of Keras layers, a `keras.Sequential` or a "
        f"functional `keras.Model`. Received: layers={layers!r}"
    )
    given = checks.items(layers, expected)
    layers = [x for x in given if not isinstance(x, _INPUTS)]
    inputs = [getattr(x, "output", x) for x in given if isinstance(x, _INPUTS)]
    if isinstance(model, keras.Sequential) and upstream.graph_of(model):
        inputs = upstream.graph_of(model).inputs
    _check(inputs, flat, input_spec)
    if not layers:
        raise ValueError("A plan needs layers. Received none.")
    if not all(isinstance(x, keras.Operation) for x in layers):
        raise TypeError(expected)
    left_open = open_sizes(inputs, flat)
    spec = _converted(spec, flat, inputs)
    return model_graph.of_layers(layers, spec), spec, left_open


def open_sizes(inputs: Sequence[Any], given: Sequence[Any]) -> set[int]:
    """Returns what stands for the sizes that inputs leave open.

    Args:
        inputs: Tensors, or their shapes, with the batch axis.
        given: Likewise, with sizes that are known.
    """
    pairs = zip(inputs, given, strict=False)
    return {
        size
        for x, y in pairs
        for known, size in zip(_shape(x)[1:], _shape(y)[1:], strict=False)
        if known is None
    }


def _shape(x: Any) -> tuple:
    return tuple(getattr(x, "shape", x))


def _converted(spec: Any, flat: list, inputs: list) -> Any:
    """Returns `spec`, of whose tensors those in `flat` get dtypes of inputs."""
    dtypes = {id(x): y.dtype for x, y in zip(flat, inputs, strict=False)}
    return keras.tree.map_structure(
        lambda x: keras.KerasTensor(x.shape, dtypes.get(id(x), x.dtype)), spec
    )


def _check(inputs: list, flat: list, input_spec: Any) -> None:
    """Refuses specs that are not like the inputs, if the model has any.

    As in Keras, the number of rows is free, but must be the same for all
    inputs.
    """
    shapes = [x.shape for x in inputs]
    if inputs and not (
        [len(x) for x in shapes] == [x.ndim for x in flat]
        and all(
            size in (None, given)
            for shape, x in zip(shapes, flat, strict=True)
            for size, given in zip(shape[1:], x.shape[1:], strict=True)
        )
    ):
        raise ValueError(
            "`input_spec` must be like the inputs of the model, in their "
            f"order or with their names, of the shapes {shapes}. Received: "
            f"input_spec={input_spec}"
        )
    if len({x.shape[0] for x in flat}) != 1:
        raise ValueError(
            "`input_spec` must give all inputs the same batch size. Received: "
            f"input_spec={input_spec}"
        )


def _spec_of(input_spec: Any) -> Any:
    """Returns `input_spec` as a nested structure of `KerasTensor`s.

    Raises:
        TypeError: If it has something else than shapes and specs.
        ValueError: If a size is unknown or no positive integer.
    """
    # Keras takes only Python's integers for sizes.
    plain = keras.tree.map_structure(
        lambda x: int(x) if isinstance(x, np.integer) else x, input_spec
    )
    return keras.tree.map_shape_structure(_with_all_sizes, plain)


def _with_all_sizes(x: Any) -> keras.KerasTensor:
    """Returns a shape (of float32) or a tensor spec as a `KerasTensor`."""
    expected = (
        "`input_spec` must give all sizes, that of the mini-batch first, as "
        "positive integers. Received: "
    )
    shape = getattr(x, "shape", x)
    # Other iterables, such as datasets, may have no end.
    if not isinstance(shape, (tuple, list, tf.TensorShape)):
        raise TypeError(
            "`input_spec` must be a shape, a tensor spec, or a nested "
            f"structure of them. Received: {x!r}"
        )
    if isinstance(shape, tf.TensorShape) and shape.rank is None:
        raise ValueError(f"{expected}{x!r}")
    shape = tuple(shape)
    if not shape or not all(map(checks.is_positive_integer, shape)):
        raise ValueError(f"{expected}a shape of {shape}")
    dtype = keras.backend.standardize_dtype(getattr(x, "dtype", "float32"))
    return keras.KerasTensor(tuple(map(int, shape)), dtype)


def copies(
    graph: Graph, optimizer: Any, dtype_policy: Any
) -> tuple[list[tuple], dict]:
    """Returns copies of the layers, built without values, and all specs.

    Copies of layers that have the global dtype policy get `dtype_policy`. A
    built layer that cannot be copied is used itself.

    Returns:
        List with, for each call, the copy (equal calls share one) and a list
        with the `WeightBytes` of each of its weights; and a dictionary from
        `Value`s to specs.

    Raises:
        ValueError: If a layer cannot be copied that is not built, or that would
            get another dtype policy.
    """
    optimizer = optimizers.get(optimizer)
    before = keras.config.dtype_policy()
    if dtype_policy is not None:
        keras.config.set_dtype_policy(dtype_policy)
    old, new = map(
        keras.dtype_policies.serialize, (before, keras.config.dtype_policy())
    )

    def copied(node, specs):
        layer = node.layer
        args, kwargs = node.arguments(specs)
        if not isinstance(layer, keras.Layer):
            return (layer, []), layer.compute_output_spec(*args, **kwargs)
        try:
            copy = layer_copies.copied(layer, [] if old == new else [old, new])
        except layer_copies.NoCopyError as error:
            if not layer.built or old != new:
                raise ValueError(
                    f"{error} Or give layers that are built, and no "
                    "`dtype_policy`."
                ) from error
            outputs = upstream.spec_function(layer)(*args, **kwargs)
            return (layer, bytes_of(layer.weights, optimizer)), outputs
        with no_values.NoValues():
            outputs = copy(*args, **kwargs)
        upstream.forget_waiting(copy.variables)
        shapes, built = (
            sorted(tuple(w.shape) for w in x.weights) for x in (copy, layer)
        )
        if len(built) == len(shapes) and built != shapes:
            raise ValueError(
                f"Layer '{layer.name}' is built for other inputs than those "
                "that follow from `input_spec`: its weights have the shapes "
                f"{built}. Received: `input_spec` with which they would have "
                f"the shapes {shapes}. Give the sizes of the model's inputs."
            )
        if layers_within.are_left(copy):
            with no_values.NoValues():
                layers_within.run(copy, args, kwargs)
            upstream.forget_waiting(copy.variables)
        if len(copy.weights) == len(layer.weights):
            for x, original in zip(copy.weights, layer.weights, strict=True):
                x.trainable = original.trainable
        return (copy, bytes_of(copy.weights, optimizer)), outputs

    try:
        return layer_costs.walk(graph, copied)
    finally:
        keras.config.set_dtype_policy(before)
