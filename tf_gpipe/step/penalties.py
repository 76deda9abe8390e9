"""Penalties of weights: the losses of regularisers."""

from typing import Any

import keras
import tensorflow as tf


def of_weight(variable: keras.Variable, device: str) -> tf.Tensor:
    """Returns the loss of a weight's regulariser, computed on its device."""

    @tf.custom_gradient
    def of_value(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
        with tf.device(device), tf.GradientTape(persistent=True) as tape:
            tape.watch(value)
            loss = variable.regularizer(value)

        # TensorFlow gives it the trainable variables that the regulariser has
        # read, if there are any.
        def gradient(by_loss: tf.Tensor, variables: Any = None) -> Any:
            with tf.device(device):
                by_value, by_variables = tape.gradient(
                    loss, (value, variables or []), output_gradients=by_loss
                )
            return by_value if variables is None else (by_value, by_variables)

        return loss, gradient

    with tf.device(device):
        return of_value(tf.convert_to_tensor(variable.value))
