"""Measures memory and time of a training step on one device."""

import contextlib
import inspect
import json
import os
import threading
import time

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.commands import models
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.tuning.trials import mean_square
from tools import worker_usage
from tools.benchmark.planned_models import MODELS as _PLANNED_MODELS


def _images(name, size, step, **kwargs):
    return (
        lambda n: _PLANNED_MODELS[name][0](input_shape=(n, n, 3), **kwargs),
        size,
        step,
    )


# For each model: a function that makes it for an input size (the side of its
# images or the length of its sequences); the input size while the largest batch
# is searched; and the number of which all tried input sizes are multiples.
MODELS = {
    "transformer_lm": (
        lambda n: _PLANNED_MODELS["transformer_lm"][0](num_layers=8, length=n),
        128,
        32,
    ),
    "GPT2Backbone": (
        lambda n: _PLANNED_MODELS["GPT2Backbone"][0](
            num_layers=8, max_sequence_length=n
        ),
        128,
        32,
    ),
    "ViTBackbone": (
        lambda n: _PLANNED_MODELS["ViTBackbone"][0](
            num_layers=8, image_shape=(n, n, 3)
        ),
        64,
        16,
    ),
    "resnet50": _images("resnet50", 64, 32),
    "unet": _images("unet", 64, 32),
    "amoebanet_d": _images("amoebanet_d", 128, 32),
}
# What a search enlarges: the batch, or the input size of a single sample.
BATCH, SINGLE = "batch", "single"
CASES = {
    f"{model}_{x}": (model, x) for x in (BATCH, SINGLE) for model in MODELS
}
# For each way to train with Keras: whether layers are recomputed, and whether
# the optimizer accumulates gradients over several steps.
KERAS = {
    "plain": (False, False),
    "remat": (True, False),
    "accumulate": (False, True),
    "both": (True, True),
}
GPIPE = "tf_gpipe"
# The share of the limit that a pipeline plans at first: operations need some
# memory while they run.
SHARE = 0.9
WAYS = (*KERAS, GPIPE)
# How many bytes beyond the limit end a trial; tracing takes fewer.
_ENOUGH = 2**30


def needs(args, case, way, size):
    """Measures a training step in this process.

    Returns:
        Dict of a step's peak `bytes`, weights and slots included; the `fixed`
        bytes of weights and slots; and the `seconds` and CPU seconds (`cpu`)
        per row. All are `None` if no plan fits the limit or the step exceeds
        it by far.
    """
    size, rows, count = sizes(args, case, size)
    found = {"bytes": None, "fixed": None, "seconds": None, "cpu": None}
    with _ended_beyond(found, args.limit * 2**20):
        try:
            model = _model(args, CASES[case][0], size, way, rows, count)
        except TooLittleMemoryError:
            return found
        return _measured(model, size, way, rows, count)


def _measured(model, size, way, rows, count):
    """Returns what `needs` does, measured in the second step of a model."""
    repeats = count if way in KERAS and KERAS[way][1] else 1

    def step():
        # Inputs count as memory, too, so the step makes them.
        for _ in range(repeats):
            model.train_on_batch(*_data(model, size, rows // repeats))

    # The first step traces, and allocates memory that stays.
    step()
    worker_usage.give_back(os.getpid())
    start, used = time.perf_counter(), time.process_time()
    (added,) = worker_usage.added([os.getpid()], step)
    fixed = size_in_bytes([model.variables, model.optimizer.variables])
    return {
        "bytes": added + fixed,
        "fixed": fixed,
        "seconds": (time.perf_counter() - start) / rows,
        "cpu": (time.process_time() - used) / rows,
    }


def _model(args, name, size, way, rows, count):
    """Returns a compiled model."""
    make = MODELS[name][0]
    recomputed, accumulated = KERAS.get(way, (False, False))
    scope = contextlib.nullcontext()
    if recomputed:
        scope = keras.RematScope(
            "list_of_layers", layer_names=_names(make(size))
        )
        keras.backend.clear_session()
    with scope:
        model = make(size)
    if way == GPIPE:
        model = models.pipelined(
            model, batch_size=rows, **options(args, count, args.share or SHARE)
        )
    elif not isinstance(model, keras.Model):
        model = keras.Sequential(model)
    optimizer = keras.optimizers.Adam(
        gradient_accumulation_steps=count if accumulated else None
    )
    losses = keras.tree.map_structure(lambda _: mean_square, _ends(model)[1])
    model.compile(optimizer, losses)
    # Otherwise Keras traces the step twice: the first trace makes the slots.
    optimizer.build(model.trainable_variables)
    return model


def _names(model):
    """Returns the names of the layers that Keras can recompute.

    Layers with an argument `training` are left out: Keras passes it by name,
    and in a graph TensorFlow's recomputed gradients take no keyword arguments.
    """
    if not isinstance(model, keras.Model):
        model = keras.Sequential(model)
    return [
        x.name
        for x in upstream.layers_within(model)
        if "training" not in inspect.signature(x.call).parameters
    ]


def _ends(model):
    """Returns the symbolic inputs and outputs of a model."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def _data(model, size, rows):
    """Returns a mini-batch of ones.

    Axes whose size the model leaves open get `size` entries.
    """

    def ones(x, last=()):
        shape = [n or size for n in x.shape[1:]]
        return tf.ones((rows, *shape[: len(shape) - len(last)], *last), x.dtype)

    inputs, outputs = _ends(model)
    return (
        keras.tree.map_structure(ones, inputs),
        keras.tree.map_structure(lambda x: ones(x, (1,)), outputs),
    )


@contextlib.contextmanager
def _ended_beyond(found, limit):
    """Prints `found` and ends this process if memory far exceeds the limit."""
    most = worker_usage.memory(os.getpid(), "VmRSS") + limit + _ENOUGH
    done = threading.Event()

    def watch():
        while not done.wait(0.02):
            if worker_usage.memory(os.getpid(), "VmRSS") > most:
                print(json.dumps(found), flush=True)
                os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def options(args, count, share):
    """Returns the arguments of a pipeline on one device.

    Args:
        args: Parsed arguments of `one_device`.
        count: Integer, number of micro-batches.
        share: Float, the share of `--limit` that the pipeline may plan.
    """
    return {
        "num_stages": 1,
        "num_micro_batches": count,
        "remat": "auto",
        "memory_limit": int(share * args.limit * 2**20),
    }


def sizes(args, case, size):
    """Returns the input size, the rows of a step and its micro-batches."""
    model, what = CASES[case]
    if what == BATCH:
        return MODELS[model][1], size, args.num_micro_batches
    return size, 1, 1
