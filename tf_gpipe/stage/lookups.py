"""Sparse gradients of embedding lookups, with the slices of the plain model.

The gradient of a lookup has a slice for each row that was looked up, and some
optimizers square the slices before they add those of one row. So there must
be as many slices as in the plain model. A lookup of tokens has slices of its
own in each micro-batch, which are concatenated:

    micro-batch 0    slices of rows 3 1 4         mini-batch: 3 1 4 1 5 9
    micro-batch 1    slices of rows 1 5 9

A lookup that does not depend on the samples, such as that of positions, is the
same in each micro-batch. The plain model does it once for the whole batch, so
the slices of micro-batches are added:

    micro-batch 0    slices of rows 0 1 2         mini-batch: 0 1 2
    micro-batch 1    slices of rows 0 1 2
"""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe.stage.reached import followed_values
from tf_gpipe.stage.traced_function import TracedFunction


class Lookup(NamedTuple):
    """The gradient of lookups in one variable."""

    variable: keras.Variable
    slices: tf.IndexedSlices
    repeated: bool  # whether it is the same lookup in each micro-batch


def find(
    traced: TracedFunction,
    inputs: Sequence[tf.Tensor],
    carried: Sequence[tf.Tensor],
    gradients: Iterable[tuple[keras.Variable, Any]],
) -> list[Lookup]:
    """Returns the lookups among the gradients of a traced stage.

    Args:
        traced: The trace.
        inputs: Tensors of the trace for the stage's inputs, which have rows.
        carried: The other tensors that the trace is fed.
        gradients: Pairs of a variable and a gradient. A gradient that joins
            several lookups makes several `Lookup`s.
    """
    return [
        Lookup(
            variable,
            each,
            _is_repeated(traced, inputs, carried, each.indices),
        )
        for variable, x in gradients
        if isinstance(x, tf.IndexedSlices)
        for each in _parts(x)
    ]


def divided(
    slices: tf.IndexedSlices, lookups: Sequence[Lookup]
) -> list[tf.IndexedSlices]:
    """Splits a gradient into the slices of each of its lookups."""
    sizes = [x.slices.indices.shape[0] for x in lookups]
    unknown = sizes.count(None)
    if unknown and not tf.executing_eagerly():
        return _parts(slices)
    if unknown > 1:
        if any(x.repeated for x in lookups):
            raise ValueError(
                f"{unknown} lookups in {lookups[0].variable.path} have no "
                "static sizes, and another one is the same in each "
                "micro-batch, so that their gradients cannot be told apart "
                "eagerly. Compile with run_eagerly=False, or call the model "
                "in a `tf.function`."
            )
        # Only the sum of all is needed.
        empty = tf.IndexedSlices(
            slices.values[:0], slices.indices[:0], slices.dense_shape
        )
        return [slices, *[empty] * (len(lookups) - 1)]
    if unknown:
        rest = len(slices.indices) - sum(x for x in sizes if x is not None)
        sizes = [rest if x is None else x for x in sizes]
    return [
        tf.IndexedSlices(*pair, slices.dense_shape)
        for pair in zip(
            tf.split(slices.values, sizes),
            tf.split(slices.indices, sizes),
            strict=True,
        )
    ]


def _parts(slices: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """Splits a gradient in a trace into those that the tape has joined."""
    of_lookups = [x.op for x in (slices.values, slices.indices)]
    if any(op.type != "ConcatV2" for op in of_lookups):
        return [slices]
    # The last input is the axis.
    values, indices = (list(op.inputs)[:-1] for op in of_lookups)
    if len(values) != len(indices):
        return [slices]
    return [
        part
        for pair in zip(values, indices, strict=True)
        for part in _parts(tf.IndexedSlices(*pair, slices.dense_shape))
    ]


def _is_repeated(
    traced: TracedFunction,
    inputs: Sequence[tf.Tensor],
    carried: Sequence[tf.Tensor],
    indices: tf.Tensor,
) -> bool:
    """Returns whether a lookup is the same in each micro-batch.

    That is, its indices depend on no sample and no random number, and are not
    looked up once for each row.
    """
    by_value = followed_values(indices)
    fed = [*inputs, *carried]
    if any(x.op in by_value for x in fed) or traced.unrepeatable(by_value):
        return False
    rows = [x.shape[0] for x in inputs if x.shape.rank]
    if None in rows:
        two, three = (_computed(traced, fed, indices, n) for n in (2, 3))
        return two.size == three.size
    found = _computed(traced, fed, indices, 0)
    return not _has_copies(found, min(rows, default=1), indices)


def _has_copies(found: np.ndarray, rows: int, indices: tf.Tensor) -> bool:
    """Returns whether indices are repeated for each row, for so many rows.

    Args:
        found: The values of the indices.
        rows: Integer.
        indices: The tensor of the trace.
    """
    if rows == 1 or found.size % rows:
        return False
    if (found == found[:1]).all():
        # Their values show nothing. Their shape does, before the tape has made
        # them flat.
        flat = indices.op.type == "Reshape"
        shape = (indices.op.inputs[0] if flat else indices).shape
        return shape[:1].is_compatible_with([rows])
    copies = found.reshape(rows, -1)
    return bool((copies == copies[0]).all())


def _computed(
    traced: TracedFunction,
    inputs: Sequence[tf.Tensor],
    indices: tf.Tensor,
    rows: int,
) -> np.ndarray:
    """Returns the values of indices that depend only on shapes of inputs.

    Dimensions of unknown size are taken as `rows`.
    """
    part = traced.extract(inputs, [indices])

    def compute():
        shapes = [[rows if n is None else n for n in x.shape] for x in inputs]
        return part(
            [
                tf.zeros(shape, x.dtype)
                for shape, x in zip(shapes, inputs, strict=True)
            ]
        )

    with tf.init_scope():
        return tf.function(compute, autograph=False)()[0].numpy()
