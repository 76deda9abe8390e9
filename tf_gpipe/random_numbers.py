"""Generators of random numbers that the data of `fit` may draw from."""

import collections
import gc
import hashlib
import itertools
import json
import random
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import upstream

# Where numbers are drawn from: the functions of `random` and `np.random`, or
# generators that the data has.
SHARED, OWN = "shared", "own"
_GENERATORS = (
    keras.random.SeedGenerator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
    tf.random.Generator,
)
# Methods of the generators that `random` and `np.random` share with all.
_FUNCTIONS: tuple[Any, ...] = random.random, np.random.random_sample
# Generators are looked for among so many objects of a data set, which takes a
# tenth of a second, and among so many that one of them holds.
_MOST_OBJECTS = 100_000
_LIBRARIES = "keras", "tensorflow"


def attributes(dataset: Any) -> list[Any]:
    """Returns the generators that are attributes of a `PyDataset`."""
    if not isinstance(dataset, keras.utils.PyDataset):
        return []
    return [x for x in vars(dataset).values() if isinstance(x, _GENERATORS)]


def _within(dataset: Any) -> list[Any]:
    """Returns all generators that a `PyDataset` can reach, and layers' seeds.

    It reaches what objects, containers and functions hold, but for attributes
    of classes, global names, and what objects of TensorFlow and Keras hold.
    """
    found: list[Any] = []
    waiting: collections.deque = collections.deque()
    seen = {id(x.__self__) for x in _FUNCTIONS}
    if isinstance(dataset, keras.utils.PyDataset):
        waiting.append(dataset)
    while waiting and len(seen) < _MOST_OBJECTS:
        x = waiting.popleft()
        if id(x) in seen:
            continue
        seen.add(id(x))
        # Not `isinstance`, which runs the code of proxies.
        kind = type(x)
        if issubclass(kind, _GENERATORS):
            found.append(x)
        elif issubclass(kind, keras.Layer):
            found += filter(upstream.is_seed, x.non_trainable_variables)
        elif issubclass(kind, types.FunctionType):
            # Without its global names.
            waiting += x.__closure__, x.__defaults__, x.__kwdefaults__
        elif not (
            issubclass(kind, (type, types.ModuleType))
            or kind.__module__.partition(".")[0] in _LIBRARIES
        ):
            # Numbers and strings hold nothing.
            held = filter(gc.is_tracked, gc.get_referents(x))
            waiting += itertools.islice(held, _MOST_OBJECTS)
    return found


def watched(dataset: Any) -> Callable[[], dict[str, str]]:
    """Returns a function that tells where numbers have been drawn from since.

    It returns a dictionary with `SHARED`, `OWN`, both or neither, and for each
    a digest of the states before, of the generators whose states have changed.

    Args:
        dataset: The data, of any kind.
    """
    shared = _digest(states())
    own = {id(x): (x, _digest(_state(x))) for x in _within(dataset)}

    def drawn() -> dict[str, str]:
        found = {}
        if _digest(states()) != shared:
            found[SHARED] = shared
        changed = [old for x, old in own.values() if _digest(_state(x)) != old]
        # With those that are made as they are needed.
        if changed or any(id(x) not in own for x in _within(dataset)):
            found[OWN] = _digest(changed)
        return found

    return drawn


def states() -> list:
    """Returns the states of Python's and NumPy's shared generators, for JSON.

    Keras shuffles a `PyDataset` by Python's.
    """
    return _listed([random.getstate(), np.random.get_state(legacy=False)])


def set_states(found: list) -> None:
    """Restores the states that `states` has returned."""
    (version, numbers, gauss), state = found
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state)


def _state(generator: Any) -> Any:
    """Returns the state of a generator, for JSON; `None` if it has none."""
    try:
        if isinstance(generator, random.Random):
            return _listed(generator.getstate())
        if isinstance(generator, np.random.RandomState):
            return _listed(generator.get_state(legacy=False))
        if isinstance(generator, np.random.Generator):
            return _listed(generator.bit_generator.state)
        is_variable = isinstance(generator, keras.Variable)
        state = generator if is_variable else generator.state
        return np.asarray(state).tolist()
    except (AttributeError, NotImplementedError, TypeError):
        # `random.SystemRandom`, a class of one's own, or one of a graph.
        return None


def _listed(state: Any) -> Any:
    """Returns a state of lists in place of tuples and arrays."""
    return json.loads(json.dumps(state, default=lambda x: x.tolist()))


def _digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
