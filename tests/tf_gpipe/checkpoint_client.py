"""A program that trains on workers, for `checkpoint_test`.

    python -m tests.tf_gpipe.checkpoint_client WORKDIR WHAT --workers=...

WHAT is the number of the step after which a worker is killed; `whole` for a run
without faults; or `size` to measure the memory that a checkpoint takes in this
process. The program prints a digest of the weights, or for `size` a line of
JSON.
"""

import hashlib
import json
import os
import pathlib
import resource
import signal
import sys

import keras
import numpy as np

import tf_gpipe

X = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")


class Killing(keras.callbacks.Callback):
    """Kills a worker after a step, only once for each directory."""

    def __init__(self, workdir, step):
        super().__init__()
        self.killed = pathlib.Path(workdir) / "killed"
        self.step = step
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step and not self.killed.exists():
            self.killed.touch()
            parent = os.getppid()
            while "workers" not in _command(parent):
                parent = int(_status(parent)["PPid"])
            below = f"/proc/{parent}/task/{parent}/children"
            pids = [
                int(x)
                for x in pathlib.Path(below).read_text().split()
                if "worker" in _command(x)
            ]
            os.kill(pids[-1], signal.SIGKILL)


def _command(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _status(pid):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines)


def make(devices, width):
    keras.utils.set_random_seed(0)
    model = tf_gpipe.PipelinedSequential(
        [
            keras.Input((8,)),
            *(keras.layers.Dense(width, "relu") for _ in range(5)),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(8),
        ],
        num_stages=len(devices),
        num_micro_batches=2,
        devices=devices,
    )
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main(workdir, what, workers):
    devices = tf_gpipe.connect(
        workers.removeprefix("--workers=").split(","), timeout=120
    )
    size = what == "size"
    model = make(devices, 3000 if size else 16)
    checkpoint = tf_gpipe.callbacks.Checkpoint(
        pathlib.Path(workdir) / "checkpoints", every_steps=2
    )
    callbacks = [checkpoint]
    if what.isdecimal():
        callbacks.append(Killing(workdir, int(what)))
    how = {"batch_size": 8, "verbose": 0}
    if size:
        model.fit(X, X, **how)
        before = peak_mib()
        model.fit(X, X, callbacks=callbacks, **how)
        of_stage = max(
            # Weights and momentum.
            2 * 4 * stage.count_params() / 2**20
            for stage in model.stages
        )
        written = peak_mib() - before
        checkpoint.restore(model)
        told = {
            "written": written,
            "more": peak_mib() - before,
            "of_stage": of_stage,
        }
        print(json.dumps(told), flush=True)
        return
    model.fit(X, X, epochs=3, callbacks=callbacks, **how)
    digest = hashlib.sha256()
    for v in [*model.variables, *model.optimizer.variables]:
        digest.update(v.numpy().tobytes())
    print(digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
