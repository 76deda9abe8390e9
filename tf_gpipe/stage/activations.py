"""Tensors sent from stage to stage, with what Keras attaches to them."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.structures import filled


class Activations(NamedTuple):
    """Tensors sent from stage to stage, with their masks and logits.

    Keras attaches a mask to a tensor, and to the result of a softmax or
    sigmoid its logits, from which cross-entropies are computed. In graphs
    Keras's cross-entropies also look for an operation `Softmax` or `Sigmoid`
    that made the tensor, and take its input as logits.

    All fields are nested structures like `tensors`, with `None` for a tensor
    without a mask or logits.
    """

    tensors: Any
    masks: Any
    logits: Any  # attached by Keras
    before_softmax: Any  # inputs of operations, where Keras attached nothing
    before_sigmoid: Any

    @classmethod
    def of(cls, tensors: Any) -> "Activations":
        """Returns tensors with their masks and logits."""

        def before(operation: str) -> Any:
            return keras.tree.map_structure(
                lambda x: _input_of(x, operation), tensors
            )

        return cls(
            tensors,
            keras.tree.map_structure(upstream.mask, tensors),
            keras.tree.map_structure(upstream.logits, tensors),
            before("Softmax"),
            before("Sigmoid"),
        )

    def unpack(self) -> Any:
        """Returns the tensors, with masks and logits attached for Keras."""

        def attach(x, mask, logits, before_softmax, before_sigmoid):
            if before_softmax is not None:
                x = tf.nn.softmax(before_softmax)
            elif before_sigmoid is not None:
                x = tf.nn.sigmoid(before_sigmoid)
            elif mask is not None or logits is not None:
                x = tf.identity(x)
            if mask is not None:
                upstream.set_mask(x, mask)
            if logits is not None:
                upstream.set_logits(x, logits)
            return x

        return keras.tree.map_structure(attach, *self)

    def with_full_masks(self) -> "Activations":
        """Returns a copy whose masks have a row for each row of their tensor.

        A mask of one row, which Keras would broadcast, is repeated.

        Raises:
            ValueError: If a mask has other rows, as one without a batch axis.
        """
        masks = keras.tree.map_structure(_full_mask, self.tensors, self.masks)
        return self._replace(masks=masks)

    def by_tensor(self) -> list[list[tf.Tensor]]:
        """Returns a list for each tensor: the tensor, then its logits."""
        return [[x for x in leaf if x is not None] for leaf in self._unmasked()]

    def parts(self) -> list[tf.Tensor]:
        """Returns the flat list of `by_tensor()`.

        These may have a gradient, and masks have none.
        """
        return [x for parts in self.by_tensor() for x in parts]

    def with_parts(self, parts: Iterable[tf.Tensor]) -> "Activations":
        """Returns a copy with other tensors in place of `parts()`."""
        flat = join(filled(self._unmasked(), parts))
        return flat.packed(self.tensors)._replace(masks=self.masks)

    def floats(self) -> list[tf.Tensor]:
        """Returns the floating-point ones of `parts()`."""
        return [x for x in self.parts() if x.dtype.is_floating]

    def with_floats(self, floats: Iterable[tf.Tensor]) -> "Activations":
        """Returns a copy with other tensors in place of `floats()`."""
        rest = iter(floats)
        return self.with_parts(
            next(rest) if x.dtype.is_floating else x for x in self.parts()
        )

    def each(self) -> "list[Activations]":
        """Splits activations whose `tensors` are a tuple, one per element."""
        return [Activations(*x) for x in zip(*self, strict=True)]

    def packed(self, structure: Any) -> "Activations":
        """Returns activations whose `tensors` are flat, nested as told."""
        return Activations(
            *(keras.tree.pack_sequence_as(structure, list(x)) for x in self)
        )

    def _unmasked(self) -> "list[Activations]":
        """Returns the activations of each tensor, without masks."""
        flat = Activations(*map(keras.tree.flatten, self))
        return [x._replace(masks=None) for x in flat.each()]


def join(contents: Sequence[Activations]) -> Activations:
    """Joins the activations of several values: the inverse of `each`."""
    fields = zip(*contents, strict=True)
    return Activations(*fields) if contents else Activations(*([()] * 5))


def _full_mask(x: Any, mask: Any) -> Any:
    """Returns the mask of `x` with as many rows as `x`, which may be `None`."""
    shape = tf.TensorShape(getattr(mask, "shape", None))
    if mask is None or shape.rank is None or not x.shape.rank:
        return mask
    rows, given = x.shape[0], shape[0] if shape.rank else 0
    if given is None or given == rows:
        return mask
    pairs = zip(shape[1:], x.shape[1:], strict=False)
    if not all(None in pair or pair[0] in (1, pair[1]) for pair in pairs):
        # It belongs to other tensors: a layer that makes several rows of one
        # hands on the mask of its inputs.
        return mask
    if given == 1:
        rows = tf.shape(x)[0] if rows is None else rows
        return tf.tile(mask, [rows, *[1] * (shape.rank - 1)])
    if rows is None and shape.rank > 1:
        return mask
    raise ValueError(
        "A Keras mask must have a row for each row of its tensor, or one row "
        "for all, to be cut into micro-batches. Use `mask[None]` in place of "
        "one without a batch axis, or num_micro_batches=1. Received: a mask of "
        f"shape {shape}, for a tensor of shape {x.shape}"
    )


def _input_of(x: Any, operation: str) -> Any:
    """Returns the input of the operation that made `x`, if it is of this type.

    `None` otherwise, and if Keras has attached logits to `x`.
    """
    if (
        tf.is_symbolic_tensor(x)
        and x.op.type == operation
        and upstream.logits(x) is None
    ):
        return x.op.inputs[0]
    return None
