"""Time of tasks and steps, on devices that share one processor."""

import argparse
import functools
import statistics

import keras
import numpy as np

import tf_gpipe
from tools.benchmark import pipeline
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.gpu import devices

_NUM_STAGES = 2


def task(cpu):
    """Measures the seconds of a task that computes next to nothing.

    Takes the difference between steps with many and with few micro-batches,
    which leaves out the fixed cost of a step.
    """
    names = devices.start(cpu, count=_NUM_STAGES)
    counts = (2, 4) if cpu else (8, 64)
    x = np.ones((counts[1], 1), "float32")
    steps = {}
    for num_micro_batches in counts:
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((1,)), *(keras.layers.Dense(1) for _ in names)],
            num_stages=_NUM_STAGES,
            num_micro_batches=num_micro_batches,
            remat="never",
            devices=names,
        )
        model.compile("sgd", "mse")
        model.train_on_batch(x, x)
        steps[num_micro_batches] = functools.partial(
            timing.step_seconds, model, x, x, 2 if cpu else 20
        )
    few, many = (
        statistics.median(seconds)
        for seconds in timing.interleaved(steps, 3).values()
    )
    # Each micro-batch goes forward and backward.
    num_tasks = 2 * _NUM_STAGES * (counts[1] - counts[0])
    return {"seconds": (many - few) / num_tasks, "steps": [few, many]}


def step(cpu):
    """Compares steps of K=1, M=1 and of plain Keras, with and without XLA."""
    (name,) = devices.start(cpu, count=1)
    small = {"num_blocks": 1, "filters": 4, "size": 8} if cpu else {}
    batch_size = 4 if cpu else 256
    value = {}
    for what, make in workloads.WORKLOADS.items():
        if cpu and what != "convolutional":
            continue
        x, y = workloads.data(make(**small), batch_size)
        models = {}
        for jit_compile in (False, True):
            xla = " with XLA" if jit_compile else ""
            for who, model in {
                "keras": keras.Sequential(make(**small)),
                "tf_gpipe": tf_gpipe.PipelinedSequential(
                    make(**small),
                    num_stages=1,
                    num_micro_batches=1,
                    remat="never",
                    devices=[name],
                ),
            }.items():
                models[who + xla] = workloads.compiled(model, jit_compile)
        for model in models.values():
            model.train_on_batch(x, y)
        seconds = timing.interleaved(
            {
                key: functools.partial(
                    timing.step_seconds, model, x, y, 2 if cpu else 20
                )
                for key, model in models.items()
            },
            3,
        )
        value[what] = {
            **{k: statistics.median(v) for k, v in seconds.items()},
            **{
                f"ratio{xla}": timing.median_ratio(
                    seconds[f"tf_gpipe{xla}"], seconds[f"keras{xla}"]
                )
                for xla in ("", " with XLA")
            },
        }
    return value


def stages(cpu):
    """Measures K=2 and 4, expecting no speed-up on one shared processor."""
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    flags = "--on=local --batch_size=256 --num_stages=2,4 --remat=never,always"
    if cpu:
        flags = (
            "--on=local --workload=convolutional --batch_size=2 --num_stages=2 "
            "--num_micro_batches=2 --num_steps=1 --num_repeats=1"
        )
    report = pipeline.main(parser.parse_args(flags.split()))
    report.print()
    return {"title": report.title, **report.result}
