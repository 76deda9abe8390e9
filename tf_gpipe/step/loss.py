"""The loss of a mini-batch from the losses of its micro-batches.

Keras reduces a loss to `S / N`: a sum over the values of all samples, and a
count that depends on the reduction, the masks and the sample weights. A
micro-batch gives `S_m / N_m`, and

    S / N  =  sum_m (N_m / N) * (S_m / N_m)

holds whatever the sizes of the micro-batches. N is needed before the first
backward pass, when most outputs are not yet there. It does not depend on
their values, only on labels, sample weights and masks. A loss whose N does
is refused.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.reached import followed_values
from tf_gpipe.stage.stage import Activations
from tf_gpipe.stage.traced_function import pruned

# Stands for the number of rows; no size that is about.
_ROWS = 1009


class MicroBatchLoss:
    """The losses given to `compile`, as a function of a micro-batch.

    Weights that the losses use are arguments: read once a mini-batch where
    they are, whatever stage that is.

    Args:
        compile_loss: Keras's `CompileLoss`, or `None`.
        y: Labels of the mini-batch.
        outputs: Tensors with the shapes and Keras masks of the mini-batch's
            outputs; their values don't matter.
        sample_weight: That of the mini-batch.
        scale: Scalar by which gradients are multiplied.
        num_rows: Integer, rows of the mini-batch, or `None` if unknown.
        trainable: Variables whose gradients are asked for.

    Attributes:
        weights: List of those of `trainable` that the losses use.

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
        num_rows: int | None,
        trainable: Iterable[keras.Variable],
    ):
        self._compile_loss = compile_loss
        self._scale = scale
        # By number of the loss: whether its count takes its values, and the
        # count.
        self._needed: dict[int, bool] = {}
        self._counts: dict[int, tf.Tensor | None] = {}
        used: set[int] = set()
        reduced: list[bool] = []

        def probe(i, loss, y_true, y_pred, weight):
            scope = _LossScope()
            needed = _needs_values(
                loss, y_true, y_pred, weight, num_rows, scope
            )
            used.update(scope.read)
            self._needed[i] = needed
            reduced.append(not _is_unreduced(loss))
            self._counts[i] = pruned(
                lambda: _count(loss, needed, y_true, y_pred, weight)
            )
            return tf.zeros(())

        _in_place_of_each(compile_loss, probe, y, outputs, sample_weight)
        if len(reduced) > 1 and not all(reduced):
            # Keras adds their arrays, as NumPy does whatever their shapes are.
            raise ValueError(
                "One of several losses has reduction=None, which leaves a "
                "value a sample to be added to the other losses. Give each a "
                "`reduction`, or use schedule='gpipe'."
            )
        self.weights = [v for v in trainable if id(v) in used]

    def __call__(
        self,
        outputs: Activations,
        weights: list,
        y: Any,
        sample_weight: Any,
        valid: Any,
        share_of_rows: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list, list]:
        """Returns what a micro-batch contributes to the losses.

        Args:
            outputs: Those of the micro-batch.
            weights: Values of `weights`.
            y: Labels of the micro-batch.
            sample_weight: That of the micro-batch.
            valid: 0 if the micro-batch has no rows of its own, else 1.
            share_of_rows: Scalar, its share in the rows of the mini-batch.

        Returns:
            Tuple of a list of scalars, the part in the total and the parts in
            each loss; a list with the gradient or `None` for each part of the
            outputs; and such a list for `weights`.
        """
        of_each: list[tf.Tensor] = []

        def share(i, loss, y_true, y_pred, weight):
            portion = share_of_rows
            count = _count(loss, self._needed[i], y_true, y_pred, weight)
            if count is not None:
                count *= tf.cast(valid, count.dtype)
                portion = tf.math.divide_no_nan(count, self._counts[i])
            pairs = zip(self.weights, weights, strict=True)
            with _LossScope(pairs) as scope:
                values = loss(y_true, y_pred, weight)
            if scope.assigned:
                raise _whole(loss, "changes variables, such as random seeds")
            value = tf.reduce_sum(values)
            value *= tf.cast(portion, value.dtype)
            if _is_unreduced(loss):
                mean = tf.reduce_mean(values)
                mean *= tf.cast(share_of_rows, mean.dtype)
                value = _told_as(mean, value)
            of_each.append(value)
            return value

        parts = outputs.parts()
        with tf.GradientTape() as tape:
            tape.watch([x for x in parts if x.dtype.is_floating] + weights)
            total = _in_place_of_each(
                self._compile_loss, share, y, outputs.unpack(), sample_weight
            )
            scaled = total * tf.cast(self._scale, total.dtype)
        return [total, *of_each], *tape.gradient(scaled, (parts, weights))


class _LossScope(keras.StatelessScope):
    """A scope that knows which weights a loss reads, and if it assigns any."""

    def __init__(self, state_mapping: Iterable[tuple] = ()):
        super().__init__(list(state_mapping))
        self.read: dict[int, keras.Variable] = {}
        self.assigned = False

    def add_update(self, update: tuple) -> None:
        self.assigned = True
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.read[id(variable)] = variable
        return super().get_current_value(variable)


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
        _check_losses(upstream.loss_as_given(compile_loss), args[1])
        # Never run: only Keras knows which labels go with what.
        build = functools.partial(call, compile_loss)
        tf.function(build, autograph=False).get_concrete_function()
    return upstream.call_with_each(compile_loss, function, call)


def _check_losses(given: Any, y_pred: Any) -> None:
    """Refuses what Keras trips over as it builds losses."""
    if (
        isinstance(given, (list, tuple))
        and None in given
        and not keras.tree.is_nested(y_pred)
    ):
        raise ValueError(
            "A model with a single output has no output without a loss: "
            f"`loss` must not have `None` in it. Received: loss={given}"
        )


def _needs_values(
    loss: keras.Loss,
    y_true: Any,
    y_pred: Any,
    weight: Any,
    num_rows: int | None,
    scope: _LossScope,
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

    def call(y_true, y_pred):
        with scope:
            found = keras.ops.convert_to_tensor(loss.call(y_true, y_pred))
        mask = upstream.mask(found)
        if mask is not None:
            makers = followed_values(mask)
            follows.extend(x.op in makers for x in keras.tree.flatten(y_pred))
        return found, mask

    follows: list[bool] = []
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
    if any(follows):
        raise _whole(loss, "leaves out values by a mask of the outputs")
    if rows is None and _is_unreduced(loss):
        raise _whole(loss, "has reduction=None and a number of values unknown")
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


def _is_unreduced(loss: keras.Loss) -> bool:
    """Returns whether a loss is one value a sample or position.

    Of which Keras shows the mean, and differentiates the sum.
    """
    return loss.reduction in ("none", None)


@tf.custom_gradient
def _told_as(shown: tf.Tensor, differentiated: tf.Tensor) -> tuple:
    """Returns a number, with the gradient of another one."""
    return tf.identity(shown), lambda by_value: (None, by_value)


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
    mask = upstream.mask(y_pred)
    own = upstream.mask(made)
    if own is not None:
        mask = own if mask is None else mask & own
    if loss.reduction != "mean_with_sample_weight":
        weight = None
    counted = upstream.counted(weight, mask, "float64")
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
