"""Trains a pipeline and the plain model alike, and compares them."""

import collections
import pickle

import keras
import numpy as np

import tf_gpipe


def model_of(made, **kwargs):
    """Returns a pipeline of a list of layers, or of a functional model.

    Without arguments of a pipeline, the plain model.
    """
    if isinstance(made, keras.Model):
        if not kwargs:
            return made
        return tf_gpipe.PipelinedModel.from_model(made, **kwargs)
    if not kwargs:
        return keras.Sequential(made)
    return tf_gpipe.PipelinedSequential(made, **kwargs)


def train(
    make,
    data,
    *,
    loss,
    loss_weights=None,
    optimizer=None,
    metrics=(),
    epochs=2,
    run_eagerly=False,
    **kwargs,
):
    """Builds and trains a model; with `kwargs`, a pipeline.

    Args:
        make: Function that returns a list of new layers, or a new functional
            model.
        data: List of batches for `train_on_batch`, each a tuple.
        loss: Argument of `compile`.
        loss_weights: Argument of `compile`.
        optimizer: Function that makes an optimizer; by default Adam.
        metrics: List of weighted metrics.
        epochs: Integer, how often to go through `data`.
        run_eagerly: Argument of `compile`.
        **kwargs: Arguments of `PipelinedSequential`, or `PipelinedModel`.

    Returns:
        Tuple of the model and the list of the logs of each step.
    """
    keras.utils.set_random_seed(1)
    model = model_of(make(), **kwargs)
    optimizer = optimizer() if optimizer else keras.optimizers.Adam(0.01)
    model.compile(
        optimizer,
        loss,
        loss_weights=loss_weights,
        weighted_metrics=list(metrics),
        run_eagerly=run_eagerly,
    )
    if not kwargs:
        # Else the first step makes these variables, and Keras traces it twice.
        model.optimizer.build(model.trainable_variables)
    logs = []
    for _ in range(epochs):
        for x, y, *weight in data:
            logs.append(model.train_on_batch(x, y, *weight, return_dict=True))
    return model, logs


# The newest results of `train_plain`, with their arguments.
_PLAIN: collections.OrderedDict = collections.OrderedDict()
_NUM_PLAIN = 8


def train_plain(make, data, **kwargs):
    """Trains the plain model, once for all cells of a grid.

    It is for tests that leave the model as it is.

    Args:
        make: As in `train`.
        data: As in `train`.
        **kwargs: As in `train`, without arguments of pipelines.

    Returns:
        What `train` returns.
    """
    arrays = pickle.dumps(data)
    key = (make, arrays, tuple((k, id(v)) for k, v in sorted(kwargs.items())))
    if key not in _PLAIN:
        # Holds the arguments, so that no other objects get their ids.
        _PLAIN[key] = (train(make, data, **kwargs), kwargs)
        if len(_PLAIN) > _NUM_PLAIN:
            _PLAIN.popitem(last=False)
    return _PLAIN[key][0]


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
            dtype = "complex128" if "complex" in b.dtype else "float64"
            np.testing.assert_allclose(
                np.asarray(a, dtype=dtype),
                np.asarray(b, dtype=dtype),
                rtol=rtol,
                atol=atol,
                err_msg=f"{kind} {b.path}",
            )
