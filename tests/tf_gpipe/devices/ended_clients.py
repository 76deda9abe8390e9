"""Clients of a worker that end one after another, for `restart_test`.

    python -m tests.tf_gpipe.devices.ended_clients COUNT

starts a worker and COUNT clients, one after another; every second one is
killed. Another client stays connected meanwhile, idle. The program prints the
worker's memory and threads at the start, at most, and after the worker has
restarted; and the exit statuses of the idle client and of one more, which
connects while the worker restarts.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback

import keras
import numpy as np

import tf_gpipe
from tools import child_process

# The second layer has 16 MB of weights, and twice as much of slots.
WIDTH = 2000
X = np.ones((8, 8), "float32")
Y = np.ones((8, WIDTH), "float32")


def main(count):
    worker = subprocess.Popen(
        [
            *(sys.executable, "-m", "tf_gpipe", "worker", "--port=0"),
            "--forget_after=10",
        ],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=child_process.end_with_parent,
    )
    address = worker.stdout.readline().split()[-1]
    start = usage(worker)
    # This client ends after the others.
    reading, writing = os.pipe()
    lives = fork(lambda: client(address, until=reading))
    most = [usage(worker)]
    for i in range(count):
        end = "kill" if i % 2 else "exit"
        os.waitpid(fork(lambda end=end: client(address, end)), 0)
        most.append(usage(worker))
    before = time.monotonic()
    while time.monotonic() < before + 15:
        assert usage(worker)["threads"] >= start["threads"] + count
        time.sleep(0.5)
    os.write(writing, b"\n")
    _, lived = os.waitpid(lives, 0)
    wait_until(lambda: usage(worker)["threads"] < 50)
    _, again = os.waitpid(fork(lambda: client(address)), 0)
    wait_until(lambda: usage(worker)["threads"] < 50)
    wait_until(lambda: usage(worker)["threads"] > start["threads"] - 5)
    told = {
        "start": start,
        "most": {x: max(y[x] for y in most) for x in start},
        "end": usage(worker),
        "statuses": [lived, again],
        "ended": worker.poll() is not None,
    }
    worker.kill()
    print(json.dumps(told), flush=True)


def wait_until(condition):
    end = time.monotonic() + 120
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


def client(address, end="exit", until=None):
    devices = tf_gpipe.connect([address], timeout=60)
    model = tf_gpipe.PipelinedSequential(
        [
            keras.Input((8,)),
            *(keras.layers.Dense(WIDTH, "relu") for _ in range(2)),
        ],
        num_stages=1,
        num_micro_batches=2,
        devices=devices,
    )
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    if until is not None:
        os.read(until, 1)
        model.fit(X, Y, verbose=0)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit()


def fork(function):
    """Runs a function in a copy of this process.

    TensorFlow is imported but must not have started: a fork would break it.
    """
    pid = os.fork()
    if not pid:
        try:
            child_process.end_with_parent()
            function()
        except SystemExit:
            sys.stdout.flush()
            raise
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def usage(worker):
    found = {"memory": "VmRSS", "threads": "Threads"}
    with open(f"/proc/{worker.pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    # A process that restarts has no memory for a moment.
    return {
        x: int(lines.get(name, "0").split()[0]) for x, name in found.items()
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
