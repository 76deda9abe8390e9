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
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.straight_through import straight_through
from tf_gpipe.stage.traced_function import pruned
from tf_gpipe.step import loss_checks
from tf_gpipe.step.micro_batch import Split


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
        _check_dense(y, sample_weight)
        self._compile_loss = compile_loss
        self._y = y
        self._sample_weight = sample_weight
        self._scale = scale
        self._trainable = trainable
        self._split = split
        # By index of the loss: whether its count N follows from its values, and
        # N of the mini-batch.
        self._by_values: dict[int, bool] = {}
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
        losses: list[keras.Loss] = []

        def probe(i, loss, y_true, y_pred, weight):
            scope = _LossScope()
            by_values = loss_checks.check_count(
                loss, y_true, y_pred, weight, num_rows, scope
            )
            self.read.update(scope.read)
            self._by_values[i] = by_values
            losses.append(loss)
            self._counts[i] = pruned(
                lambda: _count(loss, by_values, y_true, y_pred, weight)
            )
            return tf.zeros(())

        _in_place_of_each(
            self._compile_loss, probe, self._y, outputs, self._sample_weight
        )
        loss_checks.check_together(losses)
        self.weights = [v for v in self._trainable if id(v) in self.read]

    def labels(self, m: int) -> tuple:
        """Returns the labels and sample weights of micro-batch `m`."""
        return (
            self._split.take_of_outputs(self._y, m),
            self._split.take_of_outputs(self._sample_weight, m),
        )

    def on_last_device(self, pipeline: Pipeline, inline: bool) -> Callable:
        """Returns this object as a function on the last stage's device.

        Args:
            pipeline: The `Pipeline`.
            inline: Whether the operations are part of the program around it.
        """
        device = pipeline.stages[-1].device

        def on_device(outputs, *args):
            with tf.device(device):
                return self(pipeline.packed(outputs), *args)

        return on_device if inline else tf.function(on_device, autograph=False)

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
            count = _count(loss, self._by_values[i], y_true, y_pred, weight)
            if count is not None:
                count *= tf.cast(valid, count.dtype)
                portion = tf.math.divide_no_nan(count, self._counts[i])
            pairs = zip(self.weights, weights, strict=True)
            with _LossScope(pairs) as scope:
                values = loss(y_true, y_pred, weight)
            if scope.assigned:
                raise loss_checks.needs_whole(
                    loss, "changes variables, such as random seeds"
                )
            value = tf.reduce_sum(values)
            value *= tf.cast(portion, value.dtype)
            if loss_checks.is_unreduced(loss):
                mean = tf.reduce_mean(values)
                mean *= tf.cast(share_of_rows, mean.dtype)
                value = straight_through(mean, value)
            of_each.append(value)
            return value

        with tf.GradientTape() as tape:
            tape.watch(outputs.floats() + weights)
            total = _in_place_of_each(
                self._compile_loss, share, y, outputs.unpack(), sample_weight
            )
            scaled = total * tf.cast(self._scale, total.dtype)
        sources = outputs.parts(), weights
        return [total, *of_each], *tape.gradient(scaled, sources)


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


def _check_dense(*tensors: Any) -> None:
    """Refuses sparse tensors, which are not cut into micro-batches."""
    for x in keras.tree.flatten(tensors):
        if isinstance(x, tf.SparseTensor):
            raise TypeError(
                "Labels and sample weights are cut into micro-batches, as a "
                "sparse tensor cannot be. Make them dense, by "
                "`tf.sparse.to_dense`; or use schedule='gpipe', if the loss "
                f"takes them. Received: {x}"
            )


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
        loss_checks.check_argument(
            upstream.loss_as_given(compile_loss), args[1]
        )
        # A trace that is never run. It builds `compile_loss`: only Keras knows
        # which labels belong to which output.
        build = functools.partial(call, compile_loss)
        tf.function(build, autograph=False).get_concrete_function()
    return upstream.call_with_each(compile_loss, function, call)


def _count(
    loss: keras.Loss, by_values: bool, y_true: Any, y_pred: Any, weight: Any
) -> tf.Tensor | None:
    """Returns the N by which `loss` divides, up to a constant factor.

    Returns `None` if that is the number of rows.
    """
    if loss.reduction in ("sum", "none", None):
        return tf.ones((), tf.float64)
    # The caller prunes operations that the count does not need.
    made = None
    if by_values:
        made = loss.call(*loss_checks.converted(loss, y_true, y_pred))
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
