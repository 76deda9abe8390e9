"""Gradients of a stage's variables, summed over micro-batches."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe.pack import pack
from tf_gpipe.pack import unpack
from tf_gpipe.pipeline import Pipeline


class Gradients(NamedTuple):
    """Gradients of one micro-batch, a structure that functions can return."""

    dense: list[tf.Tensor]  # one a variable, or a single one that packs all
    sparse: list[tf.IndexedSlices]  # one a variable, of embeddings

    def packed(self) -> "Gradients":
        """Returns the dense ones as a pack, which is summed as a whole."""
        return Gradients(pack(self.dense), self.sparse)


class GradientSum:
    """The sum of the gradients of a stage's variables over micro-batches."""

    def __init__(self) -> None:
        # By the variables with dense gradients: whether those of an embedding
        # are sparse depends on rematerialisation.
        self._dense: dict[tuple, tuple[Sequence, list[tf.Tensor]]] = {}
        self._sparse: list[tuple[keras.Variable, tf.IndexedSlices]] = []

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The sums so far."""
        return [x for _, totals in self._dense.values() for x in totals]

    def add(
        self,
        gradients: Gradients,
        dense: Sequence[keras.Variable],
        sparse: Sequence[keras.Variable],
    ) -> None:
        """Adds the gradients of one micro-batch.

        Args:
            gradients: `Gradients`.
            dense: List of the variables of `gradients.dense`.
            sparse: List of the variables of `gradients.sparse`.
        """
        self._sparse += zip(sparse, gradients.sparse, strict=True)
        key = tuple(map(id, dense))
        totals = gradients.dense
        if key in self._dense:
            _, previous = self._dense[key]
            totals = [
                tf.add_n([a, b]) for a, b in zip(previous, totals, strict=True)
            ]
        self._dense[key] = dense, totals

    def by_variable(self) -> dict[int, Any]:
        """Returns the sums by the ids of their variables."""
        slices: dict[int, list[tf.IndexedSlices]] = {}
        for variable, x in self._sparse:
            slices.setdefault(id(variable), []).append(x)
        sums: dict[int, Any] = {key: _concat(xs) for key, xs in slices.items()}
        for variables, totals in self._dense.values():
            if totals and totals[0].dtype == tf.variant:
                totals = unpack(totals, [v.value for v in variables])
            for variable, total in zip(variables, totals, strict=True):
                sums[id(variable)] = add(sums.get(id(variable)), total)
        return sums


def of_stages(
    pipeline: Pipeline, sums: Sequence[GradientSum]
) -> dict[int, Any]:
    """Returns the sums of all stages by the ids of their variables."""
    totals: dict[int, Any] = {}
    for stage, gradient_sum in zip(pipeline.stages, sums, strict=True):
        with tf.device(stage.device):
            found = gradient_sum.by_variable()
        for variable in stage.variables:
            gradient = found.get(id(variable))
            # Layers of several stages may share the variable.
            with tf.device(pipeline.device_of(variable)):
                total = add(totals.get(id(variable)), gradient)
            if total is not None:
                totals[id(variable)] = total
    return totals


def add(a: Any, b: Any) -> Any:
    """Adds two gradients, of which either may be `None` or sparse."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        return _concat([a, b])
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


def _concat(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    return tf.IndexedSlices(
        tf.concat([x.values for x in slices], axis=0),
        tf.concat([x.indices for x in slices], axis=0),
        slices[0].dense_shape,
    )
