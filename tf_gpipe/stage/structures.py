"""Tensors in nested structures, such as the arguments of a function."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def flatten(structure: Any) -> list:
    """Returns the leaves of a nested structure, `IndexedSlices` taken apart."""
    return tf.nest.flatten(structure, expand_composites=True)


def tensors(structure: Any) -> list[tf.Tensor]:
    """Returns the tensors among the leaves of a nested structure."""
    return [x for x in flatten(structure) if isinstance(x, tf.Tensor)]


def filled(structure: Any, values: Iterable[tf.Tensor]) -> Any:
    """Returns a nested structure with new tensors; `None`s stay `None`."""
    leaves = flatten(structure)
    places = [i for i, x in enumerate(leaves) if x is not None]
    for i, x in zip(places, values, strict=True):
        leaves[i] = x
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)
