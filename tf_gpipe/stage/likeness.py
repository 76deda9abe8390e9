"""Comparison of layers: which differ only in the values of their weights?"""

import dis
import functools
import inspect
import itertools
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
    upstream.DynamicBackend,
)

# Attributes by which a method may tell a layer from others like it.
_NAMES = frozenset(("name", "_name", "path", "_path", "get_config", "__dict__"))
# Members of a class that no call uses.
_UNUSED = (
    *("__dict__", "__weakref__"),
    *("__init__", "build", "from_config", "get_config"),
)
# What bytecode does with a layer right after loading it, to use an attribute.
_USES_ATTRIBUTE = (
    "DELETE_ATTR",
    "LOAD_ATTR",
    "LOAD_METHOD",
    "LOAD_SUPER_ATTR",
    "STORE_ATTR",
)
# Packages whose layer classes use no state beside a layer's attributes.
_LIBRARIES = (
    *("keras", "tensorflow"),
    *("abc", "builtins", "collections", "typing"),
)


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


def in_costs(layers: Any) -> tuple[Hashable, bool]:
    """Returns a key that is equal for layers whose calls cost the same.

    They are of the same classes, whatever these do, and have equal attributes.
    Objects of unknown types are equal to themselves alone.

    Args:
        layers: As of `of`.

    Returns:
        Tuple of the key, and whether it may outlive the layers: all classes
        and functions are those of libraries.
    """
    walk = _CostWalk()
    return walk.form(layers), walk.of_keras


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
        if isinstance(x, type) or inspect.ismodule(x) or _is_alone(x):
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
        if upstream.runs_its_graph(x) and upstream.graph_of(x):
            return type(x), self._model(x)
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
        self.of_keras = False
        return Itself(x)


def _is_of_library(x: Any) -> bool:
    """Returns whether a class, function or module is in `_LIBRARIES`."""
    name = x.__name__ if inspect.ismodule(x) else x.__module__
    return name.split(".")[0] in _LIBRARIES


def _is_plain(kind: type) -> bool:
    """Returns whether the methods of a class use the layer's attributes only.

    That is, neither the layer's name, nor the layer itself as an argument or
    key, nor objects in a closure, where a method might store something when it
    is called.
    """
    return all(
        _knows_attributes_alone(member)
        for cls in kind.__mro__
        if not _is_of_library(cls)
        for name, member in vars(cls).items()
        if name not in _UNUSED
    )


def _knows_attributes_alone(member: Any) -> bool:
    """Returns whether a member of a class is such a method, or no method."""
    if isinstance(member, property):
        methods = (member.fget, member.fset, member.fdel)
        return all(x is None or _knows_attributes_alone(x) for x in methods)
    is_free = isinstance(member, (classmethod, staticmethod))
    method = member.__func__ if is_free else member
    if not isinstance(method, types.FunctionType):
        # A callable such as a `tf.function` hides the method that it wraps, and
        # another descriptor may keep a value for each layer.
        return isinstance(method, type) or not (
            callable(method) or hasattr(method, "__get__")
        )
    try:
        around = [cell.cell_contents for cell in method.__closure__ or ()]
    except ValueError:
        # A variable of the closure has no value yet.
        return False
    # A default value may be a list or a dictionary that calls share.
    defaults = (method.__kwdefaults__ or {}).values()
    around += [*(method.__defaults__ or ()), *defaults]
    return not _tells_apart(method.__code__, not is_free) and all(
        map(_is_fixed, around)
    )


def _is_fixed(x: Any) -> bool:
    """Returns whether an object can hold nothing that calls change."""
    if isinstance(x, tuple):
        return all(map(_is_fixed, x))
    return isinstance(x, (type, types.ModuleType, *_VALUES)) or _is_alone(x)


def _is_alone(x: Any) -> bool:
    """Returns whether an object is a function without a closure."""
    return isinstance(x, types.FunctionType) and not x.__closure__


@functools.lru_cache(4096)
def _tells_apart(code: types.CodeType, is_method: bool) -> bool:
    """Returns whether code may tell a layer from others that are alike.

    Args:
        code: The code of a function.
        is_method: Whether its first argument is the layer.
    """
    layer = code.co_varnames[0] if is_method and code.co_varnames else None
    return any(
        not _NAMES.isdisjoint(x.co_names)
        or (layer is not None and _passes_on(x, layer))
        for x in _codes_in(code)
    )


def _passes_on(code: types.CodeType, variable: str) -> bool:
    """Returns whether code uses a variable for more than its attributes."""
    steps = [
        (x.opname, x.argval if isinstance(x.argval, tuple) else (x.argval,))
        for x in dis.get_instructions(code)
        # `x.a += 1` copies `x` before it loads `x.a`.
        if x.opname not in ("COPY", "EXTENDED_ARG")
    ]
    shared = variable in (*code.co_cellvars, *code.co_freevars)
    # A shared variable that is loaded in another way goes to an inner function.
    loads = "LOAD_DEREF" if shared else "LOAD_FAST"
    return any(
        loads in name
        and variable in used
        and (variable in used[:-1] or after not in _USES_ATTRIBUTE)
        for (name, used), (after, _) in itertools.pairwise(steps)
    )


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    """Returns code and that of functions within it, as comprehensions are."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return [code, *itertools.chain.from_iterable(map(_codes_in, inner))]
