"""A model as calls of layers, in an order that can be cut into stages."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
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

    @property
    def values(self) -> "list[Value]":
        return [self]

    def content(self, contents: Mapping["Value", Any]) -> Any:
        return contents[self]


@dataclasses.dataclass(frozen=True, eq=False)
class Taken:
    """A value as a model within the model takes it, an input of that.

    Attributes:
        value: The `Value`; or `Taken`, by a model around this one.
        mask: Likewise, the mask that the call was given; `None` without one.
        model: The Keras model that takes it.
        place: Which of the model's inputs it is.
    """

    value: "Value | Taken"
    mask: "Value | Taken | None"
    model: keras.Model
    place: int

    @property
    def values(self) -> list[Value]:
        """The values that it follows from."""
        masks = [] if self.mask is None else self.mask.values
        return [*self.value.values, *masks]

    def content(self, contents: Mapping[Value, Any]) -> Any:
        """Returns what the layers of the model get, given all contents."""
        mask = None if self.mask is None else self.mask.content(contents)
        x = self.value.content(contents)
        return upstream.taken(self.model, self.place, x, mask)

    @property
    def spec(self) -> keras.KerasTensor:
        """What it is like."""
        return upstream.graph_of(self.model).inputs[self.place]

    @property
    def unchanged(self) -> Value | None:
        """The value, if its content is what the layers of the model get."""
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
        args: Tuple of its arguments, nested structures with `Value`s, or
            values as `Taken`, where the call gets tensors.
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
        found = [x.values for x in leaves if isinstance(x, (Value, Taken))]
        return list(dict.fromkeys(itertools.chain(*found)))

    @property
    def made(self) -> list[Value]:
        """The values that it makes."""
        return keras.tree.flatten(self.outputs)

    def arguments(self, values: Mapping[Value, Any]) -> tuple[tuple, dict]:
        """Returns the arguments of the call, given the contents of `inputs`."""
        return self.filled(lambda x: x.content(values))

    def filled(self, function: Callable) -> tuple[tuple, dict]:
        """Returns the arguments, with a function of each value or `Taken`."""
        return keras.tree.map_structure(
            lambda x: function(x) if isinstance(x, (Value, Taken)) else x,
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

    @property
    def models(self) -> list[keras.Model]:
        """The models within the model that have been opened."""
        found = []
        for node in self.nodes:
            for x in keras.tree.flatten((node.args, node.kwargs)):
                while isinstance(x, Taken):
                    found.append(x.model)
                    x = x.value
        return list({id(x): x for x in found}.values())

    @functools.cached_property
    def last(self) -> dict[Value, int]:
        """The number of the last node that takes a value.

        Of those that the model returns it is the number of nodes.
        """
        last = {x: i for i, node in enumerate(self.nodes) for x in node.inputs}
        return last | dict.fromkeys(self.returned, len(self.nodes))

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
        crossing = []
        last = self.last
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
            outputs = [
                value for value in made if self.last.get(value, 0) >= end
            ]
        else:
            outputs = self.returned
            used += outputs
        mine = set(made)
        inputs = list(dict.fromkeys(x for x in used if x not in mine))
        return Graph(nodes, inputs, outputs)
