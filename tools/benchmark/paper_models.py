"""Costs of the stages of the GPipe paper's models, by the planner."""

import functools

import keras

import model_zoo
import tf_gpipe

MODELS = {
    "AmoebaNet-D (18, 256)": (
        "amoebanet_d",
        {"num_layers": 18, "num_filters": 256},
    ),
    "AmoebaNet-D (18, 128)": (
        "amoebanet_d",
        {"num_layers": 18, "num_filters": 128},
    ),
    "Transformer-48": ("transformer_lm", {"num_layers": 48}),
    "Transformer-24": ("transformer_lm", {"num_layers": 24}),
}


@functools.cache
def stages(name, num_stages):
    """Returns the `tf_gpipe.StagePlan`s for micro-batches of one row.

    Args:
        name: String, of `MODELS`.
        num_stages: Integer.
    """
    model, sizes = MODELS[name]
    first, *layers = model_zoo.get(model, **sizes)
    x = first.output
    return tf_gpipe.plan(
        layers,
        keras.KerasTensor((1, *x.shape[1:]), x.dtype),
        optimizer="sgd",
        num_stages=num_stages,
        num_micro_batches=1,
        balance="flops",
        schedule="gpipe",
    ).stages
