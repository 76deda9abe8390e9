"""The loss of a mini-batch from the losses of its micro-batches.

Keras reduces a loss to `S / N`: a sum over the values of all samples, and a
count that depends on the reduction, the masks and the sample weights. A
micro-batch gives `S_m / N_m`, and

    S / N  =  sum_m (N_m / N) * (S_m / N_m)

holds whatever the sizes of the micro-batches. N is needed before the first
backward pass, when most outputs are not yet there. It does not depend on
their values, only on labels, sample weights and masks.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.loss import apply_mask

from tf_gpipe.traced_function import result_alone

# Stands for the number of rows; no size that is about.
_ROWS = 1009


def micro_batch_loss(
    compile_loss: Any,
    y: Any,
    outputs: Any,
    sample_weight: Any,
    scale: tf.Tensor,
    num_rows: int | None,
) -> Callable[..., tuple[list[tf.Tensor], list]]:
    """Returns the losses given to `compile`, as a function of a micro-batch.

    All arguments are the mini-batch's. `outputs` need only have the shapes
    and Keras masks of its outputs; the values don't matter.
    Gradients are multiplied by `scale`. `num_rows` is `None` if unknown.

    Returns:
        Function of a micro-batch's outputs, labels and sample weights, and of
        two numbers: 0 if it has no rows of its own, else 1; and its share in
        the rows. It returns a list of scalars, the part in the total and the
        parts in each loss; and a list with the gradient or `None` for each
        flat output.

    Raises:
        ValueError: If a loss can only be computed on the whole mini-batch.
    """
    # By number of the loss: whether its count takes its values, and the count.
    needed: dict[int, bool] = {}
    counts: dict[int, tf.Tensor | None] = {}

    def probe(i, loss, y_true, y_pred, weight):
        needed[i] = _needs_values(loss, y_true, y_pred, weight, num_rows)
        counts[i] = result_alone(
            lambda: _count(loss, needed[i], y_true, y_pred, weight)
        )
        return tf.zeros(())

    _in_place_of_each(compile_loss, probe, y, outputs, sample_weight)

    def differentiate(outputs, y, sample_weight, valid, share_of_rows):
        parts: list[tf.Tensor] = []

        def share(i, loss, y_true, y_pred, weight):
            portion = share_of_rows
            count = _count(loss, needed[i], y_true, y_pred, weight)
            if count is not None:
                count *= tf.cast(valid, count.dtype)
                portion = tf.math.divide_no_nan(count, counts[i])
            with keras.StatelessScope() as scope:
                value = tf.reduce_sum(loss(y_true, y_pred, weight))
            if scope.state_mapping:
                raise _whole(loss, "changes variables, such as random seeds")
            value *= tf.cast(portion, value.dtype)
            parts.append(value)
            return value

        y_pred = outputs.unpack()
        flat = keras.tree.flatten(y_pred)
        with tf.GradientTape() as tape:
            tape.watch([x for x in flat if x.dtype.is_floating])
            total = _in_place_of_each(
                compile_loss, share, y, y_pred, sample_weight
            )
            scaled = total * tf.cast(scale, total.dtype)
        return [total, *parts], tape.gradient(scaled, flat)

    return differentiate


def _in_place_of_each(
    compile_loss: Any, function: Callable, *args: Any
) -> tf.Tensor:
    """Calls `compile_loss` with a function in place of each of its losses.

    It gets the number of the loss and the loss, then what the loss would get.
    """
    if compile_loss is None:
        return tf.zeros(())

    def call(compile_loss):
        # Without the metrics that Keras keeps of several losses, which want
        # the mini-batch.
        with keras.StatelessScope():
            return compile_loss(*args)

    if not compile_loss.built:
        # Never run: only Keras knows which labels go with what.
        build = functools.partial(call, compile_loss)
        tf.function(build, autograph=False).get_concrete_function()
    # Another one, since the model may be asked by other threads meanwhile.
    stand_in = object.__new__(type(compile_loss))
    vars(stand_in).update(vars(compile_loss))
    stand_in._flat_losses = [
        entry._replace(loss=functools.partial(function, i, entry.loss))
        for i, entry in enumerate(compile_loss._flat_losses)
    ]
    return call(stand_in)


def _needs_values(
    loss: keras.Loss,
    y_true: Any,
    y_pred: Any,
    weight: Any,
    num_rows: int | None,
) -> bool:
    """Returns whether `_count` needs the values of a loss.

    As it does unless their number is in proportion to that of rows, and they
    have no mask. It takes a trace that is never run: to tell how many there
    are TensorFlow would make them, those of the whole mini-batch, unless it
    knows the size of the batch.

    Raises:
        ValueError: If the loss needs the whole mini-batch, or other weights.
    """
    if type(loss).__call__ is not keras.Loss.__call__:
        raise _whole(loss, "overrides `__call__`")
    given = _given(loss, y_true, y_pred)

    def sized(x: tf.Tensor) -> tf.TensorSpec:
        # A label of one row may be that of all samples.
        if not x.shape.rank or (x.shape[0] == 1 and num_rows != 1):
            return tf.TensorSpec(x.shape, x.dtype)
        return tf.TensorSpec([_ROWS, *x.shape[1:]], x.dtype)

    def call(*args):
        found = keras.ops.convert_to_tensor(loss.call(*args))
        return found, getattr(found, "_keras_mask", None)

    try:
        found, mask = (
            tf.function(call, autograph=False)
            .get_concrete_function(*keras.tree.map_structure(sized, given))
            .structured_outputs
        )
    except Exception as e:
        shapes = keras.tree.map_structure(lambda x: str(x.shape), given)
        e.add_note(
            f"Raised by loss '{loss.name}', called on labels and outputs of "
            f"shapes {shapes}."
        )
        raise
    shape = found.shape
    if shape.rank == 0:
        raise _whole(loss, "returns one number, not one a sample")
    rows = shape[0] if shape.rank else None
    if rows is not None and rows % _ROWS:
        raise _whole(loss, f"returns {rows} numbers for all samples")
    if isinstance(loss, keras.losses.Circle):
        raise _whole(loss, "compares samples with one another")
    _check_weight(loss, shape, weight)
    return rows is None or mask is not None


def _check_weight(
    loss: keras.Loss, values: tf.TensorShape, weight: Any
) -> None:
    """Refuses weights of samples that Keras takes for weights of others.

    It multiplies as NumPy does, from the last axis: weights of shape (B,) by
    values of shape (B, T) are those of positions, or fail, unless B is T. Of
    a micro-batch they need not fail.
    """
    shape = tf.TensorShape(getattr(weight, "shape", ()))
    rank = values.rank
    if None in (shape.rank, rank) or shape.rank in (0, rank) or shape[0] == 1:
        return
    longer = max(shape, values, key=len)
    if abs(shape.rank - rank) > 1 or longer[-1] != 1:
        raise ValueError(
            f"`sample_weight` must have {rank} axes, as many as the values of "
            f"loss '{loss.name}', such as shape (batch_size, 1). Received: "
            f"sample_weight of shape {tuple(shape)}"
        )


def _count(
    loss: keras.Loss, needed: bool, y_true: Any, y_pred: Any, weight: Any
) -> tf.Tensor | None:
    """Returns the N by which `loss` divides, up to a constant factor.

    Or `None`, if it is the number of rows.
    """
    if loss.reduction in ("sum", "none", None):
        return tf.ones((), tf.float64)
    # Of which TensorFlow runs what the count needs.
    made = loss.call(*_given(loss, y_true, y_pred)) if needed else None
    mask = getattr(y_pred, "_keras_mask", None)
    own = getattr(made, "_keras_mask", None)
    if own is not None:
        mask = own if mask is None else mask & own
    if loss.reduction != "mean_with_sample_weight":
        weight = None
    # As of a sum: of a mean they would be divided by N.
    counted = apply_mask(weight, mask, "float64", "sum")
    if counted is not None:
        return tf.reduce_sum(tf.cast(counted, tf.float64))
    return None if made is None else tf.cast(tf.shape(made)[0], tf.float64)


def _given(loss: keras.Loss, *values: Any) -> list:
    """Returns labels and outputs as Keras gives them to `loss.call`."""
    convert = functools.partial(keras.ops.convert_to_tensor, dtype=loss.dtype)
    return keras.tree.map_structure(convert, list(values))


def _whole(loss: Any, reason: str) -> ValueError:
    name = getattr(loss, "name", type(loss).__name__)
    return ValueError(
        f"Loss '{name}' {reason}, so the loss of a mini-batch cannot be put "
        "together from its micro-batches, as a schedule that starts backward "
        "passes before all forward passes are done needs. Return one value a "
        "sample (leave the mean to `reduction`), or use schedule='gpipe', "
        "which computes the loss on the whole mini-batch."
    )
