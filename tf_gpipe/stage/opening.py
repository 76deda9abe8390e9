"""The graph of a Keras model, in which the models within it are opened.

Keras runs a functional model, or a `Sequential`, that another model calls as a
layer through its graph: so its layers can be calls of the outer one's graph,
and be cut. What the call of the model does beside that comes along: `Taken` is
what it does to its inputs, and `training=` goes on to the calls of the layers.
The model stays Keras's for all else: its name, files and summary.
"""

from collections.abc import Iterable
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Taken
from tf_gpipe.stage.graph import Value


def chain(layers: Iterable[keras.Layer], inputs: Any) -> Graph:
    """Returns the graph of layers that are called one after another.

    Between two of them is one value: all that a layer returns, tensors in any
    nested structure. Of these values no spec is known. `inputs` is what the
    first layer is called on, a nested structure of `KerasTensor`s.
    """
    first = Value(inputs)
    nodes, returned = _in_a_row(layers, first)
    return Graph(nodes, [first], keras.tree.map_structure(_value, returned))


def functional(model: keras.Model) -> Graph:
    """Returns the graph of a functional model, or of a built `Sequential`.

    A value is one tensor. Nodes are in the order in which Keras runs them: a
    layer comes as late as those that need it allow, within its model.
    """
    graph = upstream.graph_of(model)
    values: dict[int, Any] = {id(x): Value(x) for x in graph.inputs}
    inputs = list(values.values())
    nodes = _read(model, values, None)
    # A list of one output is that output, as Keras has it.
    returned = upstream.unpack_singleton(
        keras.tree.map_structure(
            lambda x: _value(values[id(x)]), upstream.outputs_of(graph)
        )
    )
    used = {x for node in nodes for x in node.inputs}
    used.update(keras.tree.flatten(returned))
    for node in nodes:
        # What a layer need not return, although its spec tells it.
        while isinstance(node.outputs, list) and (
            node.outputs and node.outputs[-1] not in used
        ):
            node.outputs.pop()
    return Graph(nodes, inputs, returned)


def num_calls(layers: Iterable[keras.Layer]) -> int:
    """Returns how many calls there are of layers that are called in a row.

    Of a `Sequential` that is not built yet, if all of it can be opened.
    """
    return sum(map(_num_calls, layers))


def _num_calls(layer: keras.Layer) -> int:
    if not upstream.runs_its_graph(layer):
        return 1
    if upstream.graph_of(layer) is None:
        return max(1, num_calls(layer.layers))
    graph = upstream.graph_of(layer)
    nodes = _opened(layer, [Value(x) for x in graph.inputs], [], None)
    return 1 if nodes is None else len(nodes[0])


def _in_a_row(
    layers: Iterable[keras.Layer], given: Any
) -> tuple[list[Node], Any]:
    """Returns the calls of layers one after another, and what they return.

    `given` is what the first of them is called on: a `Value` or a nested
    structure of them, as is what is returned.
    """
    nodes: list[Node] = []
    for layer in layers:
        found = _within(layer, given)
        if found is None:
            value = Value()
            found = [Node(layer, (given,), {}, value)], value
        nodes += found[0]
        given = found[1]
    return nodes, given


def _within(layer: keras.Layer, given: Any) -> tuple[list[Node], Any] | None:
    """Returns the calls in one of the layers of a row, if it can be opened."""
    if not upstream.runs_its_graph(layer):
        return None
    graph = upstream.graph_of(layer)
    if graph is None:
        return _in_a_row(layer.layers, given) if layer.layers else None
    # A value may have tensors for several inputs, each of which takes its own.
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
    found = _opened(layer, inputs, [], None)
    if found is None:
        return None
    nodes, made = found
    return nodes, upstream.unpack_singleton(
        keras.tree.pack_sequence_as(upstream.outputs_of(graph), made)
    )


def _read(
    model: Any, values: dict[int, Any], training: bool | None
) -> list[Node]:
    """Returns the calls of layers in a model.

    Args:
        model: Functional model, or a `Sequential`.
        values: What stands for each `KerasTensor` of its graph, by id: at
            first for its inputs. Those of what its calls make are added.
        training: The mode that the model is called in, which its layers get
            in place of their own; `None` if the call says nothing of it.
    """

    def value(x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor):
            return x
        return values.setdefault(id(x), Value(x))

    nodes = []
    for call in upstream.calls(upstream.graph_of(model)):
        layer = call.operation
        args, kwargs = call.arguments.convert(value)
        if isinstance(model, keras.Sequential):
            # Called on one argument. The others are masks, which Keras adds,
            # and with them operations that make them; it adds them again when
            # it calls the layer on a tensor that has a mask.
            if not isinstance(layer, keras.Layer):
                continue
            kwargs = upstream.without_masks(kwargs)
        kwargs = upstream.with_training(layer, kwargs, training)
        found = _of_call(layer, args, kwargs)
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


def _of_call(layer: Any, args: tuple, kwargs: dict) -> tuple | None:
    """Returns as `_opened` of a call; `None` if that is one of a layer."""
    if not upstream.runs_its_graph(layer) or upstream.graph_of(layer) is None:
        return None
    found = upstream.arguments_of_call(layer, args, kwargs)
    return None if found is None else _opened(layer, *found)


def _opened(
    model: Any, given: list, masks: list, training: bool | None
) -> tuple[list[Node], list[Value | Taken]] | None:
    """Returns the calls of layers in a model that is called, and the outputs.

    Args:
        model: Functional model, or a built `Sequential`.
        given: What the call is given for each input of the model, a `Value`,
            or `Taken`, or `None` of an optional one.
        masks: Likewise the masks; of those that it lacks there are none.
        training: As of `_read`.

    Returns:
        `None` if it has to stay one layer: it makes nothing itself, or returns
        an input that it has changed.
    """
    graph = upstream.graph_of(model)
    masks = [*masks, *([None] * len(given))]
    if not all(
        x is None or isinstance(x, (Value, Taken)) for x in (*given, *masks)
    ):
        return None
    values: dict[int, Any] = {
        id(x): None if y is None else Taken(y, mask, model, i)
        for i, (x, y, mask) in enumerate(
            zip(graph.inputs, given, masks, strict=False)
        )
    }
    nodes = _read(model, values, training)
    made = [values[id(x)] for x in graph.outputs]
    if not nodes or None in map(_value, made):
        return None
    return nodes, made


def _value(x: Value | Taken) -> Value | None:
    """Returns the `Value` that something is, but for what its spec hides."""
    return x.unchanged if isinstance(x, Taken) else x
