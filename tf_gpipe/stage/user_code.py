"""Code that is neither Keras's nor TensorFlow's: what may it change?

A layer that such code runs is traced once more, to compare it with others. That
must not change what the others do.
"""

import collections.abc
import dis
import inspect
import sys
import types
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

# Types of objects that nothing changes, and that are compared by value.
VALUES = (
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
_FIXED = (type, types.ModuleType, *VALUES)
# Packages whose layer classes use no state beside a layer's attributes.
_LIBRARIES = (
    *("keras", "tensorflow"),
    *("abc", "builtins", "collections", "typing"),
)
_CONTAINERS = (
    collections.abc.MutableMapping,
    collections.abc.MutableSequence,
    collections.abc.MutableSet,
)
# Members of a class that no call uses.
_UNUSED = ("__init__", "build", "from_config", "get_config", "_abc_impl")

# By class: whether its code may change something.
_may_change: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def is_of_library(x: Any) -> bool:
    """Returns whether a class, function or module is Keras's or TensorFlow's.

    Those of Python that they use count as well.
    """
    name = x.__name__ if inspect.ismodule(x) else x.__module__
    if name == "builtins":
        # As that of classes made by `exec` is, if it is not told a module.
        return vars(sys.modules[name]).get(x.__name__) is x
    return name is not None and name.split(".")[0] in _LIBRARIES


def may_change(x: Any) -> bool:
    """Returns whether code may change something beside a layer's attributes.

    It may do so in an object that it finds in a closure, in a default value or
    in the class, and in one of a global variable that is a list or another
    container, or has one. Only such code is found that names this object, or
    calls a function by its name that does.

    Args:
        x: A class, of which all methods count that a call may use, or a
            function.
    """
    if isinstance(x, types.FunctionType):
        return _function_may(x, {})
    if x not in _may_change:
        _may_change[x] = any(
            _member_may(name, member, {})
            for cls in x.__mro__
            if not is_of_library(cls)
            for name, member in vars(cls).items()
            if name not in _UNUSED
        )
    return _may_change[x]


def _member_may(name: str, member: Any, seen: dict[int, Any]) -> bool:
    if isinstance(member, property):
        found = [member.fget, member.fset, member.fdel]
        return any(_function_may(x, seen) for x in found if x is not None)
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    if isinstance(member, types.FunctionType):
        return _function_may(member, seen)
    # Python's own, such as `__annotations__`, but not `__call__ = ...`.
    of_python = name.startswith("__") and not callable(member)
    return not of_python and not _is_fixed(member, seen)


def _function_may(function: Any, seen: dict[int, Any]) -> bool:
    """As `may_change`, unless the function is in `seen`, to which it is added.

    The value in `seen` keeps a function alive, so that no other gets its id.
    """
    if not isinstance(function, types.FunctionType):
        return True
    if id(function) in seen or is_of_library(function):
        return False
    seen[id(function)] = function
    used = [*(function.__defaults__ or ())]
    used += (function.__kwdefaults__ or {}).values()
    try:
        used += [x.cell_contents for x in function.__closure__ or ()]
    except ValueError:
        # A variable of the closure has no value yet.
        return True
    steps = [
        step
        for code in _codes_in(function.__code__)
        for step in dis.get_instructions(code)
    ]
    if any(x.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for x in steps):
        return True
    names = {
        x.argval for x in steps if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    variables = [
        function.__globals__[name]
        for name in names
        if name in function.__globals__
    ]
    return not all(_is_fixed(x, seen) for x in used) or any(
        _function_may(x, seen)
        if isinstance(x, types.FunctionType)
        else _has_container(x)
        for x in variables
    )


def _has_container(x: Any) -> bool:
    """Returns whether an object is a container, or has one as an attribute."""
    if isinstance(x, _FIXED):
        return False
    of_library = is_of_library(type(x))
    attributes = {} if of_library else getattr(x, "__dict__", {})
    return any(isinstance(y, _CONTAINERS) for y in (x, *attributes.values()))


def _is_fixed(x: Any, seen: dict[int, Any]) -> bool:
    """Returns whether code that uses an object changes nothing in it."""
    if isinstance(x, types.FunctionType):
        return not _function_may(x, seen)
    if isinstance(x, tuple):
        return all(_is_fixed(each, seen) for each in x)
    if isinstance(x, _FIXED):
        return True
    # A descriptor may keep a value for each layer.
    changes = isinstance(x, _CONTAINERS) or hasattr(type(x), "__get__")
    return not changes and is_of_library(type(x))


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    """Returns code and that of functions within it, as comprehensions are."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return [code, *(y for x in inner for y in _codes_in(x))]
