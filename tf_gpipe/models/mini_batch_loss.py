"""The loss of a mini-batch and its gradients, for Keras's training step.

Two orders, by the schedule:

    all forward passes first        F F F F  loss  B B B B
    forward and backward mixed      F F FL BF LB BL B LB ...

In the first one the loss is that of the whole mini-batch, whatever it is. In
the second one each micro-batch has a loss (L), whose sum is that of the
mini-batch.
"""

from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.gradients import add
from tf_gpipe.stage.stage import Activations
from tf_gpipe.step.engine import MiniBatch
from tf_gpipe.step.loss import MicroBatchLoss

# The loss, the gradient of each trainable variable, and the outputs.
LossAndGradients = tuple[tf.Tensor, list[Any], Any]


def of_call(model: Any, x: Any, y: Any, sample_weight: Any) -> LossAndGradients:
    """As Keras's own step: whatever `call` does around the pipeline.

    Args:
        model: A pipeline.
        x: Inputs of the mini-batch.
        y: Labels.
        sample_weight: Sample weights, or `None`.

    Returns:
        A tuple: a scalar; the list of the gradients of trainable variables;
        the outputs.
    """
    with tf.GradientTape() as tape:
        y_pred = model(x, training=True)
        loss = model._compute_loss(x, y, y_pred, sample_weight)
        scaled = model._scale_loss(loss)
    return loss, tape.gradient(scaled, model.trainable_variables), y_pred


def after_all_forwards(
    model: Any, run: MiniBatch, x: Any, y: Any, sample_weight: Any
) -> LossAndGradients:
    """Loss of the whole mini-batch: exact whatever the loss is.

    Args:
        model: A pipeline.
        run: Its mini-batch, of which no task has run.
        x: Inputs of the mini-batch.
        y: Labels.
        sample_weight: Sample weights, or `None`.

    Returns:
        As `of_call`.
    """
    run.forward(tape=True)
    outputs, added = run.outputs(), run.losses()
    parts = outputs.parts()
    with tf.device(run.pipeline.stages[-1].device):
        with tf.GradientTape() as tape:
            tape.watch([x for x in parts if x.dtype.is_floating] + added)
            y_pred = outputs.unpack()
            # What `losses` returns meanwhile, to Keras or to an override of
            # `compute_loss`.
            model._losses_override = added + model._get_regularization_losses()
            try:
                loss = model._compute_loss(x, y, y_pred, sample_weight)
            finally:
                model._losses_override = []
            scaled = model._scale_loss(loss)
        by_output, by_added, by_variable = tape.gradient(
            scaled, (parts, added, model.trainable_variables)
        )
    by_added = [
        tf.zeros_like(x) if gradient is None else gradient
        for x, gradient in zip(added, by_added, strict=True)
    ]
    run.backward(by_output, by_added)
    run.commit_state()
    return loss, _gradients(model, run, by_variable), y_pred


def by_micro_batch(
    model: Any, run: MiniBatch, y: Any, sample_weight: Any
) -> LossAndGradients:
    """Loss and gradient of each micro-batch in its backward task.

    Args:
        model: A pipeline.
        run: Its mini-batch, of which no task has run.
        y: Labels of the mini-batch.
        sample_weight: Sample weights, or `None`.

    Returns:
        As `of_call`.

    Raises:
        ValueError: If there is no loss.
    """
    split = run.split
    # What gradients are scaled by: those of the losses given to `compile` and,
    # as Keras does, those of all others also over replicas.
    scale = model._scale_loss(tf.ones(()))
    added_scale = upstream.scaled_for_replicas(scale)

    def make_loss(outputs: Any, m: Any) -> MicroBatchLoss:
        return MicroBatchLoss(
            model._compile_loss,
            y,
            _like_outputs(run, outputs, m),
            sample_weight,
            scale,
            split.static_rows,
            model.trainable_variables,
        )

    parts = run.interleave(
        make_loss,
        lambda m: (
            split.take_of_outputs(y, m),
            split.take_of_outputs(sample_weight, m),
            split.valid(m),
            split.weight(m),
        ),
        added_scale,
    )
    if model._compile_loss is None and not (
        run.losses() or model._get_regularization_losses()
    ):
        # As Keras does, which there is nothing to ask here.
        raise ValueError(
            "No loss to compute. Provide a `loss` argument in `compile()`."
        )
    # One message a loss where that stage is on another host.
    with tf.device(run.pipeline.stages[-1].device):
        total, *of_each = [tf.add_n(list(x)) for x in zip(*parts, strict=True)]
    with tf.GradientTape() as tape:
        penalties = model._get_regularization_losses()
        scaled = [tf.cast(added_scale, x.dtype) * x for x in penalties]
    by_variable = tape.gradient(scaled, model.trainable_variables)
    added = [
        tf.cast(upstream.scaled_for_replicas(x), total.dtype)
        for x in [*run.losses(), *penalties]
    ]
    loss = tf.add_n([total, *added])
    run.commit_state()
    y_pred = run.outputs().unpack()
    # Those that Keras keeps of several losses, where outputs are several, too.
    metrics = model._compile_loss.metrics if model._compile_loss else []
    if not any(map(keras.tree.is_nested, (y, y_pred))):
        metrics = []
    for metric, value in zip(metrics, of_each, strict=False):
        metric.update_state(
            upstream.unscaled_for_replicas(value),
            sample_weight=split.static_rows,
        )
    return loss, _gradients(model, run, by_variable), y_pred


def penalty(variable: keras.Variable, device: str) -> tf.Tensor:
    """Returns a regularisation loss, computed where the variable lives."""

    @tf.custom_gradient
    def of_value(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
        with tf.device(device), tf.GradientTape() as tape:
            tape.watch(value)
            loss = variable.regularizer(value)

        def gradient(by_loss: tf.Tensor) -> tf.Tensor:
            with tf.device(device):
                return tape.gradient(loss, value, output_gradients=by_loss)

        return loss, gradient

    with tf.device(device):
        return of_value(tf.convert_to_tensor(variable.value))


def _gradients(model: Any, run: MiniBatch, by_variable: list[Any]) -> list[Any]:
    """Adds gradients that did not come through the pipeline."""
    accumulated = run.gradients()
    times = run.times()
    if times is not None:
        model._record_times(times, run.pipeline)
    gradients = []
    for variable, direct in zip(
        model.trainable_variables, by_variable, strict=True
    ):
        with tf.device(run.pipeline.device_of(variable)):
            gradients.append(add(accumulated.get(id(variable)), direct))
    return gradients


def _like_outputs(run: MiniBatch, outputs: Any, m: Any) -> Any:
    """Returns tensors like the mini-batch's outputs, with their masks."""
    masks = outputs.masks
    if any(x is not None for x in keras.tree.flatten(masks)):
        masks = run.masks()
    like = run.like_outputs(outputs.tensors, m)
    return Activations.of(like)._replace(masks=masks).unpack()
