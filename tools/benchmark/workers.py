"""Starts worker processes for a benchmark, and ends them."""

import contextlib
import os
import socket
import subprocess
import sys

import tensorflow as tf


@contextlib.contextmanager
def workers(num_workers, environment=None):
    """Starts TensorFlow servers on loopback, each confined to one core.

    Args:
        num_workers: Integer, at most the number of cores.
        environment: Dict of what their environment has more than ours.

    Yields:
        List of the processes. Their devices are
        `/job:worker/task:0/device:CPU:0` and so on.

    Raises:
        ValueError: If there are not that many cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if num_workers > len(cores):
        raise ValueError(
            f"A core for each worker is needed. Received: {num_workers} "
            f"workers, {len(cores)} cores"
        )
    ports = [str(port) for port in _free_ports(num_workers)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tools.benchmark.server",
                str(core),
                str(task),
                *ports,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        for task, core in zip(range(num_workers), cores, strict=False)
    ]
    try:
        for process in processes:
            if process.stdout.readline().strip() != "serving":
                raise RuntimeError("A worker process failed to start.")
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(
                {"worker": [f"127.0.0.1:{port}" for port in ports]}
            ),
            make_master_device_default=False,
        )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def device(task):
    """Returns the device string of a worker."""
    return f"/job:worker/task:{task}/device:CPU:0"


def cpu_seconds(processes):
    """Returns the CPU seconds that processes have used so far."""
    total = 0
    for process in processes:
        with open(f"/proc/{process.pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def memory(process, field):
    """Returns a figure of a process's memory in bytes, of `/proc`."""
    with open(f"/proc/{process.pid}/status") as f:
        for line in f:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"The system does not tell {field}.")


def forget_peak(process):
    """Makes the peak of a process's memory (`VmHWM`) start anew."""
    with open(f"/proc/{process.pid}/clear_refs", "w") as f:
        f.write("5")


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
