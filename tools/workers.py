"""Runs a command with worker processes on this host, and ends them.

    python -m tools.workers 2 python -m trainers.image_classification

starts two workers (`tf_gpipe.worker`) on loopback, runs the command with one
more argument, `--workers=127.0.0.1:PORT,127.0.0.1:PORT`, and ends the workers
when it has ended. The exit status is the command's.
"""

import argparse
import contextlib
import os
import subprocess
import sys

import tf_gpipe
from tools import command_line
from tools import foreground

# The environment of workers whose memory is measured. Without it, memory that
# TensorFlow has given back would be kept: by the allocator of oneDNN all of it,
# by that of the C library small pieces.
GIVE_BACK = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


class Worker:
    """A worker process on this host.

    Args:
        core: Integer, the only CPU core that it may use, or `None`.
        port: Integer, or 0 for a free one.
        environment: Dict of what its environment has more than ours.

    Attributes:
        process: The `subprocess.Popen`.
        address: String `"host:port"`.
        device: String, its TensorFlow device, once we have connected to it.
    """

    def __init__(self, core=None, port=0, environment=None):
        confine = None
        if core is not None:
            # Before TensorFlow starts its threads, which inherit it.
            confine = lambda: os.sched_setaffinity(0, {core})  # noqa: E731
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tf_gpipe.worker", f"--port={port}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            preexec_fn=confine,
        )
        self.address = self.device = None

    def wait_until_ready(self):
        """Waits until it accepts connections, and learns its address."""
        line = self.process.stdout.readline()
        self.address = line.rpartition(" ")[2].strip()
        if not line.startswith("worker at "):
            raise RuntimeError("A worker process failed to start.")

    def cpu_seconds(self):
        """Returns the CPU seconds that it has used so far."""
        with open(f"/proc/{self.process.pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, field):
        """Returns a figure of its memory in bytes, of `/proc`."""
        with open(f"/proc/{self.process.pid}/status") as f:
            for line in f:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
        raise RuntimeError(f"The system does not tell {field}.")

    def forget_peak(self):
        """Makes the peak of its memory (`VmHWM`) start anew."""
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as f:
            f.write("5")

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(num_workers, environment=None, one_core=False):
    """Starts workers on loopback, and ends them.

    Args:
        num_workers: Integer.
        environment: Dict of what their environment has more than ours.
        one_core: Boolean, whether each is confined to a core of its own.

    Yields:
        List of `Worker`s.

    Raises:
        ValueError: If there are not that many cores.
    """
    cores = [None] * num_workers
    if one_core:
        cores = sorted(os.sched_getaffinity(0))[:num_workers]
        if num_workers > len(cores):
            raise ValueError(
                "A core for each worker is needed. Received: "
                f"{num_workers} workers, {len(cores)} cores"
            )
    workers = [Worker(core, environment=environment) for core in cores]
    try:
        for worker in workers:
            worker.wait_until_ready()
        yield workers
    finally:
        for worker in workers:
            worker.kill()


@contextlib.contextmanager
def connected(num_workers, **kwargs):
    """As `started`, and connects this process to them."""
    with started(num_workers, **kwargs) as workers:
        devices = tf_gpipe.connect([worker.address for worker in workers])
        for worker, device in zip(workers, devices, strict=True):
            worker.device = device
        yield workers


def peak_memory(workers, step):
    """Returns what a step needs of each worker's memory, above that between.

    Args:
        workers: List of `Worker`s, with `GIVE_BACK` in their environment.
        step: Function without arguments, which runs a step.

    Returns:
        List of bytes.
    """
    # What the first steps leave is not the activations'.
    for _ in range(2):
        step()
    idle = [worker.memory("VmRSS") for worker in workers]
    for worker in workers:
        worker.forget_peak()
    step()
    return [
        worker.memory("VmHWM") - before
        for worker, before in zip(workers, idle, strict=True)
    ]


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tools.workers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "num_workers", type=command_line.positive, help="how many to start"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="what to run, with arguments"
    )
    args = parser.parse_args()
    if not args.command:
        parser.error("a command to run is needed")
    with started(args.num_workers) as workers:
        addresses = ",".join(worker.address for worker in workers)
        status = foreground.call([*args.command, f"--workers={addresses}"])
    sys.exit(status)


if __name__ == "__main__":
    main()
