"""What worker processes use of this host: CPU time and memory."""

import os

# The environment of processes whose memory is measured. Without it, memory that
# TensorFlow has given back would be kept: by the allocator of oneDNN all of it,
# by that of the C library small pieces. Its kernels stay those of oneDNN: the
# gradients of convolutions that TensorFlow has beside them unfold images to as
# much as the last cache of the host holds, which may be 384 MiB.
GIVE_BACK = {
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


def cpu_seconds(worker):
    """Returns the CPU seconds that a worker has used so far."""
    with open(f"/proc/{worker.process.pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    return added([worker.process.pid for worker in workers], step)


def added(pids, step):
    """Returns what a step needs of processes' memory, above that before.

    Args:
        pids: List of the ids of processes.
        step: Function without arguments, which runs a step.

    Returns:
        List of bytes.
    """
    idle = [memory(pid, "VmRSS") for pid in pids]
    for pid in pids:
        # The peak (`VmHWM`) starts anew.
        with open(f"/proc/{pid}/clear_refs", "w") as f:
            f.write("5")
    step()
    return [
        memory(pid, "VmHWM") - before
        for pid, before in zip(pids, idle, strict=True)
    ]


def memory(pid, field):
    """Returns a figure of a process's memory in bytes, of `/proc`."""
    with open(f"/proc/{pid}/status") as f:
        for line in f:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"The system does not tell {field}.")
