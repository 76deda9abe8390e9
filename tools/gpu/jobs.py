"""Replicas of pipelines, a whole job of a trainer, and the tests for GPUs."""

import os
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe
from tools import child_process
from tools.benchmark import workloads
from tools.gpu import devices
from tools.gpu.checking import Failed
from tools.gpu.checking import Skipped
from trainers.job_config import JobConfig
from trainers.optimization import Optimization

_TOLERANCE = 1e-4
# A little less than the 0.985 that the trainer's documentation promises.
_ACCURACY = 0.98


def replicas(cpu):
    """Checks that two replicas of two stages train like one plain model."""
    names = devices.start(cpu, count=4)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    rows = [names[:2], names[2:]]
    layers = workloads.transformer(1, 32, 8)
    x, y = workloads.data(layers, 16)
    plain = workloads.compiled(keras.Sequential(layers), jit_compile=False)
    strategy = tf.distribute.MirroredStrategy([row[0] for row in rows])
    with strategy.scope():
        pipelined = workloads.compiled(
            tf_gpipe.PipelinedSequential(
                workloads.transformer(1, 32, 8),
                num_stages=2,
                num_micro_batches=2,
                devices=rows,
            )
        )
        pipelined.set_weights(plain.get_weights())
    before = plain.get_weights()
    losses = {
        name: model.fit(
            x, y, batch_size=16, epochs=3, shuffle=False, verbose=0
        ).history["loss"]
        for name, model in {"keras": plain, "tf_gpipe": pipelined}.items()
    }
    pairs = zip(plain.get_weights(), pipelined.get_weights(), strict=True)
    change = max(
        np.abs(a - b).max()
        for a, b in zip(plain.get_weights(), before, strict=True)
    )
    apart = max(np.abs(a - b).max() for a, b in pairs) / change
    value = {"losses": losses, "difference": float(apart)}
    if not (
        apart < 10 * _TOLERANCE
        and np.allclose(*losses.values(), rtol=_TOLERANCE)
    ):
        raise Failed("the plain model has other numbers", **value)
    return value


def trainer(cpu):
    """Runs the image classifier's default job, on four stages."""
    from trainers import image_classification

    devices.start(cpu, count=4)
    _, scores = image_classification.train_and_evaluate(
        JobConfig(num_stages=4, num_epochs=1 if cpu else 20, verbose=2),
        Optimization(learning_rate=0.01, optimizer_args={"weight_decay": 0.1}),
        model="resnet_small",
        model_args={"num_filters": 8, "num_blocks": 2} if cpu else None,
        dataset="digits",
        batch_size=128,
    )
    if not cpu and scores["accuracy"] < _ACCURACY:
        raise Failed("it has learned too little", **scores)
    return scores


def tests(cpu):
    """Runs the tests that need a GPU."""
    if cpu:
        raise Skipped("needs a GPU")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu"],
        env={**os.environ, "TF_GPIPE_TEST_DEVICE": "GPU"},
        check=True,
        preexec_fn=child_process.end_with_parent,
    )
    return None
