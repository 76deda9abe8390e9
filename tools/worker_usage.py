"""CPU time and memory of worker processes, read from /proc."""

import ctypes
import os
import pathlib
import signal
import time

_TRIMMING = pathlib.Path(__file__).parent / "trimming"
# Environment for workers whose memory is measured. Without it, allocators keep
# memory that TensorFlow has freed: oneDNN's allocator keeps all of it, the C
# library's keeps small pieces.
GIVE_BACK = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(_TRIMMING), os.environ.get("PYTHONPATH")])
    ),
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}
# The same with oneDNN's kernels, TensorFlow's default on x86. Other kernels
# unfold images for the gradients of convolutions, into as many bytes as the
# last-level cache holds at most. AmoebaNet-D crashes TensorFlow 2.21 with this
# environment.
ONEDNN_GIVES_BACK = {
    **GIVE_BACK,
    "TF_ENABLE_ONEDNN_OPTS": "1",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}
# The environments by whose kernels TensorFlow runs.
KERNELS = {"tensorflow": GIVE_BACK, "onednn": ONEDNN_GIVES_BACK}


def cpu_seconds(worker):
    """Returns the CPU seconds that a worker has used so far."""
    with open(f"/proc/{worker.process.pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_memory(workers, step):
    """Returns each worker's peak memory in a step, above that before the step.

    Args:
        workers: List of `Worker`s with `GIVE_BACK` in their environment.
        step: Function without arguments, which runs a step.

    Returns:
        List of bytes.
    """
    # Memory that the first steps allocate for good is not part of the peak.
    for _ in range(2):
        step()
    return added([worker.process.pid for worker in workers], step)


def added(pids, step):
    """Returns processes' peak memory in a step, above that before the step.

    Args:
        pids: List of the ids of processes: of this one, or of others with
            `GIVE_BACK` in their environment.
        step: Function without arguments, which runs a step.

    Returns:
        List of bytes.
    """
    for pid in pids:
        give_back(pid)
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
    """Returns a field of `/proc/PID/status`, such as `VmRSS`, in bytes."""
    return int(_status(pid, field).split()[0]) * 1024


def give_back(pid):
    """Has a process return the memory that it has freed to the system.

    Tracing leaves holes of up to hundreds of MiB in the C library's heap. A
    step whose tensors fit into them would seem to take no memory.

    Args:
        pid: Integer, as in `added`.
    """
    if pid == os.getpid():
        ctypes.CDLL(None).malloc_trim(0)
        return
    bit = 1 << (signal.SIGUSR1 - 1)
    # The second signal is taken when the work for the first is done.
    for _ in range(2):
        # Others would end.
        if not int(_status(pid, "SigBlk"), 16) & bit:
            raise RuntimeError(
                f"Process {pid} was started without `GIVE_BACK` in its "
                "environment: it would not give memory back."
            )
        os.kill(pid, signal.SIGUSR1)
        while int(_status(pid, "ShdPnd"), 16) & bit:
            if _status(pid, "State").startswith("Z"):
                raise RuntimeError(f"Process {pid} has ended.")
            time.sleep(0.001)


def _status(pid, field):
    """Returns a field of `/proc/PID/status`, a string."""
    with open(f"/proc/{pid}/status") as f:
        for line in f:
            if line.startswith(field + ":"):
                return line.partition(":")[2].strip()
    raise RuntimeError(f"The system does not tell {field}.")
