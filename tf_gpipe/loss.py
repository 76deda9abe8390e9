"""The loss of a mini-batch from the losses of its micro-batches.

Keras reduces a loss to `S / N`: a sum over the values of all samples, and a
count that depends on the reduction, the masks and the sample weights. A
micro-batch gives `S_m / N_m`, and

    S / N  =  sum_m (N_m / N) * (S_m / N_m)

holds whatever the sizes of the micro-batches. N is needed before the first
backward pass, when most outputs are not yet there. It does not depend on
their values, only on labels, sample weights and masks.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.stage import Activations

Wrapper = Callable[[int, keras.Loss, Any, Any, Any], tf.Tensor]


class MicroBatchLoss:
    """The losses given to `compile`, computed one micro-batch at a time.

    Args:
        compile_loss: Keras's `CompileLoss` of the model, or `None`.
        y: Nested structure of the mini-batch's labels.
        outputs: Nested structure like the mini-batch's outputs, with their
            Keras masks; the values don't matter.
        sample_weight: Nested structure of sample weights, or `None`.
        scale: Scalar, by which gradients are multiplied.

    Raises:
        ValueError: If a loss can only be computed on the whole mini-batch.
    """

    def __init__(
        self,
        compile_loss: Any,
        y: Any,
        outputs: Any,
        sample_weight: Any,
        scale: tf.Tensor,
    ):
        self._compile_loss = compile_loss
        self._scale = scale
        counts: dict[int, tf.Tensor] = {}

        def probe(i, loss, y_true, y_pred, weight):
            counts[i] = _count(loss, y_true, y_pred, weight)
            return tf.zeros(())

        if compile_loss is not None:
            if not compile_loss.built:
                with keras.StatelessScope():
                    compile_loss(y, outputs, sample_weight)
            with keras.StatelessScope(), self._replaced(probe):
                compile_loss(y, outputs, sample_weight)
        self._counts = counts

    def differentiate(
        self, outputs: Activations, y: Any, sample_weight: Any, valid: tf.Tensor
    ) -> tuple[list, list]:
        """Returns the parts of a micro-batch in the losses, and gradients.

        Args:
            outputs: `Activations` of the micro-batch.
            y: As for `__call__`.
            sample_weight: As for `__call__`.
            valid: As for `__call__`.

        Returns:
            Tuple of a list of scalars, the part in the total and the parts in
            each loss; and a list with the gradient or `None` for each flat
            output.
        """
        y_pred = outputs.unpack()
        flat = keras.tree.flatten(y_pred)
        floats = [i for i, t in enumerate(flat) if t.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch([flat[i] for i in floats])
            total, values = self(y, y_pred, sample_weight, valid)
            scaled = total * tf.cast(self._scale, total.dtype)
        found = tape.gradient(
            scaled,
            [flat[i] for i in floats],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        gradients: list = [None] * len(flat)
        for i, gradient in zip(floats, found, strict=True):
            gradients[i] = gradient
        return [total, *values], gradients

    def __call__(
        self, y: Any, outputs: Any, sample_weight: Any, valid: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns the part of a micro-batch in the mini-batch's loss.

        Args:
            y: Labels of the micro-batch.
            outputs: Outputs of the micro-batch, with their Keras masks.
            sample_weight: Sample weights of the micro-batch, or `None`.
            valid: 0 for a micro-batch that has no rows of its own, else 1.

        Returns:
            Tuple of the part of the total, a scalar, and a list of the parts
            of each loss.
        """
        parts: list[tf.Tensor] = []

        def share(i, loss, y_true, y_pred, weight):
            count = _count(loss, y_true, y_pred, weight)
            count *= tf.cast(valid, count.dtype)
            value = tf.reduce_sum(loss(y_true, y_pred, weight))
            value *= tf.cast(
                tf.math.divide_no_nan(count, self._counts[i]), value.dtype
            )
            parts.append(value)
            return value

        if self._compile_loss is None:
            return tf.zeros(()), []
        # The metrics that Keras keeps of several losses want the mini-batch.
        with keras.StatelessScope(), self._replaced(share):
            return self._compile_loss(y, outputs, sample_weight), parts

    @contextlib.contextmanager
    def _replaced(self, wrapper: Wrapper) -> Iterator[None]:
        """Has `wrapper` called in place of each loss."""
        original = self._compile_loss._flat_losses

        def bind(i, loss):
            return lambda y_true, y_pred, weight: wrapper(
                i, loss, y_true, y_pred, weight
            )

        try:
            self._compile_loss._flat_losses = [
                entry._replace(loss=bind(i, entry.loss))
                for i, entry in enumerate(original)
            ]
            yield
        finally:
            self._compile_loss._flat_losses = original


def _count(
    loss: keras.Loss, y_true: Any, y_pred: Any, weight: Any
) -> tf.Tensor:
    """Returns the N by which `loss` divides, up to a constant factor."""
    if type(loss).__call__ is not keras.Loss.__call__:
        raise _whole(loss, "overrides `__call__`")
    in_mask = getattr(y_pred, "_keras_mask", None)
    to_tensor = lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype)  # noqa: E731
    values = loss.call(
        keras.tree.map_structure(to_tensor, y_true),
        keras.tree.map_structure(to_tensor, y_pred),
    )
    values = keras.ops.convert_to_tensor(values)
    if values.shape.rank == 0:
        raise _whole(loss, "returns one number, not one a sample")
    if loss.reduction in ("sum", "none", None):
        return tf.ones(())
    masks = [
        mask
        for mask in (in_mask, getattr(values, "_keras_mask", None))
        if mask is not None
    ]
    mask = masks[0] & masks[-1] if masks else None
    if loss.reduction == "mean_with_sample_weight" and weight is not None:
        count = tf.cast(weight, tf.float32)
        if mask is not None:
            mask = tf.cast(mask, tf.float32)
            # Weights of shape (B,) or (B, 1) with masks of shape (B, T).
            while count.shape.rank < mask.shape.rank:
                count = count[..., None]
            count *= mask
        return tf.reduce_sum(count)
    if mask is not None:
        return tf.reduce_sum(tf.cast(mask, tf.float32))
    return tf.cast(tf.shape(values)[0], tf.float32)


def _whole(loss: Any, reason: str) -> ValueError:
    name = getattr(loss, "name", type(loss).__name__)
    return ValueError(
        f"Loss '{name}' {reason}, so the loss of a mini-batch cannot be put "
        "together from its micro-batches, as a schedule that starts backward "
        "passes before all forward passes are done needs. Return one value a "
        "sample (leave the mean to `reduction`), or use schedule='gpipe', "
        "which computes the loss on the whole mini-batch."
    )
