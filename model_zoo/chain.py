"""Layers within a block that are called one after another."""


def build_chain(block, layers, shape):
    """Builds layers of a block, each on what the one before makes.

    Args:
        block: The `keras.layers.Layer` that they belong to, whose dtype policy
            they get: that of the moment may be another one, as when a model is
            loaded.
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
    """Returns the outputs of the last of `layers`.

    Keras hands on to them whether the block is called to train.
    """
    for layer in layers:
        inputs = layer(inputs)
    return inputs
