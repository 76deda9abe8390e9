"""Gradients of a stage's variables, summed over micro-batches."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe import accumulator
from tf_gpipe.pack import unpack
from tf_gpipe.pipeline import Pipeline


class Gradients(NamedTuple):
    """Gradients of one micro-batch, a structure that functions can return."""

    # One a variable; or a pack; or what is there once they have been added.
    dense: list[tf.Tensor]
    sparse: list[tf.IndexedSlices]  # one a variable, of embeddings


class GradientSum:
    """The sum of the gradients of a stage's variables over micro-batches.

    Args:
        several: Boolean, whether there are several micro-batches.
    """

    def __init__(self, several: bool):
        self._several = several
        # By the variables with dense gradients: whether those of an embedding
        # are sparse depends on rematerialisation.
        self._dense: dict[tuple, tuple[Sequence, list[tf.Tensor]]] = {}
        # Of those of them that are added in place.
        self._handles: dict[tuple, tf.Tensor] = {}
        self._sparse: list[tuple[keras.Variable, tf.IndexedSlices]] = []

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The sums so far."""
        return [x for _, totals in self._dense.values() for x in totals]

    def place(self, dense: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Returns where functions may add dense gradients themselves.

        Args:
            dense: List of the variables of all of them.

        Returns:
            List of the handle of an accumulator; or an empty one, if there is
            nothing to add.
        """
        if not self._several or not dense:
            return []
        key = tuple(map(id, dense))
        if key not in self._handles:
            values = [v.value for v in dense]
            self._handles[key] = accumulator.create(values)
        return [self._handles[key]]

    def add(
        self,
        gradients: Gradients,
        dense: Sequence[keras.Variable],
        sparse: Sequence[keras.Variable],
    ) -> None:
        """Adds the gradients of one micro-batch.

        Args:
            gradients: `Gradients`; the dense ones have been added already, if
                there is a place for them.
            dense: List of the variables of `gradients.dense`.
            sparse: List of the variables of `gradients.sparse`.
        """
        self._sparse += zip(sparse, gradients.sparse, strict=True)
        key = tuple(map(id, dense))
        totals = gradients.dense
        if key in self._dense and key not in self._handles:
            _, previous = self._dense[key]
            totals = [a + b for a, b in zip(previous, totals, strict=True)]
        self._dense[key] = dense, totals

    def by_variable(self) -> dict[int, Any]:
        """Returns the sums by the ids of their variables."""
        slices: dict[int, list[tf.IndexedSlices]] = {}
        for variable, x in self._sparse:
            slices.setdefault(id(variable), []).append(x)
        sums: dict[int, Any] = {key: _concat(xs) for key, xs in slices.items()}
        for key, (variables, totals) in self._dense.items():
            values = [v.value for v in variables]
            if key in self._handles:
                with tf.control_dependencies(totals):
                    totals = accumulator.take(self._handles[key], values)
            elif totals and totals[0].dtype == tf.variant:
                totals = unpack(totals, values)
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
