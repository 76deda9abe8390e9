"""The model's outputs for a mini-batch, merged from its micro-batches."""

import functools
import warnings
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.stage import FIXED_ROWS
from tf_gpipe.step.exchange import Exchange
from tf_gpipe.step.micro_batch import FIRST
from tf_gpipe.step.micro_batch import MEAN
from tf_gpipe.step.micro_batch import ROWS
from tf_gpipe.step.micro_batch import SUM
from tf_gpipe.step.micro_batch import Split
from tf_gpipe.step.row_dependence import RowDependence

_WAYS_OUT = (
    "Use num_micro_batches=1; or let the model return what it is made of, and "
    "compute it in the loss, with schedule='gpipe'."
)


class Outputs:
    """The last stage's outputs of all micro-batches, and how they are merged.

    They are those that the `Exchange` has.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        split: Split,
        exchange: Exchange,
        dependence: RowDependence,
    ):
        self._pipeline = pipeline
        self._split = split
        self._exchange = exchange
        self._dependence = dependence

    def whole(self) -> Activations:
        """Returns the outputs of the mini-batch."""
        parts = [
            self._pipeline.packed(self._exchange.outputs(m))
            for m in range(self._split.num_micro_batches)
        ]
        with tf.device(self._pipeline.stages[-1].device):
            return Activations(
                *(self.merged(list(x)) for x in zip(*parts, strict=True))
            )

    def merged(self, parts: list) -> Any:
        """Merges nested structures of all micro-batches like the outputs."""
        kinds = keras.tree.pack_sequence_as(parts[0], self._kinds)
        return self._split.merge(parts, kinds)

    def like_whole(self, outputs: Any, m: int) -> Any:
        """Returns stand-ins for the outputs of the mini-batch.

        Args:
            outputs: The model's outputs for micro-batch `m`.
            m: Index of the micro-batch.
        """
        kinds = keras.tree.pack_sequence_as(outputs, self._kinds)
        return keras.tree.map_structure(
            lambda x, kind: self._split.like_whole(x, m, kind), outputs, kinds
        )

    def split_gradients(self, gradients: list) -> dict[int, list]:
        """Returns the gradients of each micro-batch's outputs.

        Args:
            gradients: A gradient or `None` for each part of `whole()`.

        Returns:
            Dict from the index of a micro-batch to the list of its gradients.
        """
        numbers = range(self._split.num_micro_batches)
        outputs = [self._exchange.outputs(m).parts() for m in numbers]
        # By part of the outputs, then by micro-batch.
        pieces = [
            [None] * self._split.num_micro_batches
            if gradient is None
            else self._split.unmerge(gradient, parts, kind)
            for kind, gradient, *parts in zip(
                self._kinds_of_parts, gradients, *outputs, strict=True
            )
        ]
        return {m: [x[m] for x in pieces] for m in numbers}

    @functools.cached_property
    def _kinds(self) -> list[str]:
        """How each flat tensor that the model returns is merged.

        Mostly by `ROWS`, as the specs show. If a spec leaves it open, the model
        is traced for batches of two sizes.
        """
        m = self._exchange.first_finished()
        outputs = self._exchange.outputs(m).tensors
        if self._split.num_micro_batches == 1:
            return [ROWS] * len(keras.tree.flatten(outputs))
        rows = self._split.size(m)
        if not isinstance(rows, int):
            rows = tf.get_static_value(rows)
        graph = self._pipeline.graph
        kinds = []
        for value, content in zip(graph.returned, outputs, strict=True):
            tensors = keras.tree.flatten(content)
            specs = keras.tree.flatten(value.spec)
            if len(specs) != len(tensors):
                specs = [None] * len(tensors)
            for i, (x, spec) in enumerate(zip(tensors, specs, strict=True)):
                clear = value in graph.inputs or _has_rows(x, spec, rows)
                if rows is None and value in graph.multiplied:
                    clear = False
                kinds.append(
                    ROWS if clear else self._kind(value, i, x, spec, rows)
                )
        return kinds

    def _kind(
        self, value: Value, i: int, x: tf.Tensor, spec: Any, rows: int | None
    ) -> str:
        """Returns how `x`, the i-th flat tensor of a value, is merged.

        Its spec, and the rows of the micro-batch, may be unknown.

        Raises:
            ValueError: If it cannot be merged from micro-batches.
        """
        found = self._dependence.axes(value)
        if found is None:
            # Unknown: axis 0 is taken for the batch axis, as it nearly always
            # is.
            axes = [0] if x.shape.rank != 0 else []
        else:
            axes = found[i]
        layer = self._dependence.maker[value].layer
        name = (
            f"The output of layer '{layer.name}' (of type "
            f"{type(layer).__name__}), which the model returns,"
        )
        if found is None and _rows_are_fixed(
            x, spec, rows, self._pipeline.graph.declared_rows
        ):
            raise ValueError(
                f"{name} has {x.shape[0]} rows for the {rows or 'rows'} of a "
                f"micro-batch. Received: shape {x.shape}, where the model "
                f"declares {spec.shape}. {FIXED_ROWS}"
            )
        if axes == [0] and not self._dependence.reorders(value, i):
            return ROWS
        if axes == [0]:
            raise ValueError(
                f"{name} has several rows for each row of a batch, and they "
                "are not next to each other: two tensors one after the other "
                "along axis 0, for example. What micro-batches give would be "
                f"in another order. Received: shape {x.shape}. Let the model "
                "return several outputs, and put them together in the loss, "
                "with schedule='gpipe'; or repeat each row "
                "(`keras.ops.repeat`); or use num_micro_batches=1."
            )
        if axes or self._dependence.grows_otherwise(value, i):
            first = self._dependence.first_across()
            where = (
                "" if first in (None, layer) else f", as '{first.name}' does"
            )
            raise ValueError(
                f"{name} does not have the rows of a batch in axis 0 alone: "
                "the layer moves them to another axis, or compares them with "
                f"one another{where}. A micro-batch has some rows only. "
                f"Received: shape {x.shape}. Rows that were moved must be "
                f"moved back (`keras.ops.moveaxis`). Otherwise: {_WAYS_OUT}"
            )
        return self._kind_without_rows(value, i, x, name)

    def _kind_without_rows(
        self, value: Value, i: int, x: tf.Tensor, name: str
    ) -> str:
        """As `_kind`, if `x`, called `name` in errors, has no batch axis."""
        known = self._dependence.of_output(value, i)
        if known is not None and known.constant:
            return FIRST
        if known is not None and known.exact and known.kind == SUM:
            return SUM
        if not x.dtype.is_floating:
            raise ValueError(
                f"{name} has no batch axis, and what micro-batches give cannot "
                "be put together: it is no sum over rows. Received: shape "
                f"{x.shape}, dtype {x.dtype.name}. {_WAYS_OUT}"
            )
        if known is None or not known.exact:
            problem = "may be" if known is None else "is"
            warnings.warn(
                f"{name} has no batch axis, and {problem} neither a mean nor a "
                "sum over the rows of a batch. The model returns the mean of "
                "what the micro-batches give, not what the whole mini-batch "
                f"gives. {_WAYS_OUT}",
                stacklevel=2,
            )
        return MEAN

    @property
    def _kinds_of_parts(self) -> list[str]:
        """`_kinds` for each part of the outputs."""
        tensors = self._exchange.outputs(
            self._exchange.first_finished()
        ).by_tensor()
        return [
            kind
            for kind, parts in zip(self._kinds, tensors, strict=True)
            for _ in parts
        ]

    def check_loss(self, outputs: Activations, gradients: list) -> None:
        """Raises an error if the loss uses an output without a batch axis."""
        parts = outputs.parts()
        kinds = self._kinds_of_parts
        for x, kind, gradient in zip(parts, kinds, gradients, strict=True):
            if kind != ROWS and gradient is not None:
                raise ValueError(
                    "The model returns a tensor without a batch axis, of shape "
                    f"{x.shape}. Its loss cannot be put together from micro-"
                    "batches, as a schedule that starts backward passes before "
                    "all forward passes are done needs. Use schedule='gpipe', "
                    "which computes the loss on the whole mini-batch, or "
                    "num_micro_batches=1."
                )


def _rows_are_fixed(
    x: tf.Tensor, spec: Any, rows: int | None, declared: int | None
) -> bool:
    """Returns whether a tensor has rows that a micro-batch's do not explain.

    Args:
        x: The tensor.
        spec: Its spec, or `None`.
        rows: The number of rows of the micro-batch, or `None`.
        declared: The number of rows of the model's inputs in specs, or `None`.
    """
    size = x.shape[0] if x.shape.rank else None
    promised = spec.shape[0] if spec is not None and spec.shape else None
    if size is None or promised is None or size == rows:
        return False
    if rows is None or declared is None:
        return True
    return size * declared != promised * max(rows, 1)


def _has_rows(x: tf.Tensor, spec: Any, rows: int | None) -> bool:
    """Returns whether axis 0 has the rows, and no other axis can have them."""
    if spec is None or x.shape.rank in (None, 0):
        return False
    first, *others = spec.shape or (0,)
    if first is not None or None in others or x.shape[1:] != others:
        return False
    size = x.shape[0]
    return size is None or size == rows
