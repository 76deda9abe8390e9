"""A model as calls of layers, in an order that can be cut into stages."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe import upstream


@dataclasses.dataclass(eq=False)
class Value:
    """What one call of a layer hands to others."""

    # Nested structure of `KerasTensor`s that it is like; `None` if not known.
    spec: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One call of a layer.

    Attributes:
        layer: Keras layer, or another Keras operation.
        args: Tuple of its arguments, nested structures with `Value`s where
            the call gets tensors.
        kwargs: Dictionary of its keyword arguments, likewise.
        outputs: `Value` of all that it returns; or a list with a `Value` for
            each tensor of it, up to the last one that is used.
    """

    layer: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: Value | list[Value]

    @property
    def inputs(self) -> list[Value]:
        """The values that it takes, each once."""
        leaves = keras.tree.flatten((self.args, self.kwargs))
        return list(dict.fromkeys(x for x in leaves if isinstance(x, Value)))

    @property
    def made(self) -> list[Value]:
        """The values that it makes."""
        return keras.tree.flatten(self.outputs)

    def arguments(self, values: Mapping[Value, Any]) -> tuple[tuple, dict]:
        """Returns the arguments of the call, given the contents of `inputs`."""
        return keras.tree.map_structure(
            lambda x: values[x] if isinstance(x, Value) else x,
            (self.args, self.kwargs),
        )

    def contents(self, results: Any) -> Iterator[tuple[Value, Any]]:
        """Returns what each of `made` holds, given what the layer returns."""
        if isinstance(self.outputs, Value):
            return iter([(self.outputs, results)])
        found = keras.tree.flatten(results)
        if len(found) < len(self.outputs):
            raise ValueError(
                f"Layer '{self.layer.name}' (of type "
                f"{type(self.layer).__name__}) returned {len(found)} tensors, "
                f"of which the model uses {len(self.outputs)}, as many as its "
                "`compute_output_spec` or `compute_output_shape` has told. "
                "They must agree."
            )
        # Of more than its spec tells, Keras takes the first ones.
        return zip(self.outputs, found, strict=False)

    def run(self, values: dict[Value, Any], call: Callable = lambda f: f):
        """Calls the layer, and adds what it makes to `values`.

        Args:
            values: Dictionary from `Value`s to their contents.
            call: Function from the layer to what is called in its place.
        """
        args, kwargs = self.arguments(values)
        values.update(self.contents(call(self.layer)(*args, **kwargs)))


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The calls of layers that make up a model, or a part of one.

    Attributes:
        nodes: List of `Node`s, each after those that make its inputs.
        inputs: List of the `Value`s that come from elsewhere.
        outputs: Nested structure of the `Value`s that the model returns. Of a
            part, list of those that later parts need; of the last one, all
            that the model returns, even if others have made it.
    """

    nodes: list[Node]
    inputs: list[Value]
    outputs: Any

    @property
    def returned(self) -> list[Value]:
        """The values in `outputs`, in order."""
        return keras.tree.flatten(self.outputs)

    @functools.cached_property
    def passed_on(self) -> bool:
        """Whether layers take a value that the model returns, too."""
        taken = {value for node in self.nodes for value in node.inputs}
        return not taken.isdisjoint(self.returned)

    def parts(self, counts: Sequence[int]) -> "list[Graph]":
        """Returns the graph cut into parts of so many consecutive nodes."""
        bounds = itertools.accumulate(counts, initial=0)
        return [self._part(*ends) for ends in itertools.pairwise(bounds)]

    def infer_specs(self) -> None:
        """Gives each value the spec that the built layers tell."""
        specs = {value: value.spec for value in self.inputs}
        for node in self.nodes:
            node.run(specs, lambda layer: layer.compute_output_spec)
        for value, spec in specs.items():
            value.spec = spec

    def crossing(self) -> list[list[Value]]:
        """Returns, for each place between two nodes, the values that cross it.

        Those are made before it and needed after it. What the model is given
        does not count: it comes from elsewhere anyway.
        """
        last: dict[Value, int] = dict.fromkeys(self.returned, len(self.nodes))
        for i, node in reversed(list(enumerate(self.nodes))):
            for value in node.inputs:
                last.setdefault(value, i)
        crossing = []
        alive: list[Value] = []
        for i, node in enumerate(self.nodes[:-1]):
            alive = [x for x in [*alive, *node.made] if last.get(x, 0) > i]
            crossing.append(alive)
        return crossing

    def _part(self, start: int, end: int) -> "Graph":
        nodes = self.nodes[start:end]
        made = [value for node in nodes for value in node.made]
        used = [value for node in nodes for value in node.inputs]
        if end < len(self.nodes):
            later = {x for node in self.nodes[end:] for x in node.inputs}
            later.update(self.returned)
            outputs = [value for value in made if value in later]
        else:
            outputs = self.returned
            used += outputs
        mine = set(made)
        inputs = list(dict.fromkeys(x for x in used if x not in mine))
        return Graph(nodes, inputs, outputs)


def chain(layers: Iterable[keras.Layer], inputs: Any) -> Graph:
    """Returns the graph of layers that are called one after another.

    Between two of them is one value: all that a layer returns, tensors in any
    nested structure. Of these values no spec is known. `inputs` is what the
    first layer is called on, a nested structure of `KerasTensor`s.
    """
    value = first = Value(inputs)
    nodes = []
    for layer in layers:
        before, value = value, Value()
        nodes.append(Node(layer, (before,), {}, value))
    return Graph(nodes, [first], value)


def functional(model: keras.Model) -> Graph:
    """Returns the graph of a functional Keras model.

    A value is one tensor. Nodes are in Keras's order, in which a layer comes
    as late as those that need it allow.
    """
    values: dict[int, Value] = {}

    def value(x):
        if not isinstance(x, keras.KerasTensor):
            return x
        return values.setdefault(id(x), Value(x))

    nodes, made = [], []
    for call in upstream.calls(model):
        args, kwargs = call.arguments.convert(value)
        outputs = [value(x) for x in call.output_tensors]
        nodes.append(Node(call.operation, args, kwargs, outputs))
        made.append(outputs)
    # A list of one output is that output, as Keras has it.
    returned = upstream.unpack_singleton(
        keras.tree.map_structure(value, upstream.outputs_of(model))
    )
    used = {x for node in nodes for x in node.inputs}
    used.update(keras.tree.flatten(returned))
    for outputs in made:
        # What a layer need not return, although its spec tells it.
        while outputs and outputs[-1] not in used:
            outputs.pop()
    return Graph(nodes, [value(x) for x in model.inputs], returned)


def without_masks(graph: Graph) -> Graph:
    """Returns a chain of layers without what makes their Keras masks.

    For layers that are called on one argument each. The other arguments are
    masks, which Keras adds, and with them the operations that make them; it
    adds them again when it calls the layers on tensors that have masks.
    """
    nodes = [
        dataclasses.replace(node, kwargs={})
        for node in graph.nodes
        if isinstance(node.layer, keras.Layer)
    ]
    return dataclasses.replace(graph, nodes=nodes)
