"""The largest Transformer that trains on four devices of 18 GB.

All weights are trained, by AdamW in bfloat16, on sequences of 4,096 tokens.
The model has Gemma-2B's shape: 18 layers, width 2,048, a vocabulary of 256
thousand. Unlike Gemma, its eight heads do not share keys and values, nor does
the output layer share the embedding's weights.
"""

import dataclasses
import time

import keras
import numpy as np
import tensorflow as tf

import model_zoo
import tf_gpipe
from tools.benchmark import timing
from tools.gpu import devices
from tools.gpu.checking import Failed


@dataclasses.dataclass(frozen=True)
class _Job:
    """A model to train, and its devices.

    Attributes:
        sizes: Dict, hyper-parameters of the model, without `num_layers`.
        num_layers: Integer, the smallest number of layers.
        num_stages: Integer.
        num_micro_batches: Integer; each has one sequence.
        num_bytes: Integer, the memory of a device.
    """

    sizes: dict
    num_layers: int
    num_stages: int
    num_micro_batches: int
    num_bytes: int


_GEMMA = _Job(
    {
        "dim": 2048,
        "ffn_dim": 16384,
        "num_heads": 8,
        "vocabulary": 256128,
        "length": 4096,
    },
    num_layers=18,
    num_stages=4,
    num_micro_batches=8,
    num_bytes=18 * 10**9,
)
_TINY = _Job(
    {
        "dim": 16,
        "ffn_dim": 32,
        "num_heads": 2,
        "vocabulary": 50,
        "length": 8,
    },
    num_layers=1,
    num_stages=2,
    num_micro_batches=2,
    num_bytes=50_000,
)
_NUM_STEPS = 3


def gemma(cpu):
    """Trains as many layers as Gemma-2B has, and measures tokens a second."""
    job = _TINY if cpu else _GEMMA
    return _train(job, job.num_layers, _start(job, cpu))


def largest(cpu):
    """Trains as many layers as the planner finds room for."""
    job = _TINY if cpu else _GEMMA
    names = _start(job, cpu)
    num_layers = job.num_layers
    while max(_plan(job, num_layers + 1).device_bytes) <= job.num_bytes:
        num_layers += 1
    return _train(job, num_layers, names)


def _start(job, cpu):
    names = devices.start(cpu, job.num_stages, job.num_bytes // 2**20)
    keras.config.set_dtype_policy("bfloat16")
    return names


def _train(job, num_layers, names):
    plan = _plan(job, num_layers)
    value = {
        "num_layers": num_layers,
        "parameters": sum(stage.parameters for stage in plan.stages),
        "planned": plan.device_bytes,
    }
    if max(plan.device_bytes) > job.num_bytes:
        raise Failed("by its plan it does not fit", **value)
    model = tf_gpipe.PipelinedSequential(
        model_zoo.get("transformer_lm", num_layers=num_layers, **job.sizes),
        num_stages=job.num_stages,
        num_micro_batches=job.num_micro_batches,
        # The same cut as in the plan.
        balance=[len(stage.layers) for stage in plan.stages],
        devices=names,
    )
    model.compile(
        _optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    tokens = np.random.default_rng(0).integers(
        job.sizes["vocabulary"],
        size=(job.num_micro_batches, job.sizes["length"]),
        dtype="int32",
    )
    try:
        start = time.monotonic()
        loss = float(model.train_on_batch(tokens, tokens))
        value["first_step_seconds"] = time.monotonic() - start
        seconds = timing.step_seconds(model, tokens, tokens, _NUM_STEPS)
    except tf.errors.ResourceExhaustedError as e:
        raise Failed(e.message.splitlines()[0], **value) from e
    value |= {"loss": loss, "tokens_per_second": tokens.size / seconds}
    if "GPU" in names[0]:
        value["peaks"] = [
            tf.config.experimental.get_memory_info(name)["peak"]
            for name in names
        ]
    if not np.isfinite(loss):
        raise Failed("the loss is no number", **value)
    return value


def _plan(job, num_layers):
    _, *layers = model_zoo.get(
        "transformer_lm", num_layers=num_layers, **job.sizes
    )
    shape = job.num_micro_batches, job.sizes["length"]
    return tf_gpipe.plan(
        layers,
        keras.KerasTensor(shape, "int32"),
        num_stages=job.num_stages,
        num_micro_batches=job.num_micro_batches,
        balance="flops",
        optimizer=_optimizer(),
    )


def _optimizer():
    return keras.optimizers.AdamW(1e-4)
