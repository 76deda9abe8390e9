"""The loss of a mini-batch and its gradients, for Keras's training step.

Two orders, by the schedule:

    all forward passes first        F F F F  loss  B B B B
    forward and backward mixed      F F FL BF LB BL B LB ...

In the first order the loss is computed from the whole mini-batch, so that any
loss function is right. In the second one each micro-batch has a loss (L); the
loss of the mini-batch is their sum.
"""

from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import slots
from tf_gpipe.stage.call_overrides import builds_optimizer
from tf_gpipe.stage.gradients import add
from tf_gpipe.step.engine import MiniBatch
from tf_gpipe.step.loss import MicroBatchLoss

# The loss, the gradient of each trainable variable, and the outputs.
LossAndGradients = tuple[tf.Tensor, list[Any], Any]


def of_call(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None
) -> LossAndGradients:
    """Loss and gradients as in Keras's own step, by a tape around the model.

    For models that override `call`, whatever it does around the pipeline; and
    for plain Keras models, as `loss_and_gradients`.

    Args:
        model: A pipeline, or the plain model of one.
        x: Inputs of the mini-batch.
        y: Labels.
        sample_weight: Sample weights, or `None`.

    Returns:
        A tuple: the loss, a scalar; the list of the gradients of trainable
        variables; the outputs.
    """
    with tf.GradientTape() as tape:
        y_pred = model(x, training=True)
        loss = model._compute_loss(x, y, y_pred, sample_weight)
        scaled = _scaled(model, loss)
    return loss, tape.gradient(scaled, model.trainable_variables), y_pred


def after_all_forwards(
    model: Any, run: MiniBatch, x: Any, y: Any, sample_weight: Any
) -> LossAndGradients:
    """Loss and gradients, by a loss computed after all forward passes.

    Exact for any loss function: it gets the outputs of the whole mini-batch.

    Arguments and result are those of `of_call`, and `run`, the `MiniBatch`, of
    which no task has run.
    """
    run.forward(tape=True)
    # The loss may read what layers have assigned, and penalties of weights do:
    # Keras computes both after all layers.
    run.commit_state()
    outputs, added = run.outputs.whole(), run.added.totals()
    with tf.device(run.pipeline.stages[-1].device):
        with tf.GradientTape() as tape:
            tape.watch(outputs.floats() + added)
            y_pred = outputs.unpack()
            # For Keras, or the user's override of `compute_loss`, which read
            # the losses of the model or of its layers.
            upstream.clear_losses(model)
            upstream.add_losses(zip(run.added.layers(), added, strict=True))
            try:
                loss = model._compute_loss(x, y, y_pred, sample_weight)
            finally:
                upstream.clear_losses(model)
            scaled = _scaled(model, loss)
        output_gradients, added_gradients, variable_gradients = tape.gradient(
            scaled, (outputs.parts(), added, model.trainable_variables)
        )
    added_gradients = [
        tf.zeros_like(x) if gradient is None else gradient
        for x, gradient in zip(added, added_gradients, strict=True)
    ]
    run.backward(output_gradients, added_gradients)
    return loss, _gradients(model, run, variable_gradients), y_pred


def by_micro_batch(
    model: Any, run: MiniBatch, y: Any, sample_weight: Any
) -> LossAndGradients:
    """Loss and gradients, by a loss of each micro-batch in its backward task.

    Arguments and result are those of `after_all_forwards`.

    Raises:
        ValueError: If there is no loss.
    """
    # Factors of the gradients: the optimizer's loss scale for losses given to
    # `compile`; for all others, as in Keras, divided by the replicas as well.
    scale = _scaled(model, tf.ones(()))
    added_scale = upstream.scaled_for_replicas(scale)

    loss_of_each = MicroBatchLoss(
        model._compile_loss,
        y,
        sample_weight,
        scale,
        model.trainable_variables,
        run.split,
    )
    parts = run.interleave(loss_of_each, added_scale)
    if model._compile_loss is None and not (
        run.added.totals() or model._get_regularization_losses()
    ):
        # Keras's error: its `_compute_loss`, which raises it, is not called.
        raise ValueError(
            "No loss to compute. Provide a `loss` argument in `compile()`."
        )
    # Summed on the last stage's device, so that each loss travels once if that
    # is on another host, not once a micro-batch.
    with tf.device(run.pipeline.stages[-1].device):
        total, *of_each = [tf.add_n(list(x)) for x in zip(*parts, strict=True)]
    # As in `after_all_forwards`.
    run.commit_state()
    with tf.GradientTape() as tape:
        penalties = model._get_regularization_losses()
        scaled = [tf.cast(added_scale, x.dtype) * x for x in penalties]
    variable_gradients = tape.gradient(scaled, model.trainable_variables)
    added = run.added.totals()
    losses = [upstream.scaled_for_replicas(x) for x in [*added, *penalties]]
    if model._compile_loss is not None:
        losses.insert(0, total)
    loss = tf.add_n([tf.cast(x, losses[0].dtype) for x in losses])
    y_pred = run.outputs.whole().unpack()
    # Keras updates its metrics of single losses only if there are several
    # outputs, too.
    if any(map(keras.tree.is_nested, (y, y_pred))):
        metrics = model._compile_loss.metrics if model._compile_loss else []
        for metric, value in zip(metrics, of_each, strict=False):
            metric.update_state(
                upstream.unscaled_for_replicas(value),
                sample_weight=run.split.static_rows,
            )
    return loss, _gradients(model, run, variable_gradients), y_pred


def _scaled(model: Any, loss: tf.Tensor) -> tf.Tensor:
    """Returns a loss times the loss scale of the model's optimizer."""
    if getattr(model, "optimizer", None) is None:
        return loss
    # Before it is built, a `LossScaleOptimizer` scales by a constant.
    if not (model.optimizer.built or builds_optimizer(model)):
        slots.build(model)
    return model.optimizer.scale_loss(loss)


def _gradients(
    model: Any, run: MiniBatch, variable_gradients: list[Any]
) -> list[Any]:
    """Returns the gradients of trainable variables, in their order.

    Those that the pipeline has accumulated, plus `variable_gradients`, those of
    losses that use variables directly, such as regularisers.
    """
    accumulated = run.gradients()
    gradients = []
    for variable, direct in zip(
        model.trainable_variables, variable_gradients, strict=True
    ):
        with tf.device(run.pipeline.device_of(variable)):
            gradients.append(add(accumulated.get(id(variable)), direct))
    return gradients
