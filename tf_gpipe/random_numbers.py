"""Generators of random numbers that the data of `fit` may draw from."""

import hashlib
import os
import pickle
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Where numbers are drawn from: the functions of `random` and `np.random`, or
# generators that are attributes of the data.
SHARED, OWN = "shared", "own"
_OF_PYTHON = (np.random.Generator, np.random.RandomState, random.Random)
_OF_TENSORFLOW = (keras.random.SeedGenerator, tf.random.Generator)
# Keras's name of the variable of a `SeedGenerator`.
_SEED = "seed_generator_state"


def held_by(dataset: Any) -> list[Any]:
    """Returns the generators that a `PyDataset` has, and the seeds of layers.

    As attributes, or as those of objects that are attributes.
    """
    if not isinstance(dataset, keras.utils.PyDataset):
        return []
    objects = [*vars(dataset).values()]
    objects += [
        y
        for x in objects
        if not isinstance(x, (*_OF_PYTHON, *_OF_TENSORFLOW))
        for y in getattr(x, "__dict__", {}).values()
    ]
    found: dict[int, Any] = {}
    for x in objects:
        if isinstance(x, (*_OF_PYTHON, *_OF_TENSORFLOW)):
            found[id(x)] = x
        elif isinstance(x, keras.Layer):
            variables = x.non_trainable_variables
            found.update({id(v): v for v in variables if v.name == _SEED})
    return [*found.values()]


def watched(dataset: Any) -> Callable[[], dict[str, str]]:
    """Returns a function that tells where numbers have been drawn from since.

    It returns a dictionary with `SHARED`, `OWN`, both or neither, and for each
    a digest of the states before, of the generators whose states have changed.

    Args:
        dataset: The data, of any kind.
    """

    def states() -> list[tuple[str, bytes]]:
        shared = random.getstate(), np.random.get_state(legacy=False)
        return [
            (SHARED, pickle.dumps(shared)),
            *((OWN, pickle.dumps(_state(x))) for x in held_by(dataset)),
        ]

    before = states()

    def drawn() -> dict[str, str]:
        found: dict[str, Any] = {}
        for (kind, old), (_, new) in zip(before, states(), strict=False):
            if old != new:
                found.setdefault(kind, hashlib.sha256()).update(old)
        return {kind: digest.hexdigest() for kind, digest in found.items()}

    return drawn


def _state(generator: Any) -> Any:
    if isinstance(generator, random.SystemRandom):
        # It has none, and draws other numbers each time.
        return os.urandom(8)
    if isinstance(generator, _OF_PYTHON):
        return generator
    if isinstance(generator, _OF_TENSORFLOW):
        generator = generator.state
    return np.asarray(generator)
