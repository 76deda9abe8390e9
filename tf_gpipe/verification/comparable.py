"""Which models can be compared: checks that allocate nothing."""

import os
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import slots
from tf_gpipe.models.pipelined import Pipelined
from tf_gpipe.partition.tensor_memory import size_in_bytes


def problem(model: Any, x: Any) -> str | None:
    """Returns why a model cannot be compared, or `None`."""
    if not isinstance(model, Pipelined):
        return (
            "`model` must be a `PipelinedSequential` or a `PipelinedModel`. "
            f"Received: {model!r:.60} (of type {type(model).__name__})"
        )
    if model._pipeline is None:
        return (
            f"Model '{model.name}' has not been built. Give it an `Input` as "
            "its first layer, or call it on data."
        )
    if not model.compiled or model.optimizer is None:
        return (
            f"Model '{model.name}' has not been compiled with an optimizer "
            "and a loss. Call `model.compile(...)`."
        )
    if upstream.strategy_of(model) or tf.distribute.has_strategy():
        return (
            f"Model '{model.name}' was made under a `tf.distribute` strategy. "
            "Its replicas cannot be compared with a plain model on one "
            "device: make the same model without the strategy."
        )
    if not len(keras.tree.flatten(x)[0]):
        return "`x` must have at least one row. Received: `x` without rows"
    return _too_large(model, x)


def _too_large(model: Any, x: Any) -> str | None:
    """Returns the message that the plain model is too large, or `None`.

    From shapes alone.
    """
    there = _device_memory()
    needed = _needed_bytes(model, x)
    if there is None or needed <= there:
        return None
    return (
        f"Model '{model.name}' is too large for one device, where the plain "
        f"model would run: its weights, gradients, slots and activations need "
        f"{needed / 1e9:.1f} GB, the device has {there / 1e9:.1f} GB. Give "
        "fewer rows, or make a smaller model of the same layers."
    )


def _needed_bytes(model: Any, x: Any) -> int:
    """Returns a lower bound of the bytes that the plain model needs."""
    optimizer, trained = model.optimizer, model.trainable_variables
    kept = [*model.variables, *trained]
    if optimizer.built:
        kept += optimizer.variables
    else:
        kept += [v for each in slots.planned(optimizer, trained) for v in each]
    flat = keras.tree.flatten(x)
    shape = getattr(flat[0], "shape", None) if flat else None
    rows = shape[0] if shape else 1
    graph = model._pipeline.graph
    # A gradient tape keeps the outputs of all layers.
    kept += [
        keras.KerasTensor((rows, *spec.shape[1:]), spec.dtype)
        for node in graph.nodes
        for value in node.made
        for spec in keras.tree.flatten(value.spec)
        if isinstance(spec, keras.KerasTensor)
    ]
    return size_in_bytes(kept)


def _device_memory() -> int | None:
    """Returns the bytes of the device where the plain model would run."""
    gpus = tf.config.list_physical_devices("GPU")
    if not tf.config.list_logical_devices("GPU"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = tf.config.get_logical_device_configuration(gpus[0])
    if parts and parts[0].memory_limit:
        return int(parts[0].memory_limit * 2**20)
    return upstream.gpu_memory()
