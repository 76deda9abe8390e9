"""Made-up numbers: the rows of a batch, labels and weights."""

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gpipe.stage.graph import ROWS

# Kinds of made-up numbers: see `made_up`.
KINDS = 5
# Factors of the kinds of numbers after these.
LARGER = 1e3, 1e5
# The most inputs for which made-up weights are scaled down. With smaller
# weights the results of wide layers would be too small.
_MOST_INPUTS = 256


def row_axes(x: tf.TensorSpec) -> list[int]:
    """Returns the axes of a spec that are proportional to the rows.

    The spec is for a batch of `ROWS` rows.
    """
    return [
        i
        for i, size in enumerate(x.shape)
        # A size is unknown if it depends on values, as in a selection of rows.
        if (i == 0 if size is None else size and size % ROWS == 0)
    ]


def made_up(
    x: tf.TensorSpec,
    rows: int,
    kind: int,
    draw: np.random.Generator,
    sign: int,
    largest: int,
) -> np.ndarray:
    """Returns made-up values for a tensor, of one of several kinds.

    In the order of `kind`: normally distributed; between 0 and 1, as
    probabilities are; with zeros, as for padding; large, to be past any
    margin; or all of one sign, and all integers equal; or larger by far.
    Integers go from 0 to `largest`.
    """
    shape = sized(x.shape, rows)
    if x.dtype == tf.bool or x.dtype.is_integer:
        if x.dtype == tf.bool:
            largest = 1
        if kind == 4:
            found = np.full(shape, largest * (sign > 0))
        else:
            found = draw.integers(0, largest + 1, shape)
        return found.astype(x.dtype.as_numpy_dtype)
    if not x.dtype.is_floating:
        return np.full(shape, "a" if sign > 0 else "b")
    if kind in (1, 4):
        return draw.uniform(0.1, 0.9, shape) * (sign if kind == 4 else 1)
    values = draw.normal(size=shape)
    if kind == 2 and shape:
        values *= draw.integers(0, 2, (*shape[:-1], 1))
    if kind >= KINDS:
        return values * LARGER[kind - KINDS]
    return values * 30.0 if kind == 3 else values


def labels(like: np.ndarray, numbers: tuple[float, ...]) -> np.ndarray:
    """Returns an array of numbers, over and over, unless it is of strings."""
    if like.dtype == object or like.dtype.kind in "SU":
        return like
    # No integer is NaN.
    with np.errstate(invalid="ignore"):
        return np.resize(numbers, like.shape).astype(like.dtype)


def sized(shape: tf.TensorShape, rows: int | None) -> list:
    """Returns the shape for so many rows, where it is for a batch of `ROWS`."""
    return [
        size
        if not size or size % ROWS
        else None
        if rows is None
        else size // ROWS * rows
        for size in shape
    ]


def weight(shape: Any, dtype: Any, seed: int) -> tf.Tensor:
    """Returns made-up values for a weight, random numbers from `seed`."""
    dtype = tf.as_dtype(dtype)
    if not dtype.is_floating:
        return tf.ones(shape, dtype)
    if len(shape) < 2:
        # Positive, since it may be a variance.
        values = tf.random.stateless_uniform(shape, [seed, 0], 0.5, 1.5)
    else:
        size = min(math.prod(shape[:-1]), _MOST_INPUTS)
        values = tf.random.stateless_normal(
            shape, [seed, 0], stddev=max(size, 1) ** -0.5
        )
    return tf.cast(values, dtype)
