"""The cells of AmoebaNet-D, found by evolution.

Sources: see `model_zoo.amoebanet`.
"""

import keras
from keras import ops

from model_zoo.chain import build_chain
from model_zoo.chain import call_chain

# A cell computes numbered states: 0 is its input, 1 the input of the previous
# cell, both projected to its number of filters. Each following one is the sum
# of two operations. These are listed in pairs, each with the number of the
# state that is its input.
_NORMAL = (
    ("conv_1x1", 1),
    ("max_pool_3x3", 1),
    ("none", 1),
    ("conv_1x7_7x1", 0),
    ("conv_1x1", 0),
    ("conv_1x7_7x1", 0),
    ("max_pool_3x3", 2),
    ("none", 2),
    ("avg_pool_3x3", 1),
    ("conv_1x1", 5),
)
_REDUCTION = (
    ("max_pool_2x2", 0),
    ("max_pool_3x3", 0),
    ("none", 2),
    ("conv_3x3", 1),
    ("conv_1x7_7x1", 2),
    ("max_pool_3x3", 2),
    ("none", 3),
    ("max_pool_2x2", 1),
    ("avg_pool_3x3", 2),
    ("conv_1x1", 3),
)
# The states that are concatenated. (The paper draws 4, 5 and 6 for the normal
# cell; the implementation, and the numbers of parameters, have these.)
_NORMAL_OUTPUTS = (0, 3, 4, 6)
_REDUCTION_OUTPUTS = (4, 5, 6)


@keras.saving.register_keras_serializable(package="model_zoo")
class FactorizedReduction(keras.layers.Layer):
    """Halves height and width, and sets the number of channels.

    ReLU, then two 1x1 convolutions with strides 2, the second one shifted by
    a pixel down and to the right, each for half of the filters; then batch
    normalisation.

    Args:
        filters: Positive integer, the number of output channels.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Input shape:
        `(batch_size, height, width, channels)`

    Output shape:
        `(batch_size, ceil(height / 2), ceil(width / 2), filters)`

    Example:

    ```python
    reduction = FactorizedReduction(16)
    reduction(keras.ops.ones((1, 7, 8, 4))).shape  # (1, 4, 4, 16)
    ```
    """

    def __init__(self, filters, momentum=0.9, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.momentum = momentum
        self.relu = keras.layers.ReLU(name="relu")
        self.shift = [
            keras.layers.ZeroPadding2D(((0, 1), (0, 1)), name="pad"),
            keras.layers.Cropping2D(((1, 0), (1, 0)), name="crop"),
        ]
        half = filters // 2
        self.conv_1 = convolution(filters - half, 1, 2, name="conv_1")
        self.conv_2 = convolution(half, 1, 2, name="conv_2")
        self.norm = normalization(momentum, name="norm")

    def build(self, input_shape):
        build_chain(self, [self.relu, self.conv_1], input_shape)
        build_chain(self, [*self.shift, self.conv_2], input_shape)
        build_chain(self, [self.norm], self.compute_output_shape(input_shape))

    def call(self, x):
        x = self.relu(x)
        shifted = call_chain(self.shift, x)
        x = ops.concatenate([self.conv_1(x), self.conv_2(shifted)], axis=-1)
        return self.norm(x)

    def compute_output_shape(self, input_shape):
        return (*resolution(input_shape, 2), self.filters)

    def get_config(self):
        return {
            **super().get_config(),
            "filters": self.filters,
            "momentum": self.momentum,
        }


@keras.saving.register_keras_serializable(package="model_zoo")
class AmoebaNetCell(keras.layers.Layer):
    """A cell of AmoebaNet-D.

    Its inputs are the output of the previous cell, x, and that cell's input,
    `previous`. Both are projected to `filters` channels by ReLU, 1x1
    convolution and batch normalisation (`previous` only if it has another
    number of channels, or is larger). Five sums of two operations follow. The
    output is the concatenation of some of these sums and inputs.

    Args:
        filters: Positive integer, channels of every operation.
        reduction: Boolean, whether the cell halves height and width. Defaults
            to `False`.
        reduce_previous: Boolean, whether `previous` has twice the height and
            width of x, as after a cell that halves them. Defaults to `False`.
        drop_path: Float, rate at which the result of an operation is left out
            for an image in training. Defaults to `0.0`.
        momentum: Float between 0 and 1, of the moving statistics in batch
            normalisation. Defaults to `0.9`.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Input shape:
        A tuple of the shapes of x and `previous`, both `(batch_size, height,
        width, channels)`, and of further tensors, which are passed on. Or the
        shape of a single tensor that is both x and `previous`.

    Output shape:
        A tuple of `(batch_size, height, width, 4 * filters)`, or, with
        `reduction`, `(batch_size, ceil(height / 2), ceil(width / 2),
        3 * filters)`; the shape of x; and the shapes of the tensors passed on.

    Example:

    ```python
    x = keras.ops.ones((1, 8, 8, 3))
    x, previous = AmoebaNetCell(16)(x)  # (1, 8, 8, 64), (1, 8, 8, 3)
    x, previous = AmoebaNetCell(32, reduction=True)((x, previous))
    x.shape  # (1, 4, 4, 96)
    ```
    """

    def __init__(
        self,
        filters,
        reduction=False,
        reduce_previous=False,
        drop_path=0.0,
        momentum=0.9,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.filters = filters
        self.reduction = reduction
        self.reduce_previous = reduce_previous
        self.drop_path = drop_path
        self.momentum = momentum
        self.project_input = _unit(filters, 1, 1, momentum, "input")
        self.project_previous = []
        genotype = _REDUCTION if reduction else _NORMAL
        self.sources = tuple(state for _, state in genotype)
        self.results = _REDUCTION_OUTPUTS if reduction else _NORMAL_OUTPUTS
        self.operations = [
            _operation(
                kind,
                filters,
                2 if reduction and state < 2 else 1,
                drop_path,
                momentum,
                name=f"op_{index + 1}",
            )
            for index, (kind, state) in enumerate(genotype)
        ]

    def build(self, input_shape):
        x, previous, *_ = state_shapes(input_shape)
        expected = resolution(previous, 2 if self.reduce_previous else 1)
        if expected[1:] != x[1:3]:
            raise ValueError(
                "The second input of a cell must have the height and width of "
                "the first one, or twice as much with `reduce_previous`. "
                f"Received: reduce_previous={self.reduce_previous}, "
                f"input_shape={input_shape}"
            )
        if self.reduce_previous:
            self.project_previous = [
                FactorizedReduction(
                    self.filters, self.momentum, name="previous_reduction"
                )
            ]
        elif previous[-1] != self.filters:
            self.project_previous = _unit(
                self.filters, 1, 1, self.momentum, "previous"
            )
        shapes = [
            build_chain(self, self.project_input, x),
            build_chain(self, self.project_previous, previous),
        ]
        for index, chain in enumerate(self.operations):
            shape = build_chain(self, chain, shapes[self.sources[index]])
            if index % 2:
                shapes.append(shape)

    def call(self, inputs):
        if not isinstance(inputs, (list, tuple)):
            inputs = (inputs, inputs)
        x, previous, *others = inputs
        states = [
            call_chain(self.project_input, x),
            call_chain(self.project_previous, previous),
        ]

        def result(index):
            state = states[self.sources[index]]
            return call_chain(self.operations[index], state)

        for index in range(0, len(self.operations), 2):
            states.append(result(index) + result(index + 1))
        output = ops.concatenate([states[i] for i in self.results], axis=-1)
        return (output, x, *others)

    def compute_output_shape(self, input_shape):
        x, _, *others = state_shapes(input_shape)
        channels = self.filters * len(self.results)
        output = (*resolution(x, 2 if self.reduction else 1), channels)
        return (output, x, *others)

    def get_config(self):
        return {
            **super().get_config(),
            "filters": self.filters,
            "reduction": self.reduction,
            "reduce_previous": self.reduce_previous,
            "drop_path": self.drop_path,
            "momentum": self.momentum,
        }


def _operation(kind, filters, strides, drop_path, momentum, name):
    """Returns an operation of a cell, as a list of layers."""
    # A bottleneck: the larger convolutions have a quarter of the channels.
    narrow = max(1, filters // 4)
    units = {
        "none": [],
        "conv_1x1": [(filters, 1, strides)],
        "conv_3x3": [(narrow, 1, 1), (narrow, 3, strides), (filters, 1, 1)],
        "conv_1x7_7x1": [
            (narrow, 1, 1),
            (narrow, (1, 7), (1, strides)),
            (narrow, (7, 1), (strides, 1)),
            (filters, 1, 1),
        ],
    }
    pools = {
        "max_pool_2x2": (keras.layers.MaxPooling2D, 2),
        "max_pool_3x3": (keras.layers.MaxPooling2D, 3),
        "avg_pool_3x3": (keras.layers.AveragePooling2D, 3),
    }
    layers = []
    if kind in pools:
        pool, size = pools[kind]
        layers.append(pool(size, strides, padding="same", name=f"{name}_pool"))
    else:
        for index, unit in enumerate(units[kind]):
            layers += _unit(*unit, momentum, f"{name}_{index + 1}")
    if drop_path and kind != "none":
        # Drops the whole result for an image, not single numbers.
        layers.append(
            keras.layers.Dropout(
                drop_path, noise_shape=(None, 1, 1, 1), name=f"{name}_drop"
            )
        )
    return layers


def _unit(filters, size, strides, momentum, name):
    return [
        keras.layers.ReLU(name=f"{name}_relu"),
        convolution(filters, size, strides, name=f"{name}_conv"),
        normalization(momentum, name=f"{name}_norm"),
    ]


def convolution(filters, size, strides, name, padding="same"):
    # No bias: the batch normalisation that follows has one.
    return keras.layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding=padding,
        use_bias=False,
        kernel_initializer=keras.initializers.VarianceScaling(2.0, "fan_out"),
        name=name,
    )


def normalization(momentum, name):
    return keras.layers.BatchNormalization(momentum=momentum, name=name)


def state_shapes(input_shape):
    """Returns a cell's input shapes as a tuple; a single one is duplicated."""
    if not isinstance(input_shape[0], (list, tuple)):
        input_shape = (input_shape, input_shape)
    return tuple(tuple(shape) for shape in input_shape)


def resolution(shape, strides):
    """Returns batch size, height and width after `strides`."""
    rows, *sizes = shape[:3]
    return rows, *(n if n is None else -(-n // strides) for n in sizes)
