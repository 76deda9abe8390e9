"""The graph of a Keras model, with nested models replaced by their layers.

When a model calls a functional model or a `Sequential` as a layer, Keras runs
the nested model's graph. So the nested model is opened: its layer calls become
nodes of the outer model's graph, which may be cut between them. Two other
effects of the nested call are kept: `NestedInput` converts the inputs as the
nested model does, and `training=` is passed on to the layers. Name, files and
summary of the nested model do not change.
"""

from collections.abc import Iterable
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import NestedInput
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value


def of_layers(layers: Iterable[keras.Layer], inputs: Any) -> Graph:
    """Returns the graph of layers that are called one after another.

    Between two layers is one `Value` for all that the first one returns,
    tensors in any nested structure. Its spec is not known.

    Args:
        layers: The layers.
        inputs: Nested structure of `KerasTensor`s that the first layer is
            called on.
    """
    first = Value(inputs)
    nodes, returned = _nodes_of_layers(layers, first)
    return Graph(nodes, [first], keras.tree.map_structure(_value, returned))


def of_model(model: keras.Model) -> Graph:
    """Returns the graph of a functional model, or of a built `Sequential`.

    A value is one tensor. Nodes are in the order in which Keras runs them:
    within its model, a layer comes as late as the layers that take its results
    allow.
    """
    graph = upstream.graph_of(model)
    values: dict[int, Any] = {id(x): Value(x) for x in graph.inputs}
    inputs = list(values.values())
    nodes = _nodes_of_model(model, values, None)
    # Keras returns the output itself in place of a list of one output.
    returned = upstream.unpack_singleton(
        keras.tree.map_structure(
            lambda x: _value(values[id(x)]), upstream.outputs_of(graph)
        )
    )
    used = {x for node in nodes for x in node.inputs}
    used.update(keras.tree.flatten(returned))
    for node in nodes:
        # A last output in the spec that nothing uses: the layer may return
        # fewer tensors than its spec has.
        while isinstance(node.outputs, list) and (
            node.outputs and node.outputs[-1] not in used
        ):
            node.outputs.pop()
    return Graph(nodes, inputs, returned)


def num_calls(layers: Iterable[keras.Layer]) -> int:
    """Returns the number of nodes of `of_layers(layers, ...)`.

    For a `Sequential` that is not built yet, if all of it can be opened.
    """
    return sum(map(_num_calls, layers))


def _num_calls(layer: keras.Layer) -> int:
    if not upstream.runs_its_graph(layer):
        return 1
    if upstream.graph_of(layer) is None:
        return max(1, num_calls(layer.layers))
    graph = upstream.graph_of(layer)
    nodes = _open_model(layer, [Value(x) for x in graph.inputs], [], None)
    return 1 if nodes is None else len(nodes[0])


def _nodes_of_layers(
    layers: Iterable[keras.Layer], given: Any
) -> tuple[list[Node], Any]:
    """Returns the nodes of layers called one after another, and the result.

    Args:
        layers: The layers.
        given: `Value` that the first layer is called on, or a nested structure
            of them. So is the result.
    """
    nodes: list[Node] = []
    for layer in layers:
        found = _open_layer(layer, given)
        if found is None:
            value = Value()
            found = [Node(layer, (given,), {}, value)], value
        nodes += found[0]
        given = found[1]
    return nodes, given


def _open_layer(
    layer: keras.Layer, given: Any
) -> tuple[list[Node], Any] | None:
    """Opens one of the layers that are called one after another.

    Returns:
        Tuple as of `_nodes_of_layers`; `None` if the layer cannot be opened.
    """
    if not upstream.runs_its_graph(layer):
        return None
    graph = upstream.graph_of(layer)
    if graph is None:
        return _nodes_of_layers(layer.layers, given) if layer.layers else None
    # One value may hold the tensors of several inputs of the nested model. Then
    # the `NestedInput` of each input picks its own tensor.
    one = isinstance(given, Value)
    if one and given.spec is None:
        if len(graph.inputs) > 1:
            return None
        inputs = [given]
    else:
        call = upstream.arguments_of_call(
            layer, (given.spec if one else given,), {}
        )
        if call is None:
            return None
        inputs = [given] * len(graph.inputs) if one else call[0]
    found = _open_model(layer, inputs, [], None)
    if found is None:
        return None
    nodes, made = found
    return nodes, upstream.unpack_singleton(
        keras.tree.pack_sequence_as(upstream.outputs_of(graph), made)
    )


def _nodes_of_model(
    model: Any, values: dict[int, Any], training: bool | None
) -> list[Node]:
    """Returns the nodes of a model's layer calls.

    Args:
        model: Functional model, or a `Sequential`.
        values: Dict from the id of each `KerasTensor` of the model's graph to
            its `Value` or `NestedInput`. It has the model's inputs; the results
            of its layer calls are added.
        training: The `training` argument that the model is called with, which
            overrides that of its layers; `None` if it is not given.
    """

    def value(x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor):
            return x
        return values.setdefault(id(x), Value(x))

    nodes = []
    for call in upstream.nodes_of(upstream.graph_of(model)):
        layer = call.operation
        args, kwargs = call.arguments.convert(value)
        if isinstance(model, keras.Sequential):
            # The layer is called on one argument. The others are masks, which
            # Keras has added with the operations that compute them. It adds
            # them again when the layer is called on a tensor with a mask.
            if not isinstance(layer, keras.Layer):
                continue
            kwargs = upstream.without_masks(kwargs)
        kwargs = upstream.with_training(layer, kwargs, training)
        found = _open_call(layer, args, kwargs)
        if found is not None:
            inner, made = found
            nodes += inner
            values.update(
                (id(x), y)
                for x, y in zip(call.output_tensors, made, strict=True)
            )
            continue
        outputs = [value(x) for x in call.output_tensors]
        nodes.append(Node(layer, args, kwargs, outputs))
    return nodes


def _open_call(layer: Any, args: tuple, kwargs: dict) -> tuple | None:
    """Opens the model that a call calls, as `_open_model`.

    Returns `None` if the call stays one node, as that of any other layer.
    """
    if not upstream.runs_its_graph(layer) or upstream.graph_of(layer) is None:
        return None
    found = upstream.arguments_of_call(layer, args, kwargs)
    return None if found is None else _open_model(layer, *found)


def _open_model(
    model: Any, given: list, masks: list, training: bool | None
) -> tuple[list[Node], list[Value | NestedInput]] | None:
    """Opens a nested model: returns its nodes, and its outputs.

    Args:
        model: Functional model, or a built `Sequential`.
        given: The call's argument for each input of the model: a `Value` or
            `NestedInput`, or `None` for an optional input.
        masks: Likewise the masks; inputs beyond its end have no mask.
        training: As in `_nodes_of_model`.

    Returns:
        Tuple of the list of nodes and the list of outputs. `None` if the model
        has to stay one layer: an argument is neither of these, no layer is
        called in it, or it returns an input that it has converted.
    """
    graph = upstream.graph_of(model)
    masks = [*masks, *([None] * len(given))]
    if not all(
        x is None or isinstance(x, (Value, NestedInput))
        for x in (*given, *masks)
    ):
        return None
    values: dict[int, Any] = {
        id(x): None if y is None else NestedInput(y, mask, model, i)
        for i, (x, y, mask) in enumerate(
            zip(graph.inputs, given, masks, strict=False)
        )
    }
    nodes = _nodes_of_model(model, values, training)
    made = [values[id(x)] for x in graph.outputs]
    if not nodes or None in map(_value, made):
        return None
    return nodes, made


def _value(x: Value | NestedInput) -> Value | None:
    """Returns the `Value` of a model's input; `None` if it is converted."""
    return x.unchanged if isinstance(x, NestedInput) else x
