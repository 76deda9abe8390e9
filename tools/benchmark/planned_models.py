"""Models of which `plan`, `auto_remat` and `one_device` measure the memory.

Two cores train a step in seconds, and the activations are large beside what a
process needs anyway.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

import model_zoo
from tf_gpipe.commands import models
from tools import worker_usage

_IMAGE = (64, 64, 3)


def _zoo(name, **kwargs):
    return functools.partial(model_zoo.get, name, **kwargs)


def _application(name, **kwargs):
    return functools.partial(
        getattr(keras.applications, name),
        weights=None,
        input_shape=_IMAGE,
        classes=10,
        **kwargs,
    )


def _hub(name, **kwargs):
    def make(**more):
        # Imported here, so that the other models do not need KerasHub.
        from tools.keras_hub import tiny

        sizes = {
            "vocabulary_size": 1000,
            "hidden_dim": 64,
            "intermediate_dim": 256,
            "max_sequence_length": 128,
            "head_dim": 16,
            "num_heads": 4,
            "num_query_heads": 4,
            "num_key_value_heads": 2,
        }
        known = tiny.arguments(tiny.class_of(name))
        given = {k: v for k, v in sizes.items() if k in known}
        return tiny.tiny(name, **given | kwargs | more)

    return make


# For each model: a function that makes it, the rows of a mini-batch, the length
# of sequences if the model leaves it open, and whether convolutions take most
# of the memory.
MODELS = {
    "resnet_small": (
        _zoo("resnet_small", input_shape=(32, 32, 3), num_filters=16),
        1024,
        None,
        True,
    ),
    "resnet50": (
        _zoo("resnet50", input_shape=_IMAGE, num_filters=16, num_classes=10),
        256,
        None,
        True,
    ),
    "resnet101": (
        _zoo("resnet101", input_shape=_IMAGE, num_filters=16, num_classes=10),
        256,
        None,
        True,
    ),
    "amoebanet_d": (
        _zoo(
            "amoebanet_d",
            num_layers=3,
            num_filters=32,
            num_classes=10,
            input_shape=(128, 128, 3),
        ),
        128,
        None,
        True,
    ),
    "unet": (
        _zoo("unet", num_blocks=2, num_filters=8, input_shape=_IMAGE, depth=3),
        256,
        None,
        True,
    ),
    "transformer_lm": (
        _zoo(
            "transformer_lm",
            num_layers=4,
            dim=128,
            ffn_dim=512,
            num_heads=4,
            vocabulary=1000,
            length=128,
        ),
        256,
        None,
        False,
    ),
    "transformer_nmt": (
        _zoo(
            "transformer_nmt",
            num_layers=2,
            ffn_dim=512,
            num_heads=4,
            dim=128,
            vocabulary=1000,
            head_size=32,
        ),
        256,
        128,
        False,
    ),
    "MobileNetV2": (_application("MobileNetV2"), 256, None, True),
    "EfficientNetB0": (_application("EfficientNetB0"), 256, None, True),
    "DenseNet121": (_application("DenseNet121"), 128, None, True),
    "BertBackbone": (_hub("BertBackbone"), 512, 128, False),
    "GPT2Backbone": (_hub("GPT2Backbone"), 512, 128, False),
    "LlamaBackbone": (_hub("LlamaBackbone"), 512, 128, False),
    "T5Backbone": (_hub("T5Backbone"), 256, 128, False),
    "ViTBackbone": (
        _hub("ViTBackbone", image_shape=_IMAGE, patch_size=8, mlp_dim=256),
        1024,
        None,
        False,
    ),
}

# The kernels of models in which TensorFlow 2.21 crashes with oneDNN's.
_KERNELS = {"amoebanet_d": "tensorflow"}


def add_kernels(parser):
    """Adds the flag `--kernels`."""
    parser.add_argument(
        "--kernels",
        choices=worker_usage.KERNELS,
        help="library of kernels; if not given, onednn, and tensorflow for "
        "amoebanet_d, in which TensorFlow 2.21 crashes with oneDNN's",
    )


def kernels_of(name, args):
    """Returns by which kernels a model is measured, a key of `KERNELS`."""
    return args.kernels or _KERNELS.get(name, "onednn")


def data(pipeline, num_rows, length):
    """Returns random inputs and labels.

    Labels are the class of each last axis of the outputs, as plans assume; or
    0 and 1, where an output has a last axis of 1.
    """
    x, y = models.random_data(pipeline, num_rows, length=length)

    def labels(t):
        if t.shape[-1] == 1:
            return (t > 0).astype("float32")
        return np.argmax(t, axis=-1).astype("int32")

    with tf.device("CPU:0"):
        return x, keras.tree.map_structure(labels, y)


def losses(labels):
    """Returns the cross-entropy for each output's labels of `data`."""
    binary = keras.losses.BinaryCrossentropy(from_logits=True)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.tree.map_structure(
        lambda x: binary if x.dtype == "float32" else classes, labels
    )
