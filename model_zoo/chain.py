"""Builds and calls layers of a block one after another."""


def build_chain(block, layers, shape):
    """Builds layers of a block, each for the previous one's output shape.

    Args:
        block: The `keras.layers.Layer` that they belong to. They get its dtype
            policy, since the global one may be different by now, as when a
            model is loaded.
        layers: List of layers.
        shape: Tuple, the shape of the inputs of the first.

    Returns:
        The shape of the outputs of the last.
    """
    for layer in layers:
        layer.dtype_policy = block.dtype_policy
        layer.build(shape)
        shape = layer.compute_output_shape(shape)
    return shape


def call_chain(layers, inputs):
    """Calls layers one after another, and returns the last one's outputs.

    They get the argument `training` of the block's call from Keras.
    """
    for layer in layers:
        inputs = layer(inputs)
    return inputs
