"""Trains a pipeline and the plain model alike, and compares everything."""

import keras
import numpy as np

import tf_gpipe


def train(
    make,
    data,
    *,
    loss,
    loss_weights=None,
    optimizer=None,
    metrics=(),
    epochs=2,
    **kwargs,
):
    """Builds and trains a model; with `num_stages`, a pipeline.

    Args:
        make: Function that returns a list of new layers, or a new functional
            model.
        data: List of batches for `train_on_batch`, each a tuple.
        loss: What `compile` takes.
        loss_weights: What `compile` takes.
        optimizer: Function that makes an optimizer.
        metrics: List of metrics.
        epochs: Integer, how often to go through `data`.
        **kwargs: Arguments of `PipelinedSequential`, or `PipelinedModel`.

    Returns:
        Tuple of the model and the list of logs, one a step.
    """
    keras.utils.set_random_seed(1)
    model = make()
    if isinstance(model, keras.Model):
        if kwargs:
            model = tf_gpipe.PipelinedModel.from_model(model, **kwargs)
    elif kwargs:
        model = tf_gpipe.PipelinedSequential(model, **kwargs)
    else:
        model = keras.Sequential(model)
    optimizer = optimizer() if optimizer else keras.optimizers.Adam(0.01)
    model.compile(
        optimizer,
        loss,
        loss_weights=loss_weights,
        weighted_metrics=list(metrics),
    )
    if not kwargs:
        # Keras traces a step that makes an optimizer's variables twice.
        model.optimizer.build(model.trainable_variables)
    logs = []
    for _ in range(epochs):
        for x, y, *weight in data:
            logs.append(model.train_on_batch(x, y, *weight, return_dict=True))
    return model, logs


def assert_same(test, plain, pipelined, rtol=2e-5, atol=2e-6):
    """Compares models and logs as `train` returns them, per variable."""
    (model, logs), (other, other_logs) = plain, pipelined
    for step, (expected, received) in enumerate(
        zip(logs, other_logs, strict=True)
    ):
        test.assertEqual(set(expected), set(received))
        for name in expected:
            np.testing.assert_allclose(
                received[name],
                expected[name],
                rtol=rtol,
                atol=atol,
                err_msg=f"{name} of step {step}",
            )
    for kind, ours, theirs in (
        ("variable", other.variables, model.variables),
        ("slot", other.optimizer.variables, model.optimizer.variables),
    ):
        test.assertLen(ours, len(theirs))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(
                np.asarray(a, dtype="float64"),
                np.asarray(b, dtype="float64"),
                rtol=rtol,
                atol=atol,
                err_msg=f"{kind} {b.path}",
            )
