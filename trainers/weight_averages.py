"""Evaluation with moving averages of the weights."""

import contextlib

import keras
import tensorflow as tf


class SwapAverages(keras.callbacks.SwapEMAWeights):
    """Swaps weights and their averages during evaluations.

    `keras.callbacks.SwapEMAWeights` swaps the two by adding and subtracting,
    which changes their last digits, so that a run with validations would train
    to other weights than one without.

    Example:

    ```python
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")
    model.fit(x, y, validation_data=(x, y), callbacks=[SwapAverages()])
    ```
    """

    def _tf_swap_variables(self, optimizer):
        for weight, average in zip(
            optimizer._trainable_variables,
            optimizer._model_variables_moving_average,
            strict=True,
        ):
            optimizer._distribution_strategy.extended.update(
                weight.value, _swap, args=(average.value,)
            )


@contextlib.contextmanager
def averaged(model):
    """A scope in which a model uses averages of its weights, if any.

    Args:
        model: `keras.Model`.

    Example:

    ```python
    with averaged(model):
        y = model(x, training=False)
    ```
    """
    # A model that has not been trained has no averages yet.
    if not (has_averages(model) and model.optimizer.built):
        yield
        return
    swap = SwapAverages()
    swap.set_model(model)
    swap.on_test_begin()
    try:
        yield
    finally:
        swap.on_test_end()


def has_averages(model):
    """Returns whether the model's optimizer averages its weights."""
    return getattr(inner_optimizer(model), "use_ema", False)


def inner_optimizer(model):
    """Returns the model's optimizer, or the one in a `LossScaleOptimizer`."""
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)


def _swap(weight, average):
    with tf.device(weight.device):
        before = tf.identity(weight)
    weight.assign(average)
    average.assign(before)
