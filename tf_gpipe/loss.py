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
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.stage import Activations

Differentiated = tuple[list[tf.Tensor], list]


def micro_batch_loss(
    compile_loss: Any,
    y: Any,
    outputs: Any,
    sample_weight: Any,
    scale: tf.Tensor,
) -> Callable[[Activations, Any, Any, Any], Differentiated]:
    """Returns the losses given to `compile`, as a function of a micro-batch.

    Args:
        compile_loss: Keras's `CompileLoss` of the model, or `None`.
        y: Nested structure of the mini-batch's labels.
        outputs: Nested structure like the mini-batch's outputs, with their
            Keras masks; the values don't matter.
        sample_weight: Nested structure of sample weights, or `None`.
        scale: Scalar, by which gradients are multiplied.

    Returns:
        Function of a micro-batch's outputs, labels and sample weights, and of
        a number: 0 if it has no rows of its own, else 1. It returns a list of
        scalars, the part in the total and the parts in each loss; and a list
        with the gradient or `None` for each flat output.

    Raises:
        ValueError: If a loss can only be computed on the whole mini-batch.
    """
    counts: dict[int, tf.Tensor] = {}

    def probe(i, loss, y_true, y_pred, weight):
        counts[i] = _count(loss, y_true, y_pred, weight)
        return tf.zeros(())

    if compile_loss is not None:
        with keras.StatelessScope():
            if not compile_loss.built:
                compile_loss(y, outputs, sample_weight)
            with _in_place_of_each(compile_loss, probe):
                compile_loss(y, outputs, sample_weight)

    def differentiate(outputs, y, sample_weight, valid):
        parts: list[tf.Tensor] = []

        def share(i, loss, y_true, y_pred, weight):
            count = _count(loss, y_true, y_pred, weight)
            count *= tf.cast(valid, count.dtype)
            with keras.StatelessScope() as scope:
                value = tf.reduce_sum(loss(y_true, y_pred, weight))
            if scope.state_mapping:
                raise _whole(loss, "changes variables, such as random seeds")
            value *= tf.cast(
                tf.math.divide_no_nan(count, counts[i]), value.dtype
            )
            parts.append(value)
            return value

        y_pred = outputs.unpack()
        flat = keras.tree.flatten(y_pred)
        sources = [x for x in flat if x.dtype.is_floating]
        total = tf.zeros(())
        with tf.GradientTape() as tape:
            tape.watch(sources)
            if compile_loss is not None:
                # Without the metrics that Keras keeps of several losses,
                # which want the mini-batch.
                with (
                    keras.StatelessScope(),
                    _in_place_of_each(compile_loss, share),
                ):
                    total = compile_loss(y, y_pred, sample_weight)
            scaled = total * tf.cast(scale, total.dtype)
        found = iter(
            tape.gradient(
                scaled,
                sources,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
        )
        gradients = [next(found) if x.dtype.is_floating else None for x in flat]
        return [total, *parts], gradients

    return differentiate


@contextlib.contextmanager
def _in_place_of_each(compile_loss: Any, wrapper: Callable) -> Iterator[None]:
    """Has `wrapper` called in place of each loss, with its number and it."""
    original = compile_loss._flat_losses
    try:
        compile_loss._flat_losses = [
            entry._replace(loss=functools.partial(wrapper, i, entry.loss))
            for i, entry in enumerate(original)
        ]
        yield
    finally:
        compile_loss._flat_losses = original


def _count(
    loss: keras.Loss, y_true: Any, y_pred: Any, weight: Any
) -> tf.Tensor:
    """Returns the N by which `loss` divides, up to a constant factor."""
    if type(loss).__call__ is not keras.Loss.__call__:
        raise _whole(loss, "overrides `__call__`")
    in_mask = getattr(y_pred, "_keras_mask", None)
    to_tensor = lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype)  # noqa: E731
    given = keras.tree.map_structure(to_tensor, [y_true, y_pred])
    values = keras.ops.convert_to_tensor(loss.call(*given))
    if values.shape.rank == 0:
        raise _whole(loss, "returns one number, not one a sample")
    flat = keras.tree.flatten(given)
    rows = [x.shape[0] for x in flat if x.shape.rank != 0]
    if values.shape[0] not in (None, *rows):
        raise _whole(loss, f"returns {values.shape[0]} numbers for all samples")
    if isinstance(loss, keras.losses.Circle):
        raise _whole(loss, "compares samples with one another")
    if loss.reduction in ("sum", "none", None):
        return tf.ones((), tf.float64)
    masks = [
        mask
        for mask in (in_mask, getattr(values, "_keras_mask", None))
        if mask is not None
    ]
    mask = masks[0] & masks[-1] if masks else None
    if loss.reduction == "mean_with_sample_weight" and weight is not None:
        count = tf.cast(weight, tf.float64)
        if mask is not None:
            mask = tf.cast(mask, tf.float64)
            # Weights of shape (B,) or (B, 1) with masks of shape (B, T).
            while count.shape.rank < mask.shape.rank:
                count = count[..., None]
            while mask.shape.rank < count.shape.rank:
                mask = mask[..., None]
            count *= mask
        return tf.reduce_sum(count)
    if mask is not None:
        return tf.reduce_sum(tf.cast(mask, tf.float64))
    return tf.cast(tf.shape(values)[0], tf.float64)


def _whole(loss: Any, reason: str) -> ValueError:
    name = getattr(loss, "name", type(loss).__name__)
    return ValueError(
        f"Loss '{name}' {reason}, so the loss of a mini-batch cannot be put "
        "together from its micro-batches, as a schedule that starts backward "
        "passes before all forward passes are done needs. Return one value a "
        "sample (leave the mean to `reduction`), or use schedule='gpipe', "
        "which computes the loss on the whole mini-batch."
    )
