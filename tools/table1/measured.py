"""Measures the memory of steps, on a GPU or in worker processes."""

import functools
import gc
import itertools
import sys

import keras
import numpy as np
import tensorflow as tf

import model_zoo
import tf_gpipe
from tf_gpipe import progress
from tf_gpipe.commands import workers
from tf_gpipe.stage.stage import trainable
from tools import worker_usage
from tools.benchmark.report import Report
from tools.table1 import notes
from tools.table1.planned import plan
from tools.table1.published import FAMILIES
from tools.table1.published import NUM_CLASSES
from tools.table1.published import text

# The memory of each virtual device of a GPU.
GPU_MIB = 8192


def on_gpu(rows, devices, args):
    """Prints each device's peak memory in a step, for each row."""
    lines, runs = [], []
    for row in progress.track(rows, "measuring"):
        peaks = None
        if row.num_stages <= len(devices):
            peaks = _peaks(row, devices[: row.num_stages], args)
            result = "fits" if peaks else "does not fit"
        else:
            result = f"needs {row.num_stages} devices"
        # Frees what the row has left on the devices.
        keras.backend.clear_session()
        gc.collect()
        sizes = [f"{x / 2**30:.2f}" for x in peaks or []]
        lines.append(
            {
                "row": row.name,
                "(L, D)": text(row.sizes),
                "result": result,
                "peak GiB": " ".join(sizes),
            }
        )
        runs.append({"name": row.name, "result": result, "peaks": peaks})
    Report(
        f"AmoebaNet-D on {len(devices)} virtual devices of {GPU_MIB} MiB",
        lines,
        {"runs": runs},
    ).print(args.json)


def _peaks(row, devices, args):
    """Returns each device's peak bytes; `None` if memory does not suffice."""
    layers = model_zoo.get(row.model, **row.sizes)
    x, y = data(layers, row.family.batch_size)
    options = row.options(args.micro_batch_size)
    try:
        return device_peaks(
            pipeline(layers, row.family, devices, options), devices, x, y
        )
    except tf.errors.ResourceExhaustedError:
        return None


def device_peaks(model, devices, x, y):
    """Returns the peak bytes of each device in a step of a model.

    TensorFlow does not report them for CPUs.
    """
    model.train_on_batch(x, y)
    # The first step is left out: it also tries algorithms for convolutions.
    for device in devices:
        tf.config.experimental.reset_memory_stats(device)
    model.train_on_batch(x, y)
    return [
        tf.config.experimental.get_memory_info(device)["peak"]
        for device in devices
    ]


def on_workers(models, args):
    """Prints the peak memory of worker processes beside the plan."""
    lines, runs, why = [], [], []
    processes = workers.connected(
        2, environment=worker_usage.GIVE_BACK, one_core=True
    )
    cases = list(itertools.product(models, ("never", "always")))
    for model, remat in progress.track(cases, "measuring"):
        print(f"{model}, remat {remat}", file=sys.stderr)
        options = {
            "num_stages": len(processes),
            "num_micro_batches": 4,
            "remat": remat,
        }
        planned, measured = _memory(model, processes, options)
        ratios = [x / y for x, y in zip(measured, planned, strict=True)]
        lines += [
            {
                "model": model,
                "remat": remat,
                "stage": k,
                "planned": planned[k] / 2**20,
                "measured": measured[k] / 2**20,
                "measured / planned": ratio,
            }
            for k, ratio in enumerate(ratios)
        ]
        runs.append(
            {
                "model": model,
                "remat": remat,
                "planned": planned,
                "measured": measured,
            }
        )
        if model == "amoebanet_d" and min(ratios) < 0.8:
            why.append(f"AmoebaNet-D, remat {remat}: {notes.MERGED}")
        if remat == "never" and max(ratios) > 1.2:
            why.append(f"{FAMILIES[model].title}: {notes.SHAPES}")
    Report(
        "Small versions, a worker process a stage; peak MiB of activations and "
        "gradients",
        lines,
        {"runs": runs, "notes": why},
        notes=why,
    ).print(args.json)


def _memory(model, processes, options):
    """Returns the peak memory of activations and gradients in a step.

    Returns:
        Two lists with the bytes of each stage: planned, and measured.
    """
    family = FAMILIES[model]
    make = functools.partial(model_zoo.get, model, **family.small)
    planned = plan(make(), family, family.small_batch_size, **options)
    x, y = data(make(), family.small_batch_size)
    model = pipeline(
        make(), family, [process.device for process in processes], options
    )
    measured = worker_usage.peak_memory(
        processes, lambda: model.train_on_batch(x, y)
    )
    expected = [
        stage_plan.activation_bytes
        + sum(
            v.shape.num_elements() * v.value.dtype.size
            for v in trainable(stage.owned)
        )
        for stage_plan, stage in zip(planned.stages, model.stages, strict=True)
    ]
    return expected, measured


def pipeline(layers, family, devices, options):
    """Returns a compiled pipeline.

    Args:
        layers: List of layers.
        family: `Family`.
        devices: List of device names.
        options: Dict, other arguments of `tf_gpipe.PipelinedSequential`.
    """
    model = tf_gpipe.PipelinedSequential(
        layers, devices=devices, **{"balance": "parameters", **options}
    )
    model.compile(
        family.optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def data(layers, batch_size):
    """Returns a mini-batch of random inputs and labels."""
    inputs = layers[0].output
    shape = (batch_size, *inputs.shape[1:])
    generator = np.random.default_rng(0)
    if inputs.dtype == "int32":
        tokens = generator.integers(0, NUM_CLASSES, shape, dtype="int32")
        return tokens, tokens
    labels = generator.integers(0, NUM_CLASSES, batch_size, dtype="int32")
    return generator.standard_normal(shape, dtype="float32"), labels
