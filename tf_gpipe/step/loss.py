"""The loss of a mini-batch from the losses of its micro-batches.

Keras reduces a loss to `S / N`: a sum over the values of all samples, and a
count that depends on the reduction, the masks and the sample weights. A
micro-batch gives `S_m / N_m`, and

    S / N  =  sum_m (N_m / N) * (S_m / N_m)

holds for micro-batches of any sizes. N is needed before the first backward
pass, when most outputs are not yet computed. So N may depend on labels, sample
weights and masks, but not on the values of outputs: a loss whose N does is
refused.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.reached import followed_values
from tf_gpipe.stage.reached import reached
from tf_gpipe.stage.stage import Activations
from tf_gpipe.stage.straight_through import straight_through
from tf_gpipe.stage.traced_function import functions_of
from tf_gpipe.stage.traced_function import pruned
from tf_gpipe.step.micro_batch import Split
from tf_gpipe.step.trials import ROWS

# Operations with as many results as there are values of some kind.
_CHOOSE = ("DynamicPartition", "Unique", "UniqueV2", "Where")


class MicroBatchLoss:
    """The losses given to `compile`, as a function of a micro-batch.

    Weights that the losses use are arguments, so that they are read once per
    mini-batch, on the device of any stage.

    Args:
        compile_loss: Keras's `CompileLoss`, or `None`.
        y: Labels of the mini-batch.
        sample_weight: Sample weights of the mini-batch.
        scale: Scalar by which gradients are multiplied.
        trainable: Variables whose gradients are asked for.
        split: `Split` of the mini-batch.

    Attributes:
        read: Set of the ids of variables that the losses read. Known, as
            `weights`, once the loss has been prepared.
        weights: List of the variables in `trainable` that the losses use.
    """

    def __init__(
        self,
        compile_loss: Any,
        y: Any,
        sample_weight: Any,
        scale: tf.Tensor,
        trainable: Iterable[keras.Variable],
        split: Split,
    ):
        self._compile_loss = compile_loss
        self._y = y
        self._sample_weight = sample_weight
        self._scale = scale
        self._trainable = trainable
        self._split = split
        # By index of the loss: whether its count N needs the loss's values,
        # and N of the mini-batch.
        self._needed: dict[int, bool] = {}
        self._counts: dict[int, tf.Tensor | None] = {}
        self.read: set[int] = set()
        self.weights: list[keras.Variable] = []

    def prepare(self, outputs: Any) -> None:
        """Counts what the losses of the mini-batch divide by.

        Args:
            outputs: Tensors with the shapes and Keras masks of the mini-batch's
                outputs; their values don't matter.

        Raises:
            ValueError: If a loss can only be computed on the whole mini-batch.
        """
        num_rows = self._split.static_rows
        reduced: list[bool] = []

        def probe(i, loss, y_true, y_pred, weight):
            scope = _LossScope()
            needed = _needs_values(
                loss, y_true, y_pred, weight, num_rows, scope
            )
            self.read.update(scope.read)
            self._needed[i] = needed
            reduced.append(not _is_unreduced(loss))
            self._counts[i] = pruned(
                lambda: _count(loss, needed, y_true, y_pred, weight)
            )
            return tf.zeros(())

        _in_place_of_each(
            self._compile_loss, probe, self._y, outputs, self._sample_weight
        )
        if len(reduced) > 1 and not all(reduced):
            # Keras adds their arrays, as NumPy does whatever their shapes are.
            raise ValueError(
                "One of several losses has reduction=None, which leaves a "
                "value a sample to be added to the other losses. Give each a "
                "`reduction`, or use schedule='gpipe'."
            )
        self.weights = [v for v in self._trainable if id(v) in self.read]

    def inputs(self, m: int) -> tuple:
        """Returns the arguments of a call for micro-batch `m`, from `y` on."""
        return (
            self._split.take_of_outputs(self._y, m),
            self._split.take_of_outputs(self._sample_weight, m),
            self._split.valid(m),
            self._split.weight(m),
        )

    def __call__(
        self,
        outputs: Activations,
        weights: list,
        y: Any,
        sample_weight: Any,
        valid: Any,
        share_of_rows: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list, list]:
        """Returns a micro-batch's share of the losses, and its gradients.

        Args:
            outputs: Outputs of the micro-batch.
            weights: Values of `weights`.
            y: Labels of the micro-batch.
            sample_weight: Sample weights of the micro-batch.
            valid: 0 if the micro-batch has no rows of its own, else 1.
            share_of_rows: Scalar, its share of the mini-batch's rows.

        Returns:
            Tuple of a list of scalars, its summands of the total and of each
            loss; a list with the gradient or `None` of each part of the
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
                value = straight_through(mean, value)
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
    """A scope that records the variables a loss reads, and any assignment."""

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

    The function is called with the index of the loss, the loss, and the
    arguments of the loss.
    """
    if compile_loss is None:
        return tf.zeros(())

    def call(compile_loss):
        # In a scope, so that Keras does not update its metrics of single
        # losses, which are means over mini-batches.
        with keras.StatelessScope():
            return compile_loss(*args)

    if not compile_loss.built:
        _check_losses(upstream.loss_as_given(compile_loss), args[1])
        # A trace that is never run. It builds `compile_loss`: only Keras knows
        # which labels belong to which output.
        build = functools.partial(call, compile_loss)
        tf.function(build, autograph=False).get_concrete_function()
    return upstream.call_with_each(compile_loss, function, call)


def _check_losses(given: Any, y_pred: Any) -> None:
    """Raises an error for `loss` arguments with which Keras's build fails."""
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

    It does unless the number of values is proportional to the rows and they
    have no mask. That is found by a trace that is never run: with a batch of
    unknown size, TensorFlow would compute the values of the whole mini-batch
    to count them.

    Raises:
        ValueError: If the loss needs the whole mini-batch, or if
            `sample_weight` has the wrong shape.
    """
    if type(loss).__call__ is not keras.Loss.__call__:
        raise _whole(loss, "overrides `__call__`")
    given = _given(loss, y_true, y_pred)

    def sized(x: tf.Tensor) -> tf.TensorSpec:
        # One row of labels may be broadcast to all samples.
        if not x.shape.rank or (x.shape[0] == 1 and num_rows != 1):
            return tf.TensorSpec(x.shape, x.dtype)
        return tf.TensorSpec([ROWS, *x.shape[1:]], x.dtype)

    def call(y_true, y_pred):
        with scope:
            found = keras.ops.convert_to_tensor(loss.call(y_true, y_pred))
        mask = upstream.mask(found)
        if mask is not None:
            makers = followed_values(mask)
            follows.extend(x.op in makers for x in keras.tree.flatten(y_pred))
        chooses.append(_sized_by(found, keras.tree.flatten(y_pred)))
        return found, mask

    follows: list[bool] = []
    chooses: list[bool] = []
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
    if rows is not None and rows % ROWS:
        raise _whole(loss, f"returns {rows} numbers for all samples")
    if isinstance(loss, keras.losses.Circle):
        raise _whole(loss, "compares samples with one another")
    if any(follows):
        raise _whole(loss, "leaves out values by a mask of the outputs")
    if rows is None and _is_unreduced(loss):
        raise _whole(loss, "has reduction=None and a number of values unknown")
    if any(chooses) and loss.reduction != "sum":
        raise _whole(loss, "chooses values by the values of the outputs")
    _check_weight(loss, shape, weight)
    return rows is None or mask is not None


def _sized_by(found: tf.Tensor, given: list[tf.Tensor]) -> bool:
    """Returns whether a tensor's unknown size follows the values of others.

    Looked at are operations that make a size unknown, and of their inputs those
    that may be sizes, indices or conditions, if there are any.
    """
    if found.shape.is_fully_defined():
        return False
    sources = {x.op for x in given}

    def follows(x: tf.Tensor) -> bool:
        return not sources.isdisjoint(followed_values(x))

    for op in reached([found.op], lambda op: [x.op for x in op.inputs]):
        if all(x.shape.is_fully_defined() for x in op.outputs):
            continue
        names = functions_of(op.node_def)
        bodies = [upstream.function_of(op.graph, x) for x in names]
        for body in bodies:
            # From the end: the first input of a branch is not passed on.
            passed = zip(
                reversed(body.graph.inputs), reversed(op.inputs), strict=False
            )
            inner = [x for x, outer in passed if follows(outer)]
            if any(_sized_by(x, inner) for x in body.graph.outputs):
                return True
        if bodies or not (
            op.type in _CHOOSE
            or all(x.shape.is_fully_defined() for x in op.inputs)
        ):
            continue
        sizes = [x for x in op.inputs if not x.dtype.is_floating]
        if any(follows(x) for x in sizes or op.inputs):
            return True
    return False


def _check_weight(
    loss: keras.Loss, values: tf.TensorShape, weight: Any
) -> None:
    """Raises an error for sample weights that Keras would broadcast wrongly.

    Keras broadcasts as NumPy does, from the last axis: weights of shape (B,)
    times values of shape (B, T) fail, or weigh positions if B is T. With
    micro-batches they might not fail.
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

    Keras reports the mean of these values, but differentiates their sum.
    """
    return loss.reduction in ("none", None)


def _count(
    loss: keras.Loss, needed: bool, y_true: Any, y_pred: Any, weight: Any
) -> tf.Tensor | None:
    """Returns the N by which `loss` divides, up to a constant factor.

    Returns `None` if that is the number of rows.
    """
    if loss.reduction in ("sum", "none", None):
        return tf.ones((), tf.float64)
    # The caller prunes operations that the count does not need.
    made = loss.call(*_given(loss, y_true, y_pred)) if needed else None
    mask = upstream.mask(y_pred)
    own = upstream.mask(made)
    if own is not None:
        mask = own if mask is None else mask & own
    if loss.reduction != "mean_with_sample_weight":
        weight = None
    counted = upstream.value_weights(weight, mask, "float64")
    if counted is not None:
        return tf.reduce_sum(tf.cast(counted, tf.float64))
    return None if made is None else tf.cast(tf.shape(made)[0], tf.float64)


def _given(loss: keras.Loss, *values: Any) -> list:
    """Returns labels and outputs as Keras passes them to `loss.call`."""
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
