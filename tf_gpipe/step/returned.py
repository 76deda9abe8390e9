"""How each output of a model is merged from its micro-batches."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.step.micro_batch import FIRST
from tf_gpipe.step.micro_batch import MEAN
from tf_gpipe.step.micro_batch import ROWS
from tf_gpipe.step.micro_batch import SUM
from tf_gpipe.step.row_dependence import RowDependence

_WAYS_OUT = (
    "Use num_micro_batches=1; or let the model return what it is made of, and "
    "compute it in the loss, with schedule='gpipe'."
)


def kinds_of_outputs(
    pipeline: Pipeline,
    dependence: RowDependence,
    outputs: Sequence[Any],
    rows: int | None,
) -> list[str]:
    """Returns how each flat tensor that the model returns is merged.

    Mostly by `ROWS`, as the specs show. If a spec leaves it open, the model is
    traced for batches of two sizes.

    Args:
        pipeline: The `Pipeline` with the outputs.
        dependence: `RowDependence` of the pipeline's graph.
        outputs: The last stage's outputs for a micro-batch: for each value a
            nested structure of tensors.
        rows: Rows of that micro-batch, `None` if not known.

    Returns:
        List of `ROWS`, `MEAN`, `SUM` and `FIRST`.

    Raises:
        ValueError: If an output cannot be merged from micro-batches.
    """
    kinds = []
    values = pipeline.graph.returned
    for value, content in zip(values, outputs, strict=True):
        tensors = keras.tree.flatten(content)
        specs = keras.tree.flatten(value.spec)
        if len(specs) != len(tensors):
            specs = [None] * len(tensors)
        for i, (x, spec) in enumerate(zip(tensors, specs, strict=True)):
            clear = value in pipeline.graph.inputs or _has_rows(x, spec, rows)
            kinds.append(
                ROWS if clear else _kind(pipeline, dependence, value, i, x)
            )
    return kinds


def _has_rows(x: tf.Tensor, spec: Any, rows: int | None) -> bool:
    """Returns whether axis 0 has the rows, and no other axis can have them."""
    if spec is None or x.shape.rank in (None, 0):
        return False
    first, *others = spec.shape or (0,)
    if first is not None or None in others or x.shape[1:] != others:
        return False
    size = x.shape[0]
    return size is None if rows is None else size is None or size % rows == 0


def _kind(
    pipeline: Pipeline,
    dependence: RowDependence,
    value: Value,
    i: int,
    x: tf.Tensor,
) -> str:
    """Returns how `x`, the i-th flat tensor of a value, is merged."""
    found = dependence.axes(value)
    if found is None:
        # Unknown: axis 0 is taken for the batch axis, as it nearly always is.
        axes = [0] if x.shape.rank != 0 else []
    else:
        axes = found[i]
    if axes == [0]:
        return ROWS
    layer = dependence.maker(value).layer
    name = (
        f"The output of layer '{layer.name}' (of type {type(layer).__name__})"
    )
    if axes or dependence.grows_otherwise(value, i):
        first = dependence.first_across()
        where = "" if first in (None, layer) else f", as '{first.name}' does"
        raise ValueError(
            f"{name}, which the model returns, grows with the rows of a batch "
            "in another place than axis 0, where each row must have its own: "
            f"the layer compares rows with one another{where}. A micro-batch "
            f"has some rows only. Received: shape {x.shape}. {_WAYS_OUT}"
        )
    known = dependence.of_output(value, i)
    if known is not None and known.constant:
        return FIRST
    if known is not None and known.exact and known.kind == SUM:
        return SUM
    if not x.dtype.is_floating:
        raise ValueError(
            f"{name}, which the model returns, has no batch axis, and what "
            "micro-batches give cannot be put together: it is no sum over "
            f"rows. Received: shape {x.shape}, dtype {x.dtype.name}. "
            f"{_WAYS_OUT}"
        )
    if known is None or not known.exact:
        problem = "may be" if known is None else "is"
        warnings.warn(
            f"{name}, which the model returns, has no batch axis, and "
            f"{problem} neither a mean nor a sum over the rows of a batch. "
            "The model returns the mean of what the micro-batches give, not "
            f"what the whole mini-batch gives. {_WAYS_OUT}",
            stacklevel=2,
        )
    return MEAN
