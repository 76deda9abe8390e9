"""Stages on two hosts. To try it out, both workers are started here.

On each real host, within a private network, run
`tf-gpipe worker --port=2222 --bind=ADDRESS`, and give a list of every
`ADDRESS:2222` to `connect`.
"""

import socket
import subprocess
import sys

import keras
import numpy as np

import tf_gpipe


def unused_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


ports = [unused_port() for _ in range(2)]
# The workers end with this process, which holds their standard input.
# TensorFlow then logs that it cannot reach them any more.
workers = [
    subprocess.Popen(
        [sys.executable, "-m", "tf_gpipe", "worker"]
        + [f"--port={port}", "--with_stdin"],
        stdin=subprocess.PIPE,
    )
    for port in ports
]
devices = tf_gpipe.connect([f"127.0.0.1:{x}" for x in ports], timeout=120)
keras.utils.set_random_seed(0)

model = tf_gpipe.PipelinedSequential(
    [
        keras.Input((16,)),
        *(keras.layers.Dense(64, "relu") for _ in range(4)),
        keras.layers.Dense(1),
    ],
    num_stages=2,
    num_micro_batches=4,
    devices=devices,
)
model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(512, 16)).astype("float32")
history = model.fit(x, x[:, :1] * x[:, 1:2], batch_size=64, epochs=5)
for stage in model.stages:
    print(f"stage {stage.index}: {stage.device}")
losses = history.history["loss"]
print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} in the end")
assert losses[-1] < losses[0]
