"""Makes up inputs and targets for a model."""

import keras
import numpy as np

ROWS = 4
LENGTH = 8
VOCABULARY = 32

# Sizes of the unknown axes, after the batch axis, of inputs that are no
# sequences of length `LENGTH`.
_OPEN = {
    "boxes": (1, 2, 2),
    "box_labels": (1,),
    "encoder_features": (16, 8),
    "encoder_input_values": (2048, 1),
    "labels": (1,),
    "masks": (1, 16, 16, 1),
    "points": (1, 2),
}
# Inputs that are one everywhere: their integers are no tokens.
_ONES = ("box_labels", "labels", "num_steps", "timesteps")
# Inputs with one value for the whole batch: the model reads only the first row.
_SAME = {"guidance_scale": 2.5}
_ZEROS = ("response_mask", "segment_ids")
# Number of tokens of a prompt.
_PROMPT = 4


def inputs(model, seed=0, prompt=False):
    """Returns a batch for the inputs of a functional model.

    Args:
        model: Functional Keras model.
        seed: Integer.
        prompt: Boolean, whether all rows are padded after the same few tokens,
            as for `generate`.
    """
    rng = np.random.default_rng(seed)

    def made(path, spec):
        name = path[-1] if path and isinstance(path[-1], str) else spec.name
        shape = spec.shape[1:]
        if None in shape:
            opened = _OPEN.get(name, (LENGTH,) * len(shape))
            shape = [n or opened[i % len(opened)] for i, n in enumerate(shape)]
        shape = (ROWS, *shape)
        kind = spec.dtype
        if name == "encoder_padding_mask" and _has_audio(model):
            return np.ones((ROWS, _OPEN["encoder_input_values"][0]), kind)
        if name.endswith("mask") and name not in _ZEROS:
            ends = _PROMPT if prompt else rng.integers(5, LENGTH, ROWS)
            filled = np.arange(shape[-1]) < np.reshape(ends, (-1, 1))
            return np.broadcast_to(filled, shape).astype(kind)
        if name in _SAME:
            return np.full(shape, _SAME[name], kind)
        if name in _ZEROS or name in _ONES:
            return np.full(shape, int(name in _ONES), kind)
        if name in ("mask_positions", "position_ids"):
            return np.broadcast_to(np.arange(shape[-1]), shape).astype(kind)
        if kind == "bool":
            return np.ones(shape, kind)
        if "int" in kind:
            return rng.integers(1, VOCABULARY, shape).astype(kind)
        return rng.uniform(-1, 1, shape).astype(kind)

    specs = model.input
    if not isinstance(specs, dict):
        return keras.tree.map_structure(lambda x: made((), x), specs)
    return {name: made((name,), x) for name, x in specs.items()}


def targets(outputs, seed=1):
    """Returns a random array for each output, of its shape and dtype."""
    rng = np.random.default_rng(seed)
    return keras.tree.map_structure(
        lambda x: rng.uniform(-1, 1, x.shape).astype(x.dtype), outputs
    )


def _has_audio(model):
    return isinstance(model.input, dict) and (
        "encoder_input_values" in model.input
    )
