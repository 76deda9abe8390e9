"""U-Nets: networks for image segmentation with long skip connections.

Source: Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for
Biomedical Image Segmentation", MICCAI 2015, https://arxiv.org/abs/1505.04597.
The sizes are those of the U-Net (B, C) of torchgpipe (Kim et al., 2020,
https://arxiv.org/abs/2004.09910), which measures pipelines with it.
"""

import keras


def unet(
    num_blocks=5,
    num_filters=64,
    num_classes=1,
    input_shape=(192, 192, 3),
    depth=5,
    dropout=0.0,
    momentum=0.9,
):
    """A U-Net for segmentation, the U-Net (B, C) of torchgpipe.

    On each of `depth` levels, the encoder has B blocks of a 3x3 convolution,
    batch normalisation and a leaky ReLU, then halves the resolution. B more
    blocks are at the bottom. On each level upwards, the decoder doubles the
    resolution, appends the output of the encoder's blocks on that level (the
    skip connection), and has B blocks. Level `i` of the encoder, from 0, has
    `C * 2**i` channels and that of the decoder half as many; the bottom has
    `C * 2**depth`, in its last block half as many. The logits are a 1x1
    convolution.

    Two things differ from torchgpipe's model: batch normalisation is in place
    of instance normalisation without parameters, and the logits have a bias.
    So there are slightly more parameters, by at most 0.05 % in the sizes below.

    Args:
        num_blocks: Positive integer B, blocks of a level of the encoder or the
            decoder. Defaults to `5`.
        num_filters: Integer C of at least 2, channels of the encoder's first
            level. Defaults to `64`.
        num_classes: Positive integer, logits of a pixel. Defaults to `1`.
        input_shape: Tuple `(height, width, channels)`. Height and width are
            multiples of `2**depth`, or `None` for any such multiple; then it
            is checked when the model is called. Defaults to `(192, 192, 3)`.
        depth: Positive integer, how often the resolution is halved. Defaults
            to `5`.
        dropout: Float, rate at which a block drops channels, between the
            convolution and the normalisation. torchgpipe has 0.1. Defaults to
            `0.0`.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`.

    Returns:
        A functional `keras.Model` of Keras's own layers, mapping images
        `(batch_size, height, width, channels)` to logits `(batch_size, height,
        width, num_classes)`. (B, C) of (5, 64), (6, 72), (11, 128), (24, 160)
        and (48, 160) have 232.8 million, 362.3 million, 2.21 billion, 7.80
        billion and 15.82 billion parameters, the other arguments being the
        defaults.

    Raises:
        ValueError: If a size is too small, or the height or width of
            `input_shape` is not a multiple of `2**depth`.
        RecursionError: If there are more layers in a row than Keras can walk
            through within Python's recursion limit: with the default `depth`
            from about 30 blocks on, with dropout 22. Call
            `sys.setrecursionlimit` first, also before loading such a model.

    Example:

    ```python
    model = unet(2, 8, num_classes=3, input_shape=(32, 32, 1), depth=2)
    model(keras.ops.ones((4, 32, 32, 1))).shape  # (4, 32, 32, 3)
    ```
    """
    if num_blocks < 1 or num_filters < 2 or depth < 1:
        raise ValueError(
            "`num_blocks` and `depth` must be at least 1, `num_filters` at "
            f"least 2. Received: num_blocks={num_blocks}, depth={depth}, "
            f"num_filters={num_filters}"
        )
    if len(input_shape) != 3 or any(
        size is not None and size % 2**depth for size in input_shape[:2]
    ):
        raise ValueError(
            "`input_shape` must be `(height, width, channels)`, height and "
            f"width multiples of 2**depth = {2**depth} or `None`. Received: "
            f"input_shape={input_shape}, depth={depth}"
        )

    def blocks(x, widths, name):
        return _blocks(x, widths, dropout, momentum, name)

    image = keras.Input(input_shape, name="image")
    x = image
    skips = []
    for level in range(depth):
        name = f"encoder_{level + 1}"
        x = blocks(x, [num_filters * 2**level] * num_blocks, name)
        skips.append(x)
        x = keras.layers.MaxPooling2D(2, name=f"{name}_pool")(x)

    widest = num_filters * 2**depth
    x = blocks(x, [widest] * (num_blocks - 1) + [widest // 2], "bottom")

    for level in reversed(range(depth)):
        name = f"decoder_{level + 1}"
        x = keras.layers.UpSampling2D(2, name=f"{name}_upsample")(x)
        x = keras.layers.Concatenate(name=f"{name}_skip")([x, skips[level]])
        x = blocks(x, [num_filters * 2**level // 2] * num_blocks, name)

    logits = keras.layers.Conv2D(num_classes, 1, name="logits")(x)
    try:
        return keras.Model(image, logits, name="unet")
    except RecursionError:
        # Without Keras's traceback, which has an entry for each layer.
        raise RecursionError(
            "Keras walks through the layers of a model by recursion. For as "
            "many as here, let Python recur deeper, for example with "
            "`sys.setrecursionlimit(10_000)`. Received: "
            f"num_blocks={num_blocks}, depth={depth}"
        ) from None


def _blocks(x, widths, dropout, momentum, name):
    for index, filters in enumerate(widths, start=1):
        x = keras.layers.Conv2D(
            filters,
            3,
            padding="same",
            # The batch normalisation that follows has a bias.
            use_bias=False,
            kernel_initializer="he_normal",
            name=f"{name}_conv_{index}",
        )(x)
        if dropout:
            x = keras.layers.SpatialDropout2D(
                dropout, name=f"{name}_drop_{index}"
            )(x)
        x = keras.layers.BatchNormalization(
            momentum=momentum, name=f"{name}_norm_{index}"
        )(x)
        x = keras.layers.LeakyReLU(0.01, name=f"{name}_relu_{index}")(x)
    return x
