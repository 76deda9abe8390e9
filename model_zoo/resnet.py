"""Residual networks for images.

Source: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition",
CVPR 2016, https://arxiv.org/abs/1512.03385.
"""

import keras

from model_zoo.chain import build_chain
from model_zoo.chain import call_chain

# The epsilon of the batch normalisations in `keras.applications.ResNet50`.
_RESNET_EPSILON = 1.001e-5


class _Residual(keras.layers.Layer):
    """A main path of layers with a shortcut around it, added, then ReLU.

    A subclass sets `main_path` and `relu`.
    """

    # For the convolution and the batch normalisation of a shortcut.
    use_bias = False
    epsilon = 1e-3

    def __init__(self, filters, strides, momentum, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.strides = strides
        self.momentum = momentum
        self.shortcut = []
        self.add = keras.layers.Add(name="add")

    def build(self, input_shape):
        output_shape = build_chain(self, self.main_path, input_shape)
        channels = output_shape[-1]
        if self.strides != 1 or input_shape[-1] != channels:
            self.shortcut = [
                _convolution(
                    channels, 1, self.strides, "conv_0", self.use_bias
                ),
                _normalization(self.momentum, self.epsilon, name="norm_0"),
            ]
        build_chain(self, self.shortcut, input_shape)
        build_chain(self, [self.add], [output_shape, output_shape])
        build_chain(self, [self.relu], output_shape)

    def call(self, inputs):
        outputs = call_chain(self.main_path, inputs)
        shortcut = call_chain(self.shortcut, inputs)
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


@keras.saving.register_keras_serializable(package="model_zoo")
class ResidualBlock(_Residual):
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
        super().__init__(filters, strides, momentum, **kwargs)
        self.main_path = [
            _convolution(filters, 3, strides, name="conv_1"),
            _normalization(momentum, name="norm_1"),
            keras.layers.ReLU(name="relu_1"),
            _convolution(filters, 3, 1, name="conv_2"),
            _normalization(momentum, name="norm_2"),
        ]
        self.relu = keras.layers.ReLU(name="relu_2")


@keras.saving.register_keras_serializable(package="model_zoo")
class BottleneckBlock(_Residual):
    """Convolutions 1x1, 3x3 and 1x1 with a shortcut around them.

    The bottleneck block of the paper: the first convolution reduces the
    channels, and the resolution if `strides` is not 1; the last one has four
    times as many channels. Each is followed by batch normalisation and ReLU,
    with the addition of the shortcut before the last ReLU. The shortcut is the
    identity, or a 1x1 convolution with batch normalisation if the block changes
    the number of channels or the resolution. As in
    `keras.applications.ResNet50`, the convolutions have biases.

    Args:
        filters: Positive integer, channels of the 3x3 convolution, a quarter
            of the output channels.
        strides: Positive integer, by which height and width are divided.
            Defaults to `1`.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Input shape:
        `(batch_size, height, width, channels)`

    Output shape:
        `(batch_size, ceil(height / strides), ceil(width / strides),
        4 * filters)`

    Example:

    ```python
    block = BottleneckBlock(64, strides=2)
    block(keras.ops.ones((1, 8, 8, 32))).shape  # (1, 4, 4, 256)
    ```
    """

    use_bias = True
    epsilon = _RESNET_EPSILON

    def __init__(self, filters, strides=1, momentum=0.9, **kwargs):
        super().__init__(filters, strides, momentum, **kwargs)
        self.main_path = [
            _convolution(filters, 1, strides, use_bias=True, name="conv_1"),
            _normalization(momentum, _RESNET_EPSILON, name="norm_1"),
            keras.layers.ReLU(name="relu_1"),
            _convolution(filters, 3, 1, use_bias=True, name="conv_2"),
            _normalization(momentum, _RESNET_EPSILON, name="norm_2"),
            keras.layers.ReLU(name="relu_2"),
            _convolution(4 * filters, 1, 1, use_bias=True, name="conv_3"),
            _normalization(momentum, _RESNET_EPSILON, name="norm_3"),
        ]
        self.relu = keras.layers.ReLU(name="relu_3")


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


def resnet50(
    num_classes=1000,
    input_shape=(224, 224, 3),
    num_filters=64,
    momentum=0.9,
):
    """ResNet-50, the residual network of 50 layers.

    A 7x7 convolution and a pooling layer, each halving the resolution, then
    four groups of 3, 4, 6 and 3 bottleneck blocks, then global average pooling
    and a dense layer that returns logits. Each group after the first halves
    the resolution and doubles the channels. With the same weights, its outputs
    are those of `keras.applications.ResNet50` with
    `classifier_activation=None`.

    Args:
        num_classes: Positive integer, the number of logits. Defaults to
            `1000`.
        input_shape: Tuple `(height, width, channels)`; of height and width
            any size, or `None`. Defaults to `(224, 224, 3)`.
        num_filters: Positive integer, channels of the first convolution, and
            of the 3x3 convolutions in the first group. Defaults to `64`.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`; `keras.applications` has 0.99.

    Returns:
        A list of Keras layers that begins with a `keras.layers.InputLayer`,
        mapping images `(batch_size, height, width, channels)` to logits
        `(batch_size, num_classes)`. The default has 25,636,712 parameters,
        25,583,592 of them trainable.

    Example:

    ```python
    layers = resnet50(num_classes=10, input_shape=(32, 32, 3))
    model = keras.Sequential(layers)
    ```
    """
    return _resnet(
        (3, 4, 6, 3), num_classes, input_shape, num_filters, momentum
    )


def resnet101(
    num_classes=1000,
    input_shape=(224, 224, 3),
    num_filters=64,
    momentum=0.9,
):
    """ResNet-101, the residual network of 101 layers.

    As `resnet50`, with 3, 4, 23 and 3 bottleneck blocks in the groups. With
    the same weights, its outputs are those of `keras.applications.ResNet101`
    with `classifier_activation=None`.

    Args:
        num_classes: Positive integer, the number of logits. Defaults to
            `1000`.
        input_shape: Tuple `(height, width, channels)`; of height and width
            any size, or `None`. Defaults to `(224, 224, 3)`.
        num_filters: Positive integer, channels of the first convolution, and
            of the 3x3 convolutions in the first group. Defaults to `64`.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`; `keras.applications` has 0.99.

    Returns:
        A list of Keras layers that begins with a `keras.layers.InputLayer`,
        mapping images `(batch_size, height, width, channels)` to logits
        `(batch_size, num_classes)`. The default has 44,707,176 parameters,
        44,601,832 of them trainable.

    Example:

    ```python
    layers = resnet101(num_classes=10, input_shape=(32, 32, 3))
    model = keras.Sequential(layers)
    ```
    """
    return _resnet(
        (3, 4, 23, 3), num_classes, input_shape, num_filters, momentum
    )


def _resnet(group_sizes, num_classes, input_shape, num_filters, momentum):
    layers = [
        keras.layers.InputLayer(shape=input_shape, name="image"),
        # Not `padding="same"`, which pads even sizes more on one side.
        keras.layers.ZeroPadding2D(3, name="stem_pad"),
        _convolution(
            num_filters,
            7,
            2,
            use_bias=True,
            padding="valid",
            name="stem_conv",
        ),
        _normalization(momentum, _RESNET_EPSILON, name="stem_norm"),
        keras.layers.ReLU(name="stem_relu"),
        keras.layers.ZeroPadding2D(1, name="stem_pool_pad"),
        keras.layers.MaxPooling2D(3, strides=2, name="stem_pool"),
    ]
    # The paper's names of the groups are conv2_x to conv5_x.
    for group, size in enumerate(group_sizes):
        for index in range(size):
            layers.append(
                BottleneckBlock(
                    num_filters * 2**group,
                    strides=2 if group > 0 and index == 0 else 1,
                    momentum=momentum,
                    name=f"conv{group + 2}_block{index + 1}",
                )
            )
    layers.append(keras.layers.GlobalAveragePooling2D(name="pool"))
    layers.append(keras.layers.Dense(num_classes, name="logits"))
    return layers


def _convolution(filters, size, strides, name, use_bias=False, padding="same"):
    # No bias by default: the batch normalisation that follows has one.
    return keras.layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding=padding,
        use_bias=use_bias,
        kernel_initializer="he_normal",
        name=name,
    )


def _normalization(momentum, epsilon=1e-3, *, name):
    return keras.layers.BatchNormalization(
        momentum=momentum, epsilon=epsilon, name=name
    )
