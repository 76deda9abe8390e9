"""Makes tiny models of KerasHub by arguments that most classes share."""

import inspect

from keras_hub import layers as L
from keras_hub import models as M

LAYERS = 4
IMAGE = (32, 32, 3)

# Values of arguments, by name.
SIZES = {
    "axes_dim": [2, 2, 4],
    "decoder_num_layers": 3,
    "decoder_num_heads": 2,
    "embedding_dim": 16,
    "encoder_num_layers": 3,
    "encoder_num_heads": 2,
    "head_dim": 8,
    "head_size": 8,
    "hidden_dim": 16,
    "hidden_size": 16,
    "image_shape": IMAGE,
    "intermediate_dim": 32,
    "max_sequence_length": 16,
    "mlp_dim": 32,
    "moe_intermediate_dim": 16,
    "num_attention_heads": 2,
    "num_experts": 3,
    "num_heads": 2,
    "num_key_value_heads": 1,
    "num_layers": LAYERS,
    "num_query_heads": 2,
    "patch_size": 8,
    "projection_dim": 8,
    "shared_expert_intermediate_dim": 16,
    "shared_expert_intermediate_size": 16,
    "top_k": 2,
    "vocab_size": 32,
    "vocabulary_size": 32,
    # Dropout masks of several micro-batches are not plain Keras's.
    "attention_dropout": 0.0,
    "attention_dropout_rate": 0.0,
    "drop_path": 0.0,
    "drop_path_rate": 0.0,
    "dropout": 0.0,
    "dropout_rate": 0.0,
    "max_drop_path_rate": 0.0,
}


def tiny(name, /, **kwargs):
    """Returns a model of the class `name`, with `SIZES` and `kwargs`."""
    cls = class_of(name)
    known = arguments(cls)
    return cls(**{k: v for k, v in SIZES.items() if k in known} | kwargs)


def class_of(name):
    """Returns a class of KerasHub's models or layers."""
    return getattr(M, name, None) or getattr(L, name)


def arguments(cls):
    """Returns the names of the arguments of a class."""
    return inspect.signature(cls.__init__).parameters
