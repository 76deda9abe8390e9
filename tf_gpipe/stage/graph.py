"""A model as an ordered list of layer calls that can be cut into stages."""

import contextlib
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
import tensorflow as tf

from tf_gpipe import upstream

# Rows of specs and traces: a prime, which is hardly the size of another axis.
ROWS = 1009


@dataclasses.dataclass(eq=False)
class Value:
    """A result of a layer call, or an input of the model.

    It stands for the tensors, which are known when the layers run.
    """

    # Shapes and dtypes: nested structure of `KerasTensor`s, or `None` if not
    # known.
    spec: Any = None

    @property
    def values(self) -> "list[Value]":
        return [self]

    def content(self, contents: Mapping["Value", Any]) -> Any:
        return contents[self]


@dataclasses.dataclass(frozen=True, eq=False)
class NestedInput:
    """A value as input of a nested model, converted as that model does it.

    Attributes:
        value: The `Value`; or a `NestedInput` of the model around this one.
        mask: Likewise, the mask that the call was given; `None` without one.
        model: The nested Keras model.
        place: Index of the model's input.
    """

    value: "Value | NestedInput"
    mask: "Value | NestedInput | None"
    model: keras.Model
    place: int

    @property
    def values(self) -> list[Value]:
        """The values that it depends on."""
        masks = [] if self.mask is None else self.mask.values
        return [*self.value.values, *masks]

    def content(self, contents: Mapping[Value, Any]) -> Any:
        """Returns the tensor that the model's layers get.

        Args:
            contents: Mapping from `Value`s to their tensors.
        """
        mask = None if self.mask is None else self.mask.content(contents)
        x = self.value.content(contents)
        return upstream.convert_nested_input(self.model, self.place, x, mask)

    @property
    def spec(self) -> keras.KerasTensor:
        """The `KerasTensor` of the model's input."""
        return upstream.graph_of(self.model).inputs[self.place]

    @property
    def unchanged(self) -> Value | None:
        """The value if the nested model does not convert it, else `None`."""
        before = self.value
        value = before if isinstance(before, Value) else before.unchanged
        same = (
            self.mask is None
            and isinstance(before.spec, keras.KerasTensor)
            and before.spec.dtype == self.spec.dtype
            and before.spec.ndim == self.spec.ndim
        )
        return value if same else None


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One call of a layer.

    Attributes:
        layer: Keras layer, or another Keras operation.
        args: Tuple of its arguments, nested structures with a `Value` or
            `NestedInput` in place of each tensor.
        kwargs: Dictionary of its keyword arguments, likewise.
        outputs: One `Value` for all tensors that it returns; or a list with a
            `Value` for each of them, up to the last one that is used.
    """

    layer: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: Value | list[Value]

    @property
    def inputs(self) -> list[Value]:
        """The values that the call takes, each once."""
        leaves = keras.tree.flatten((self.args, self.kwargs))
        found = [
            x.values for x in leaves if isinstance(x, (Value, NestedInput))
        ]
        return list(dict.fromkeys(itertools.chain(*found)))

    @property
    def made(self) -> list[Value]:
        """The values that the call makes."""
        return keras.tree.flatten(self.outputs)

    @functools.cached_property
    def variables(self) -> list[keras.Variable]:
        """The variables among its arguments, as of an operation on a weight."""
        leaves = keras.tree.flatten((self.args, self.kwargs))
        return [x for x in leaves if isinstance(x, keras.Variable)]

    def arguments(self, values: Mapping[Value, Any]) -> tuple[tuple, dict]:
        """Returns the arguments of the call, given the contents of `inputs`."""
        return self.filled(lambda x: x.content(values))

    def filled(self, function: Callable) -> tuple[tuple, dict]:
        """Returns `args` and `kwargs`, `function` applied to each value."""
        return keras.tree.map_structure(
            lambda x: function(x) if isinstance(x, (Value, NestedInput)) else x,
            (self.args, self.kwargs),
        )

    def contents(self, results: Any) -> Iterator[tuple[Value, Any]]:
        """Returns pairs of a value in `made` and its tensors.

        Args:
            results: Return value of the layer.
        """
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
        # If a layer returns more tensors than its spec has, Keras takes the
        # first ones.
        return zip(self.outputs, found, strict=False)

    def run(self, values: dict[Value, Any], call: Callable = lambda f: f):
        """Calls the layer, and adds its results to `values`.

        Args:
            values: Dictionary from `Value`s to their tensors.
            call: Function from the layer to the callable that is called in its
                place.
        """
        args, kwargs = self.arguments(values)
        values.update(self.contents(call(self.layer)(*args, **kwargs)))


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The layer calls of a model, or of a part of one.

    Attributes:
        nodes: List of `Node`s, each after the nodes that make its inputs.
        inputs: List of the `Value`s that it takes and that none of its nodes
            make.
        outputs: Nested structure of the `Value`s that the model returns. For a
            part, list of the values that later parts need; for the last part,
            list of all values that the model returns, even if earlier parts
            make them.
    """

    nodes: list[Node]
    inputs: list[Value]
    outputs: Any

    @property
    def returned(self) -> list[Value]:
        """The values in `outputs`, in order."""
        return keras.tree.flatten(self.outputs)

    @functools.cached_property
    def declared_rows(self) -> int | None:
        """The rows of a batch in specs, as by `Input(batch_shape=(8, 4))`."""
        specs = keras.tree.flatten([value.spec for value in self.inputs])
        known = [x.shape[0] for x in specs if x is not None and x.shape]
        return next(filter(None, known), None)

    @property
    def models(self) -> list[keras.Model]:
        """The nested models whose layers are nodes of this graph."""
        found = []
        for node in self.nodes:
            for x in keras.tree.flatten((node.args, node.kwargs)):
                while isinstance(x, NestedInput):
                    found.append(x.model)
                    x = x.value
        return unique(found)

    @functools.cached_property
    def known_costs(self) -> dict[Any, Any]:
        """A cache of `partition.layer_costs`, which ends with the graph."""
        return {}

    @functools.cached_property
    def last(self) -> dict[Value, int]:
        """Index of the last node that takes each value.

        For a value that the model returns it is the number of nodes.
        """
        last = {x: i for i, node in enumerate(self.nodes) for x in node.inputs}
        return last | dict.fromkeys(self.returned, len(self.nodes))

    @functools.cached_property
    def outputs_are_reused(self) -> bool:
        """Whether a layer takes a value that the model also returns."""
        taken = {value for node in self.nodes for value in node.inputs}
        return not taken.isdisjoint(self.returned)

    def differentiated(self) -> list[bool]:
        """Returns whether each call has a backward pass in a training step.

        It has none before the first weight that is trained.
        """
        found = []
        untrained = set(self.inputs)
        for node in self.nodes:
            if any(v.trainable for v in variables_of([node])):
                found.append(True)
                continue
            found.append(not untrained.issuperset(node.inputs))
            if not found[-1]:
                untrained.update(node.made)
        return found

    def parts(self, counts: Sequence[int]) -> "list[Graph]":
        """Returns the graph cut into parts of consecutive nodes.

        Args:
            counts: Number of nodes of each part.
        """
        parts = [self.part(x.start, x.stop) for x in ranges(counts)]
        last = parts[-1]
        made = {value for node in last.nodes for value in node.made}
        passed = [value for value in self.returned if value not in made]
        inputs = list(dict.fromkeys([*last.inputs, *passed]))
        return [*parts[:-1], Graph(last.nodes, inputs, self.returned)]

    def part(self, start: int, end: int) -> "Graph":
        """Returns the nodes from `start` to `end` as a graph of their own."""
        nodes = self.nodes[start:end]
        made = {value for node in nodes for value in node.made}
        used = dict.fromkeys(x for node in nodes for x in node.inputs)
        inputs = [value for value in used if value not in made]
        return Graph(nodes, inputs, self.taken(start, end))

    def taken(self, start: int, end: int) -> list[Value]:
        """Returns the values that a part makes and that are needed after it."""
        return [
            value
            for node in self.nodes[start:end]
            for value in node.made
            if self.last.get(value, start) >= end
        ]

    def infer_specs(self) -> None:
        """Sets the spec of each value, as the built layers compute it."""
        specs = {value: value.spec for value in self.inputs}
        for node in self.nodes:
            node.run(specs, upstream.spec_function)
        for value, spec in specs.items():
            value.spec = spec

    @functools.cached_property
    def multiplied(self) -> set[Value]:
        """The values with several rows for each row of the inputs.

        By the specs that layers compute. A value whose layer fails to do that
        for this many rows counts as one with as many rows as the inputs.
        """
        specs = {
            value: keras.tree.map_structure(
                lambda x: keras.KerasTensor((ROWS, *x.shape[1:]), x.dtype),
                value.spec,
            )
            for value in self.inputs
        }
        with (
            tf.init_scope(),
            upstream.losses_kept(node.layer for node in self.nodes),
        ):
            for node in self.nodes:
                # A layer may raise any error, and those after it lack a spec.
                with contextlib.suppress(Exception):
                    node.run(specs, upstream.spec_function)

        def several(x: Any) -> bool:
            rows = x.shape[0] if getattr(x, "shape", ()) else None
            return rows is not None and rows > ROWS and rows % ROWS == 0

        return {
            value
            for value, content in specs.items()
            if any(map(several, keras.tree.flatten(content)))
        }

    def crossing(self, size: Callable[[Value], int]) -> list[int]:
        """Returns, for each place between two nodes, the bytes that cross it.

        Those of the values that are made before that place and needed after it.
        Inputs of the model are left out, since no stage makes them.

        Args:
            size: Function that returns the bytes of a `Value`.
        """
        crossing = []
        last = self.last
        alive: list[Value] = []
        for i, node in enumerate(self.nodes[:-1]):
            alive = [x for x in [*alive, *node.made] if last.get(x, 0) > i]
            crossing.append(sum(map(size, alive)))
        return crossing


def ranges(counts: Iterable[int]) -> list[slice]:
    """Returns the ranges of consecutive parts, given how long each is."""
    bounds = itertools.accumulate(counts, initial=0)
    return [slice(*ends) for ends in itertools.pairwise(bounds)]


def unique(objects: Iterable[Any]) -> list[Any]:
    """Returns the objects in order, each once, by identity."""
    return list({id(x): x for x in objects}.values())


def variables_of(nodes: Sequence[Node]) -> list[keras.Variable]:
    """Returns the variables that layer calls use now, each once."""
    layers = unique(node.layer for node in nodes)
    own = [v for x in layers for v in getattr(x, "variables", ())]
    return unique([*own, *(v for node in nodes for v in node.variables)])
