"""Losses that layers add while a mini-batch goes through the stages."""

from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.micro_batch import Split
from tf_gpipe.stage import Stage


class AddedLosses:
    """What `add_loss` and activity regularisers add, by stage.

    A scalar that a layer adds is taken for a mean over rows, as Keras's
    activity regularisers are, so micro-batches count by their rows. Other
    losses have one value a row, of which Keras takes the sum.
    """

    def __init__(self, stages: Sequence[Stage], split: Split):
        self._stages = stages
        self._split = split
        self._losses: dict[tuple[int, int], list[tf.Tensor]] = {}

    def put(self, k: int, m: int, losses: list[tf.Tensor]) -> None:
        """Takes those that stage `k` has added for micro-batch `m`."""
        self._losses[k, m] = losses

    def count(self, m: int) -> int:
        """Returns how many there are, once micro-batch `m` has them all."""
        return sum(len(self._losses[x.index, m]) for x in self._stages)

    def totals(self) -> list[tf.Tensor]:
        """Returns them for the mini-batch, scalars."""
        totals = []
        for stage in self._stages:
            parts = [
                self._losses[stage.index, m]
                for m in range(self._split.num_micro_batches)
            ]
            with tf.device(stage.device):
                totals += [
                    tf.add_n(
                        [
                            tf.reduce_sum(x) * self._share(x, m)
                            for m, x in enumerate(losses)
                        ]
                    )
                    for losses in zip(*parts, strict=True)
                ]
        return totals

    def gradients(
        self, k: int, m: int, upstream: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients by those of a stage and a micro-batch.

        `upstream` has the gradient by each of `totals()`.
        """
        first = sum(len(self._losses[i, m]) for i in range(k))
        return [
            tf.ones_like(x) * self._share(x, m) * tf.cast(gradient, x.dtype)
            for x, gradient in zip(
                self._losses[k, m], upstream[first:], strict=False
            )
        ]

    def _share(self, loss: tf.Tensor, m: int) -> tf.Tensor:
        """Returns what a micro-batch counts: its weight, or if it is valid."""
        share = (
            self._split.weight if loss.shape.rank == 0 else self._split.valid
        )
        return tf.cast(share(m), loss.dtype)
