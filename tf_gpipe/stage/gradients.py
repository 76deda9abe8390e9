"""Gradients of a stage's variables, summed over micro-batches."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.stage import accumulator
from tf_gpipe.stage.lookups import Lookup
from tf_gpipe.stage.pipeline import Pipeline


class GradientSum:
    """The sum of the gradients of a stage's variables over micro-batches.

    Args:
        several: Whether there are several micro-batches.
    """

    def __init__(self, several: bool):
        self._several = several
        # Keys are ids of variables. A variable may be in several of these: an
        # embedding may have sparse and dense gradients.
        self._dense: dict[int, tf.Tensor] = {}
        self._sparse: dict[int, list[tf.IndexedSlices]] = {}
        # Keys are the id of a variable and the index of one of its lookups.
        self._repeated: dict[tuple[int, int], tf.IndexedSlices] = {}
        # Keys are the ids of the variables of an accumulator: its handle; the
        # variables, and tensors that are ready once all has been added.
        self._handles: dict[tuple, tf.Tensor] = {}
        self._added: dict[tuple, tuple[Sequence[keras.Variable], list]] = {}

    def place(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Returns the accumulator to which functions add dense gradients.

        A list of its handle; an empty list if there is nothing to add, because
        there is one micro-batch or no variable.
        """
        if not self._several or not variables:
            return []
        key = tuple(map(id, variables))
        if key not in self._handles:
            like = [v.value for v in variables]
            self._handles[key] = accumulator.create(like)
        return [self._handles[key]]

    def added(self, variables: Sequence[keras.Variable], done: list) -> None:
        """Notes that a function has added gradients to the accumulator.

        Args:
            variables: As in `place`.
            done: List of tensors that are ready once they have been added.
        """
        self._added[tuple(map(id, variables))] = variables, done

    def add(self, gradients: Iterable[tuple[keras.Variable, Any]]) -> None:
        """Adds gradients of one micro-batch, dense or sparse.

        Args:
            gradients: Pairs of a variable and its gradient, or `None`.
        """
        for variable, x in gradients:
            key = id(variable)
            if isinstance(x, tf.IndexedSlices):
                self._sparse.setdefault(key, []).append(x)
            else:
                self._dense[key] = add(self._dense.get(key), x)

    def add_lookups(
        self,
        lookups: Sequence[Lookup],
        gradients: Sequence[tf.IndexedSlices],
    ) -> None:
        """Adds the gradients of the lookups of one micro-batch."""
        for i, (lookup, x) in enumerate(zip(lookups, gradients, strict=True)):
            key = id(lookup.variable)
            if not lookup.repeated:
                self._sparse.setdefault(key, []).append(x)
                continue
            before = self._repeated.get((key, i))
            if before is not None:
                values = before.values + x.values
                x = tf.IndexedSlices(values, x.indices, x.dense_shape)
            self._repeated[key, i] = x

    def by_variable(self) -> dict[int, Any]:
        """Returns the sums by the ids of their variables."""
        sums: dict[int, Any] = {k: _concat(x) for k, x in self._sparse.items()}
        for (key, _), slices in self._repeated.items():
            sums[key] = add(sums.get(key), slices)
        for key, total in self._dense.items():
            sums[key] = add(sums.get(key), total)
        for placed, handle in self._handles.items():
            variables, done = self._added[placed]
            with tf.control_dependencies(done):
                totals = accumulator.take(handle, [v.value for v in variables])
            for variable, total in zip(variables, totals, strict=True):
                sums[id(variable)] = add(sums.get(id(variable)), total)
        return sums


def of_devices(
    pipeline: Pipeline,
    sums: Iterable[tuple[str, Iterable[keras.Variable], GradientSum]],
) -> dict[int, Any]:
    """Adds up the sums of several devices, each on its variable's device.

    Args:
        pipeline: The `Pipeline`, which knows the device of each variable.
        sums: Triples of a device, the variables that may have a gradient
            there, and the `GradientSum` of that device.

    Returns:
        Dict from the ids of variables to their gradients.
    """
    totals: dict[int, Any] = {}
    for device, variables, gradient_sum in sums:
        with tf.device(device):
            found = gradient_sum.by_variable()
        for variable in variables:
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
