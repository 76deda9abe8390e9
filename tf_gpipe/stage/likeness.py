"""Comparison of layers: may they differ only in the values of their weights?"""

import collections
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import upstream

# Types of objects that are compared by value.
_VALUES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    type(...),
    np.dtype,
    np.generic,
    tf.DType,
    tf.TensorShape,
)
# Types of objects whose attributes are compared.
_OBJECTS = (
    keras.Operation,
    keras.InputSpec,
    keras.Regularizer,
    keras.constraints.Constraint,
    keras.DTypePolicy,
    upstream.DynamicBackend,
)
# Packages whose layer classes use no state beside a layer's attributes.
_LIBRARIES = (
    *("keras", "tensorflow"),
    *("abc", "builtins", "collections", "typing"),
)
_CONTAINERS = (collections.deque, dict, list, set)
# Members of a class that no call uses.
_UNUSED = ("__init__", "build", "from_config", "get_config")


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

    Objects of unknown types are equal to themselves alone, and so are layers
    whose calls may change what others do.

    Args:
        layers: A layer, or a nested structure of layers and of other objects
            that must be equal too, such as arguments of their calls.
        in_costs: Whether such layers may be equal to others: what their calls
            cost is the same.
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
        if isinstance(x, _VALUES):
            return type(x), repr(x) if isinstance(x, (slice, float)) else x
        if isinstance(x, type) or inspect.ismodule(x) or _is_alone(x):
            self.of_keras &= _is_of_library(x)
            return Itself(x)
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
        self.of_keras &= _is_of_library(kind)
        if not self._in_costs and _may_remember(kind):
            return Itself(x)
        if upstream.runs_its_graph(x) and upstream.graph_of(x):
            return kind, self._model(x)
        if isinstance(x, keras.initializers.Constant) and isinstance(
            x.value, np.ndarray
        ):
            # By identity: its config, a list, may take gigabytes.
            return kind, Itself(x.value)
        if isinstance(x, keras.Initializer):
            return kind, self.form(x.get_config())
        if isinstance(x, _OBJECTS):
            return kind, self._items(upstream.attributes_used_by_call(x))
        self.of_keras = False
        return Itself(x)

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


def _is_of_library(x: Any) -> bool:
    """Returns whether a class, function or module is in `_LIBRARIES`."""
    name = x.__name__ if inspect.ismodule(x) else x.__module__
    if name == "builtins":
        # As that of classes made by `exec` is, if it is not told a module.
        return vars(sys.modules[name]).get(x.__name__) is x
    return name is not None and name.split(".")[0] in _LIBRARIES


def _is_alone(x: Any) -> bool:
    """Returns whether an object is a function without a closure."""
    return isinstance(x, types.FunctionType) and not x.__closure__


@functools.lru_cache(512)
def _may_remember(kind: Any) -> bool:
    """Returns whether code of a class may note something when it is called.

    It may do so in a list or another container that it finds in a closure, a
    default value or a global variable, or in any object of a closure. To trace
    such a layer once more may change what others do.
    """
    return any(
        not _is_fixed(x)
        for cls in kind.__mro__
        if not _is_of_library(cls)
        for name, member in vars(cls).items()
        if name not in _UNUSED
        for x in _used_by(member, {})
    )


def _is_fixed(x: Any) -> bool:
    """Returns whether an object can hold nothing that calls change."""
    if isinstance(x, tuple):
        return all(map(_is_fixed, x))
    kinds = (type, types.ModuleType, types.FunctionType, *_VALUES)
    return isinstance(x, kinds)


def _used_by(member: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yields objects that a method uses: see `_may_remember`.

    Args:
        member: A member of a class, or any other object.
        seen: Dictionary of functions that have been looked at.
    """
    if isinstance(member, property):
        for x in (member.fget, member.fset, member.fdel):
            yield from _used_by(x, seen)
        return
    method = inspect.unwrap(getattr(member, "__func__", member))
    if not isinstance(method, types.FunctionType) or id(method) in seen:
        return
    seen[id(method)] = method
    if _is_of_library(method):
        return
    found = [
        *(method.__defaults__ or ()),
        *(method.__kwdefaults__ or {}).values(),
    ]
    for cell in method.__closure__ or ():
        # The variable may have no value yet.
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(cell)
    yield from found
    names = itertools.chain.from_iterable(
        code.co_names for code in _codes_in(method.__code__)
    )
    used = [method.__globals__[x] for x in names if x in method.__globals__]
    yield from (x for x in used if isinstance(x, _CONTAINERS))
    for x in [*found, *used]:
        yield from _used_by(x, seen)


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    """Returns code and that of functions within it, as comprehensions are."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return [code, *itertools.chain.from_iterable(map(_codes_in, inner))]
