"""AmoebaNet-D, an image classifier with cells found by evolution.

Sources: Real, Aggarwal, Huang and Le, "Regularized Evolution for Image
Classifier Architecture Search", AAAI 2019, https://arxiv.org/abs/1802.01548.
Cells, heads and activations are wired as in TensorFlow's implementation
(tensorflow/tpu, models/official/amoeba_net). The stem has the filters of
torchgpipe's (kakaobrain/torchgpipe, benchmarks/models/amoebanet), with which
the numbers of parameters of Huang et al., "GPipe", 2019,
https://arxiv.org/abs/1811.06965, Table 1, come out.
"""

import keras

from model_zoo.amoebanet_cells import AmoebaNetCell
from model_zoo.amoebanet_cells import convolution
from model_zoo.amoebanet_cells import normalization
from model_zoo.amoebanet_cells import state_shapes
from model_zoo.chain import build_chain
from model_zoo.chain import call_chain


@keras.saving.register_keras_serializable(package="model_zoo")
class AuxiliaryHead(keras.layers.Layer):
    """Computes logits in the middle of a network, and passes its inputs on.

    ReLU, average pooling of 5x5 pixels with strides 3, a 1x1 convolution to
    128 channels, a convolution to 768 channels whose kernel covers the whole
    image, both with batch normalisation and ReLU; and a dense layer.

    Args:
        num_classes: Positive integer, the number of logits.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Input shape:
        A tuple of shapes, the first one `(batch_size, height, width,
        channels)`, height and width known.

    Output shape:
        The same tuple, and `(batch_size, num_classes)` at its end.

    Example:

    ```python
    x = keras.ops.ones((1, 8, 8, 3))
    x, previous, aux_logits = AuxiliaryHead(10)((x, x))
    aux_logits.shape  # (1, 10)
    ```
    """

    def __init__(self, num_classes, momentum=0.9, **kwargs):
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.momentum = momentum

    def build(self, input_shape):
        shape = input_shape[0]
        if None in shape[1:3]:
            raise ValueError(
                "An auxiliary head needs to know height and width of its "
                f"inputs. Received: input_shape={input_shape}"
            )
        head = [
            keras.layers.ReLU(name="relu"),
            keras.layers.AveragePooling2D(
                [min(5, size) for size in shape[1:3]], strides=3, name="pool"
            ),
            convolution(128, 1, 1, name="conv_1"),
            normalization(self.momentum, name="norm_1"),
            keras.layers.ReLU(name="relu_1"),
        ]
        left = build_chain(self, head, shape)
        tail = [
            convolution(768, left[1:3], 1, name="conv_2", padding="valid"),
            normalization(self.momentum, name="norm_2"),
            keras.layers.ReLU(name="relu_2"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(self.num_classes, name="logits"),
        ]
        build_chain(self, tail, left)
        self.chain = [*head, *tail]

    def call(self, inputs):
        return (*inputs, call_chain(self.chain, inputs[0]))

    def compute_output_shape(self, input_shape):
        shapes = state_shapes(input_shape)
        return (*shapes, (shapes[0][0], self.num_classes))

    def get_config(self):
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "momentum": self.momentum,
        }


@keras.saving.register_keras_serializable(package="model_zoo")
class Classifier(keras.layers.Layer):
    """ReLU, global average pooling, dropout and a dense layer.

    Args:
        num_classes: Positive integer, the number of logits.
        dropout: Float, rate of dropout. Defaults to `0.0`.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Input shape:
        A tuple of the shapes of x, `(batch_size, height, width, channels)`;
        of `previous`, which is not used; and, if there is an `AuxiliaryHead`,
        of its logits.

    Output shape:
        `(batch_size, num_classes)`. With logits of an auxiliary head, a
        dictionary of two shapes, `"logits"` and `"aux_logits"`.

    Example:

    ```python
    x = keras.ops.ones((1, 8, 8, 3))
    Classifier(10)((x, x)).shape  # (1, 10)
    ```
    """

    def __init__(self, num_classes, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.dropout = dropout
        self.chain = [
            keras.layers.ReLU(name="relu"),
            keras.layers.GlobalAveragePooling2D(name="pool"),
            keras.layers.Dropout(dropout, name="drop"),
            keras.layers.Dense(num_classes, name="logits"),
        ]

    def build(self, input_shape):
        build_chain(self, self.chain, input_shape[0])

    def call(self, inputs):
        x, _, *aux_logits = inputs
        return _outputs(call_chain(self.chain, x), aux_logits)

    def compute_output_shape(self, input_shape):
        x, _, *aux_logits = state_shapes(input_shape)
        return _outputs((x[0], self.num_classes), aux_logits)

    def get_config(self):
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "dropout": self.dropout,
        }


def amoebanet_d(
    num_layers=18,
    num_filters=256,
    num_classes=1000,
    input_shape=(224, 224, 3),
    num_stem_reductions=3,
    aux_head=False,
    dropout=0.0,
    drop_path=0.0,
    momentum=0.9,
):
    """AmoebaNet-D (L, D) of the GPipe paper.

    A stem that makes images smaller; three groups of L / 3 normal cells, with
    a reduction cell between two groups; global average pooling, and a dense
    layer that returns logits. Cells have D filters in the first group, and
    twice as many after each reduction cell.

    A cell returns a tuple of its output and its input: the next cell takes
    both. A pipeline can be cut anywhere in the list.

    Args:
        num_layers: Positive multiple of 3, the number L of normal cells.
            Defaults to `18`.
        num_filters: Positive integer D, a multiple of 4 with the default
            stem. Defaults to `256`.
        num_classes: Positive integer, the number of logits. Defaults to
            `1000`.
        input_shape: Tuple `(height, width, channels)`; height and width may
            be `None`, for any size. Defaults to `(224, 224, 3)`.
        num_stem_reductions: Integer, how often the stem halves height and
            width: the first time by the strides of its convolution, then by
            reduction cells. The three groups have 1, 1/2 and 1/4 of the
            stem's output resolution. Use `0` for images of some 8 to 32
            pixels, such as digits or CIFAR, `1` for 64. Defaults to `3`, for
            ImageNet.
        aux_head: Boolean, whether the last cell of the second group has an
            `AuxiliaryHead`. The model then returns a dictionary of `"logits"`
            and `"aux_logits"`, in training and in inference; the weight of
            the second loss in the source is 0.4. Defaults to `False`.
        dropout: Float, rate of dropout before the last layer. Defaults to
            `0.0`.
        drop_path: Float, rate at which an operation of the last cell is left
            out for an image in training; it grows linearly from cell to cell.
            Defaults to `0.0`.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`: Keras's own 0.99 needs
            thousands of steps to forget where it began.

    Returns:
        A list of Keras layers that begins with a `keras.layers.InputLayer`,
        mapping images `(batch_size, height, width, channels)` to logits
        `(batch_size, num_classes)`, or to a dictionary of two such tensors.
        With 1000 classes and images of 3 channels, (L, D) of (18, 208),
        (18, 416), (18, 544), (36, 544) and (72, 512) have 81.5 million, 319.0
        million, 542.7 million, 1.06 billion and 1.84 billion trainable
        parameters.

    Raises:
        ValueError: If `num_layers` is no positive multiple of 3,
            `num_filters` cannot be halved for the cells of the stem,
            `num_stem_reductions` is negative, or `input_shape` has not three
            elements.

    Examples:

    ```python
    layers = amoebanet_d(3, 16, 10, (8, 8, 1), num_stem_reductions=0)
    model = keras.Sequential(layers)
    ```

    With the auxiliary head:

    ```python
    layers = amoebanet_d(3, 16, 10, (32, 32, 3), 0, aux_head=True)
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        "rmsprop",
        loss={"logits": loss, "aux_logits": loss},
        loss_weights={"logits": 1.0, "aux_logits": 0.4},
    )
    x, y = keras.ops.ones((2, 32, 32, 3)), keras.ops.ones((2,), "int32")
    model.fit(x, {"logits": y, "aux_logits": y})
    ```
    """
    if num_layers < 1 or num_layers % 3:
        raise ValueError(
            "`num_layers` must be a positive multiple of 3, for three groups "
            f"of cells. Received: num_layers={num_layers}"
        )
    if num_stem_reductions < 0:
        raise ValueError(
            "`num_stem_reductions` must not be negative. Received: "
            f"num_stem_reductions={num_stem_reductions}"
        )
    num_stem_cells = max(0, num_stem_reductions - 1)
    if num_filters < 1 or num_filters % 2**num_stem_cells:
        raise ValueError(
            f"`num_filters` must be a positive multiple of {2**num_stem_cells} "
            f"for a stem of {num_stem_reductions} reductions. Received: "
            f"num_filters={num_filters}"
        )
    if len(input_shape) != 3:
        raise ValueError(
            "`input_shape` must be `(height, width, channels)`. Received: "
            f"input_shape={input_shape}"
        )

    group = [False] * (num_layers // 3)
    reductions = [
        *[True] * num_stem_cells,
        *group,
        True,
        *group,
        True,
        *group,
    ]
    filters = num_filters // 2**num_stem_cells
    layers = [
        keras.layers.InputLayer(shape=input_shape, name="image"),
        convolution(
            filters, 3, 2 if num_stem_reductions else 1, name="stem_conv"
        ),
        normalization(momentum, name="stem_norm"),
    ]
    for index, reduction in enumerate(reductions):
        if reduction:
            filters *= 2
        layers.append(
            AmoebaNetCell(
                filters,
                reduction,
                reduce_previous=index > 0 and reductions[index - 1],
                drop_path=drop_path * (index + 1) / len(reductions),
                momentum=momentum,
                name=f"cell_{index + 1}",
            )
        )
    if aux_head:
        # Before the last group and its reduction cell.
        layers.insert(
            -len(group) - 1,
            AuxiliaryHead(num_classes, momentum, name="aux_head"),
        )
    layers.append(Classifier(num_classes, dropout, name="classifier"))
    return layers


def _outputs(logits, aux_logits):
    if not aux_logits:
        return logits
    return {"logits": logits, "aux_logits": aux_logits[0]}
