"""Evaluation with moving averages of the weights."""

import contextlib

import keras
import tensorflow as tf


class SwapAverages(keras.callbacks.SwapEMAWeights):
    """Evaluates with averages of the weights, which are given back after it.

    `keras.callbacks.SwapEMAWeights` swaps the two by adding and subtracting,
    which changes their last digits: training would go on from other numbers
    where there has been a validation than where there has been none.

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
    """Has the model use averages of its weights, if there are any.

    Args:
        model: `keras.Model`.

    Example:

    ```python
    with averaged(model):
        y = model(x, training=False)
    ```
    """
    # A model that has not been trained has none yet.
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
    """Returns the model's optimizer; a `LossScaleOptimizer` holds another."""
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)


def _swap(weight, average):
    with tf.device(weight.device):
        before = tf.identity(weight)
    weight.assign(average)
    average.assign(before)
