"""Comparison of layers: may they differ only in the values of their weights?"""

import types
from collections.abc import Hashable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import keras
import numpy as np

from tf_gpipe import upstream
from tf_gpipe.stage.user_code import VALUES
from tf_gpipe.stage.user_code import is_of_library
from tf_gpipe.stage.user_code import may_change

# Types of objects whose attributes are compared.
_OBJECTS = (
    keras.Operation,
    keras.InputSpec,
    keras.Regularizer,
    keras.constraints.Constraint,
    keras.DTypePolicy,
    upstream.DynamicBackend,
)


class Likeness(NamedTuple):
    """A key to compare layers by, and the layers' variables in order.

    Layers with equal forms are of the same classes and have equal attributes.
    If all their code is that of libraries, they compute the same function of
    their variables, taken in this order. Other code may use more, such as a
    layer's name, and only its traces tell: see `same_traces`.
    """

    form: Hashable
    variables: list[keras.Variable]
    # Whether all classes and functions are of Keras or TensorFlow.
    of_keras: bool


def of(layers: Any, in_costs: bool = False) -> Likeness:
    """Returns the `Likeness` of layers.

    No other equals a layer that has an object of an unknown type, or whose call
    may change what others do.

    Args:
        layers: A layer, or a nested structure of layers and of other objects
            that must be equal too, such as arguments of their calls.
        in_costs: Whether layers are equal if their calls cost the same. Then
            objects of unknown types equal themselves.
    """
    walk = _Walk(in_costs)
    form = walk.form(layers)
    return Likeness(form, walk.variables, walk.of_keras)


class Itself:
    """A hashable wrapper that compares an object by identity.

    It keeps the object alive, so that no other object gets its id.
    """

    def __init__(self, x: Any):
        self._x = x

    def __hash__(self) -> int:
        return id(self._x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self._x is other._x


class _Walk:
    """A recursive walk through the attributes of layers, making their form."""

    def __init__(self, in_costs: bool):
        self._in_costs = in_costs
        self.variables: list[keras.Variable] = []
        self.of_keras = True
        # By id: the object's number, and the object itself, which is kept
        # alive so that no other one gets its id.
        self._seen: dict[int, tuple[int, Any]] = {}

    def form(self, x: Any) -> Hashable:
        """Returns the form of an object; notes the variables in it."""
        if isinstance(x, VALUES):
            return type(x), repr(x) if isinstance(x, (slice, float)) else x
        if isinstance(x, (type, types.ModuleType)):
            self.of_keras &= is_of_library(x)
            return Itself(x)
        if isinstance(x, types.FunctionType):
            self.of_keras &= is_of_library(x)
            return self._alone(x) if may_change(x) else Itself(x)
        if id(x) in self._seen:
            return "seen", self._seen[id(x)][0]
        self._seen[id(x)] = len(self._seen), x
        if isinstance(x, keras.Variable):
            self.variables.append(x)
            casts = upstream.casts(x)
            return "variable", tuple(x.shape), x.dtype, x.trainable, casts
        if isinstance(x, (list, tuple)):
            return type(x).__name__, tuple(map(self.form, x))
        if isinstance(x, (set, frozenset)):
            return "set", frozenset(map(self.form, x))
        if isinstance(x, dict):
            return "dict", self._items(x)
        if isinstance(x, keras.random.SeedGenerator):
            return type(x), self.form(x.state)
        kind: Any = type(x)
        self.of_keras &= is_of_library(kind)
        if upstream.runs_its_graph(x) and upstream.graph_of(x):
            return kind, self._model(x)
        if isinstance(x, keras.initializers.Constant) and isinstance(
            x.value, np.ndarray
        ):
            # By identity: its config, a list, may take gigabytes.
            return kind, Itself(x.value)
        if isinstance(x, keras.Initializer):
            return kind, self.form(x.get_config())
        changes = not self._in_costs and may_change(kind)
        if isinstance(x, _OBJECTS) and not changes:
            return kind, self._items(upstream.attributes_used_by_call(x))
        self.of_keras = False
        return self._alone(x)

    def _alone(self, x: Any) -> Hashable:
        """Returns a form that equals no other one, but in costs that of `x`."""
        return Itself(x if self._in_costs else object())

    def _model(self, model: keras.Model) -> Hashable:
        """Returns the form of a model whose call only runs its graph."""
        graph = upstream.graph_of(model)
        numbers: dict[int, int] = {}

        def number(x: Any) -> Any:
            if not isinstance(x, keras.KerasTensor):
                return x
            return "tensor", numbers.setdefault(id(x), len(numbers))

        return self.form(
            (
                upstream.conversion_of_inputs(model),
                [number(x) for x in graph.inputs],
                [
                    (
                        call.operation,
                        call.arguments.convert(number),
                        [number(x) for x in call.output_tensors],
                    )
                    for call in upstream.nodes_of(graph)
                ],
                keras.tree.map_structure(number, upstream.outputs_of(graph)),
            )
        )

    def _items(self, x: Mapping) -> Hashable:
        return tuple((self.form(k), self.form(v)) for k, v in x.items())
