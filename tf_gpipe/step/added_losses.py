"""Losses that layers add (`add_loss`), merged over micro-batches."""

import functools
import warnings
from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_gpipe.stage.stage import AddedLoss
from tf_gpipe.stage.stage import Stage
from tf_gpipe.step.micro_batch import Split
from tf_gpipe.step.row_dependence import RowDependence

# Attribute by which a layer may say how all losses that it adds are merged.
_ATTRIBUTE = "add_loss_reduction"


class AddedLosses:
    """Losses from `add_loss` and activity regularisers, by stage.

    Keras takes the sum of all numbers in a loss. The loss of the mini-batch is
    the mean of the micro-batches' losses, weighted by rows, or their sum: as
    the layer's attribute `add_loss_reduction` says ("mean" or "sum"), or as
    `RowDependence` finds. A warning is given if neither equals the loss of the
    plain model.
    """

    def __init__(
        self, stages: Sequence[Stage], split: Split, dependence: RowDependence
    ):
        self._stages = stages
        self._split = split
        self._dependence = dependence
        self._losses: dict[tuple[int, int], list[tf.Tensor]] = {}
        # By stage: the layer that adds each of its losses.
        self._layers: dict[int, list[keras.Layer]] = {}
        # By stage: for each of its losses "mean" or "sum".
        self._kinds: dict[int, list[str]] = {}

    def put(
        self,
        k: int,
        m: int,
        losses: list[tf.Tensor],
        added: Sequence[AddedLoss],
    ) -> None:
        """Records the losses of stage `k` for micro-batch `m`, with origins."""
        self._losses[k, m] = losses
        self._layers[k] = [x.layer for x in added]
        if self._split.num_micro_batches > 1 and k not in self._kinds:
            self._kinds[k] = self._found_kinds(k, losses, added)

    def count(self, m: int) -> int:
        """Returns the number of losses, once micro-batch `m` has them all."""
        return sum(len(self._losses[x.index, m]) for x in self._stages)

    def layers(self) -> list[keras.Layer]:
        """Returns the layer that adds each of `totals()`."""
        return [x for stage in self._stages for x in self._layers[stage.index]]

    def totals(self) -> list[tf.Tensor]:
        """Returns the losses of the mini-batch, a list of scalars."""
        totals = []
        for stage in self._stages:
            k = stage.index
            parts = [
                self._losses[k, m] for m in range(self._split.num_micro_batches)
            ]
            with tf.device(stage.device):
                totals += [
                    tf.add_n(
                        [
                            tf.reduce_sum(x) * self._share(k, i, x, m)
                            for m, x in enumerate(losses)
                        ]
                    )
                    for i, losses in enumerate(zip(*parts, strict=True))
                ]
        return totals

    def gradients(
        self, k: int, m: int, loss_gradients: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients of the losses of one stage and micro-batch.

        `loss_gradients` has the gradient of each of `totals()`.
        """
        first = sum(len(self._losses[i, m]) for i in range(k))
        return [
            tf.ones_like(x)
            * self._share(k, i, x, m)
            * tf.cast(gradient, x.dtype)
            for i, (x, gradient) in enumerate(
                zip(self._losses[k, m], loss_gradients[first:], strict=False)
            )
        ]

    def _share(self, k: int, i: int, loss: tf.Tensor, m: int) -> tf.Tensor:
        """Returns the factor of micro-batch `m` in a stage's i-th loss."""
        if self._split.num_micro_batches == 1:
            return tf.ones((), loss.dtype)
        return self._split.share(self._kinds[k][i], m, loss)

    def _found_kinds(
        self, k: int, losses: list[tf.Tensor], added: Sequence[AddedLoss]
    ) -> list[str]:
        of_losses = functools.cache(self._dependence.of_losses)
        warned: set[int] = set()
        kinds = []
        for loss, x in zip(losses, added, strict=True):
            said = _said(x)
            if said is not None:
                kinds.append(said)
                continue
            found = of_losses(x.node)
            count = sum(y.node is x.node for y in added)
            known = found[x.place] if len(found) == count else None
            kind = "mean" if loss.shape.rank == 0 else "sum"
            if known is not None:
                kind = known.kind
            kinds.append(kind)
            exact = known is not None and known.exact
            if not exact and id(x.layer) not in warned:
                warned.add(id(x.layer))
                warnings.warn(
                    _warning(x, self._stages[k], kind, known is not None),
                    stacklevel=2,
                )
        return kinds


def _said(x: AddedLoss) -> str | None:
    """Returns `add_loss_reduction` of the layer, or of the one around it."""
    for layer in (x.layer, x.node.layer):
        said = getattr(layer, _ATTRIBUTE, None)
        if said is None:
            continue
        if said not in ("mean", "sum"):
            raise ValueError(
                f"`{_ATTRIBUTE}` of a layer must be 'mean' or 'sum', or None. "
                f"Received: {said!r}, of layer '{layer.name}'"
            )
        return said
    return None


def _warning(x: AddedLoss, stage: Stage, kind: str, known: bool) -> str:
    name = f"'{x.layer.name}' (of type {type(x.layer).__name__})"
    problem = (
        "is neither a mean nor a sum over the rows of a batch"
        if known
        else "may be a mean or a sum over the rows of a batch, or neither"
    )
    return (
        f"Layer {name} in stage {stage.index} adds a loss that {problem}. It "
        f"counts as the {kind} of what the micro-batches give, which "
        f"{'is not' if known else 'need not be'} what the whole mini-batch "
        "gives. For the plain model's loss use num_micro_batches=1; or let "
        "the layer return what the loss is made of, and compute it in the "
        "loss of the model, with schedule='gpipe'. If all losses of the layer "
        f"are means over rows, or sums, say so: layer.{_ATTRIBUTE} = 'mean', "
        "or 'sum'."
    )
