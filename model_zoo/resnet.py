"""Residual networks for images.

Source: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition",
CVPR 2016, https://arxiv.org/abs/1512.03385.
"""

import keras


@keras.saving.register_keras_serializable(package="model_zoo")
class ResidualBlock(keras.layers.Layer):
    """Two 3x3 convolutions with a shortcut around them.

    The basic block of the paper: convolution, batch normalisation, ReLU,
    convolution, batch normalisation, addition of the shortcut, ReLU. The
    shortcut is the identity, or a 1x1 convolution with batch normalisation
    where the block changes the number of channels or the resolution.

    Args:
        filters: Positive integer, the number of output channels.
        strides: Positive integer, by which height and width are divided.
            Defaults to `1`.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Input shape:
        `(batch_size, height, width, channels)`

    Output shape:
        `(batch_size, ceil(height / strides), ceil(width / strides), filters)`

    Example:

    ```python
    block = ResidualBlock(64, strides=2)
    block(keras.ops.ones((1, 8, 8, 32))).shape  # (1, 4, 4, 64)
    ```
    """

    def __init__(self, filters, strides=1, momentum=0.9, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.strides = strides
        self.momentum = momentum
        self.main_path = [
            _convolution(filters, 3, strides, name="conv_1"),
            _normalization(momentum, name="norm_1"),
            keras.layers.ReLU(name="relu_1"),
            _convolution(filters, 3, 1, name="conv_2"),
            _normalization(momentum, name="norm_2"),
        ]
        self.shortcut = []
        self.add = keras.layers.Add(name="add")
        self.relu = keras.layers.ReLU(name="relu_2")

    def build(self, input_shape):
        if self.strides != 1 or input_shape[-1] != self.filters:
            self.shortcut = [
                _convolution(self.filters, 1, self.strides, name="conv_0"),
                _normalization(self.momentum, name="norm_0"),
            ]
        output_shape = _build_chain(self.main_path, input_shape)
        _build_chain(self.shortcut, input_shape)
        self.add.build([output_shape, output_shape])
        self.relu.build(output_shape)

    def call(self, inputs, training=None):
        outputs = _call_chain(self.main_path, inputs, training)
        shortcut = _call_chain(self.shortcut, inputs, training)
        return self.relu(self.add([outputs, shortcut]))

    def compute_output_shape(self, input_shape):
        for layer in self.main_path:
            input_shape = layer.compute_output_shape(input_shape)
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "filters": self.filters,
            "strides": self.strides,
            "momentum": self.momentum,
        }


def resnet_small(
    num_classes=10,
    input_shape=(8, 8, 1),
    num_filters=32,
    num_blocks=4,
    momentum=0.9,
):
    """A small residual network for small images.

    A 3x3 convolution, then `num_blocks` residual blocks, then global average
    pooling and a dense layer that returns logits. The first half of the blocks
    works at full resolution with `num_filters` channels, the second half at
    half the resolution with twice the channels, so that every block costs
    about the same and a pipeline is easy to balance.

    Args:
        num_classes: Positive integer, the number of logits. Defaults to `10`.
        input_shape: Tuple `(height, width, channels)`. Defaults to
            `(8, 8, 1)`.
        num_filters: Positive integer, channels of the first half. Defaults to
            `32`.
        num_blocks: Positive integer, the number of residual blocks. Defaults
            to `4`.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`: Keras's own 0.99 needs
            thousands of steps to forget where it began.

    Returns:
        A list of Keras layers that begins with a `keras.layers.InputLayer`,
        mapping images `(batch_size, height, width, channels)` to logits
        `(batch_size, num_classes)`. The default has 170,794 parameters,
        169,834 of them trainable.

    Example:

    ```python
    model = keras.Sequential(resnet_small(num_classes=100))
    ```
    """
    layers = [
        keras.layers.InputLayer(shape=input_shape, name="image"),
        _convolution(num_filters, 3, 1, name="stem_conv"),
        _normalization(momentum, name="stem_norm"),
        keras.layers.ReLU(name="stem_relu"),
    ]
    num_full = (num_blocks + 1) // 2
    for index in range(num_blocks):
        layers.append(
            ResidualBlock(
                num_filters if index < num_full else 2 * num_filters,
                strides=2 if index == num_full else 1,
                momentum=momentum,
                name=f"block_{index + 1}",
            )
        )
    layers.append(keras.layers.GlobalAveragePooling2D(name="pool"))
    layers.append(keras.layers.Dense(num_classes, name="logits"))
    return layers


def _convolution(filters, size, strides, name):
    # No bias: the batch normalisation that follows has one.
    return keras.layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=name,
    )


def _normalization(momentum, name):
    return keras.layers.BatchNormalization(momentum=momentum, name=name)


def _build_chain(layers, shape):
    for layer in layers:
        layer.build(shape)
        shape = layer.compute_output_shape(shape)
    return shape


def _call_chain(layers, inputs, training):
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            inputs = layer(inputs, training=training)
        else:
            inputs = layer(inputs)
    return inputs
