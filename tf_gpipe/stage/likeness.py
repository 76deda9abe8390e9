"""Comparison of layers: which differ only in the values of their weights?"""

import inspect
import types
from collections.abc import Hashable
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
)

# Attributes by which a method may tell a layer from others like it.
_NAMES = frozenset(("name", "_name", "path", "_path"))
# Packages whose layer classes use no state beside a layer's attributes.
_LIBRARIES = ("builtins", "keras", "tensorflow")


class Likeness(NamedTuple):
    """A key to compare layers by, and the layers' variables in order.

    Layers with equal forms compute the same function of their variables, taken
    in this order.
    """

    form: Hashable
    variables: list[keras.Variable]
    # Whether all classes and functions are of Keras or TensorFlow: other code
    # may use state that the form does not contain.
    of_keras: bool


def of(layers: Any) -> Likeness | None:
    """Returns the `Likeness` of layers, or `None` if they cannot be compared.

    A layer cannot be compared if it has an attribute of an unknown type, which
    may do anything.

    Args:
        layers: A layer, or a nested structure of layers and of other objects
            that must be equal too, such as arguments of their calls.
    """
    walk = _Walk()
    try:
        form = walk.form(layers)
        return Likeness(form, walk.variables, walk.of_keras)
    except _UnknownKindError:
        return None


def in_costs(layers: Any) -> Hashable:
    """Returns a key that is equal for layers whose calls cost the same.

    They are of the same classes, whatever these do, and have equal attributes.
    Objects of unknown types are equal to themselves alone.

    Args:
        layers: As of `of`.
    """
    return _CostWalk().form(layers)


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


class _UnknownKindError(Exception):
    pass


class _Walk:
    """A recursive walk through the attributes of layers, making their form."""

    def __init__(self) -> None:
        self.variables: list[keras.Variable] = []
        self.of_keras = True
        # By id: the object's number, and the object itself, which is kept
        # alive so that no other one gets its id.
        self._seen: dict[int, tuple[int, Any]] = {}

    def form(self, x: Any) -> Hashable:
        """Returns the form of an object; notes the variables in it."""
        if isinstance(x, _VALUES):
            return type(x), repr(x) if isinstance(x, (slice, float)) else x
        is_function = isinstance(x, types.FunctionType) and not x.__closure__
        if isinstance(x, type) or inspect.ismodule(x) or is_function:
            self.of_keras &= _is_of_library(x)
            return Itself(x)
        if id(x) in self._seen:
            return "seen", self._seen[id(x)][0]
        self._seen[id(x)] = len(self._seen), x
        if isinstance(x, keras.Variable):
            self.variables.append(x)
            kind = tuple(x.shape), x.dtype, x.trainable, upstream.casts(x)
            return "variable", *kind
        if isinstance(x, (list, tuple)):
            return type(x).__name__, tuple(map(self.form, x))
        if isinstance(x, (set, frozenset)):
            return "set", frozenset(map(self.form, x))
        if isinstance(x, dict):
            return "dict", self._items(x)
        if isinstance(x, keras.random.SeedGenerator):
            return type(x), self.form(x.state)
        self.of_keras &= _is_of_library(type(x))
        if isinstance(x, keras.initializers.Constant) and isinstance(
            x.value, np.ndarray
        ):
            # By identity: its config, a list, may take gigabytes.
            return type(x), Itself(x.value)
        if isinstance(x, keras.Initializer):
            return type(x), self.form(x.get_config())
        if isinstance(x, _OBJECTS) and self._compares(type(x)):
            return type(x), self._items(upstream.attributes_used_by_call(x))
        return self._unknown(x)

    def _compares(self, kind: type) -> bool:
        """Returns whether objects of a class are compared by attributes."""
        return _is_plain(kind)

    def _unknown(self, x: Any) -> Hashable:
        raise _UnknownKindError

    def _items(self, x: Mapping) -> Hashable:
        return tuple((self.form(k), self.form(v)) for k, v in x.items())


class _CostWalk(_Walk):
    """A walk for what calls cost, not for what they compute."""

    def _compares(self, kind: type) -> bool:
        return True

    def _unknown(self, x: Any) -> Hashable:
        return Itself(x)


def _is_of_library(x: Any) -> bool:
    """Returns whether a class, function or module is in `_LIBRARIES`."""
    name = x.__name__ if inspect.ismodule(x) else x.__module__
    return name.split(".")[0] in _LIBRARIES


def _is_plain(kind: type) -> bool:
    """Returns whether the methods of a class use the layer's attributes only.

    That is, neither the layer's name nor objects in a closure, where a method
    might store something when it is called.
    """
    return all(
        _knows_attributes_alone(method)
        for cls in kind.__mro__
        if not _is_of_library(cls)
        for name, method in vars(cls).items()
        if name not in ("__init__", "build", "get_config", "from_config")
    )


def _knows_attributes_alone(member: Any) -> bool:
    """Returns whether a member of a class is such a method, or no method."""
    method = getattr(member, "fget", getattr(member, "__func__", member))
    if not isinstance(method, types.FunctionType):
        # A callable such as a `tf.function` hides the method that it wraps.
        return isinstance(method, type) or not callable(method)
    try:
        around = [cell.cell_contents for cell in method.__closure__ or ()]
    except ValueError:
        # A variable of the closure has no value yet.
        return False
    return _NAMES.isdisjoint(_names_in(method.__code__)) and all(
        isinstance(x, (type, types.FunctionType, types.ModuleType, *_VALUES))
        for x in around
    )


def _names_in(code: types.CodeType) -> set[str]:
    """Returns the names of attributes and globals that code uses.

    That of functions within it, such as comprehensions, too.
    """
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))
