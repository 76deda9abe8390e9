"""The model's outputs for a mini-batch, merged from its micro-batches."""

import functools
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.stage import Activations
from tf_gpipe.step.exchange import Exchange
from tf_gpipe.step.micro_batch import ROWS
from tf_gpipe.step.micro_batch import Split
from tf_gpipe.step.returned import kinds_of_outputs
from tf_gpipe.step.row_dependence import RowDependence


class Outputs:
    """The last stage's outputs of all micro-batches, and how they are merged.

    Args:
        pipeline: The `Pipeline`.
        split: `Split` of the mini-batch.
        exchange: `Exchange`, which has the outputs of the last stage.
        dependence: `RowDependence` of the pipeline's graph.
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
        """How each flat tensor that the model returns is merged."""
        m = self._exchange.first_finished()
        outputs = self._exchange.outputs(m).tensors
        if self._split.num_micro_batches == 1:
            return [ROWS] * len(keras.tree.flatten(outputs))
        rows = self._split.size(m)
        return kinds_of_outputs(
            self._pipeline,
            self._dependence,
            outputs,
            rows if isinstance(rows, int) else tf.get_static_value(rows),
        )

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
