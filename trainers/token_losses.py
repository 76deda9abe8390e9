"""Loss and metrics of models that predict the next token."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="trainers")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy with smoothed labels, which are given as integers.

    Of each label, a share `label_smoothing` is spread evenly over all classes.
    There is one value a token. Tokens masked by the Keras mask of the logits
    are not counted.

    Args:
        label_smoothing: Float in [0, 1]. Defaults to `0.1`.
        reduction: As of `keras.losses.Loss`.
        name: String.
        dtype: As of `keras.losses.Loss`.

    Example:

    ```python
    loss = SmoothedCrossentropy(0.1)
    # One text of two tokens, of a vocabulary of three.
    loss([[2, 1]], [[[0.0, 0.0, 5.0], [0.0, 5.0, 0.0]]])
    ```
    """

    def __init__(
        self,
        label_smoothing=0.1,
        reduction="sum_over_batch_size",
        name="smoothed_crossentropy",
        dtype=None,
    ):
        if not 0 <= label_smoothing <= 1:
            raise ValueError(
                "`label_smoothing` must be between 0 and 1. Received: "
                f"label_smoothing={label_smoothing}"
            )
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.label_smoothing = label_smoothing

    def call(self, y_true, y_pred):
        # One-hot labels are faster than a gather of the labels' logits and a
        # mean over the classes.
        y_true = ops.one_hot(
            ops.cast(y_true, "int32"), y_pred.shape[-1], dtype=y_pred.dtype
        )
        return keras.losses.categorical_crossentropy(
            y_true,
            y_pred,
            from_logits=True,
            label_smoothing=self.label_smoothing,
        )

    def get_config(self):
        return {
            **super().get_config(),
            "label_smoothing": self.label_smoothing,
        }


@keras.saving.register_keras_serializable(package="trainers")
class TokenMean(keras.metrics.MeanMetricWrapper):
    """Mean over tokens of a function's values.

    Keras's own metrics take a mean over each text first, so that a token of a
    long batch counts less than one of a short batch. Here all tokens have the
    same weight, except those masked by the Keras mask of the predictions, which
    are not counted.

    Args:
        fn: Function of labels `(batch_size, length)` and predictions
            `(batch_size, length, ...)` that returns values of the shape of
            the labels.
        name: String.
        dtype: As of `keras.metrics.Metric`.
        **kwargs: Other arguments of `fn`.

    Example:

    ```python
    TokenMean(keras.metrics.sparse_categorical_accuracy, name="accuracy")
    ```
    """

    def update_state(self, y_true, y_pred, sample_weight=None):
        mask = getattr(y_pred, "_keras_mask", None)
        values = self._fn(y_true, y_pred, **self._fn_kwargs)
        weights = ops.ones_like(values)
        if sample_weight is not None:
            weights *= ops.cast(sample_weight, weights.dtype)
        if mask is not None:
            weights *= ops.cast(mask, weights.dtype)
        keras.metrics.Mean.update_state(
            self, ops.reshape(values, [-1]), ops.reshape(weights, [-1])
        )


def token_metrics():
    """Returns the metrics `cross_entropy`, unsmoothed, and `accuracy`."""
    return [
        TokenMean(
            keras.losses.sparse_categorical_crossentropy,
            name="cross_entropy",
            from_logits=True,
        ),
        TokenMean(keras.metrics.sparse_categorical_accuracy, name="accuracy"),
    ]
