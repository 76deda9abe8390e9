"""Worker processes: connecting to them, and telling which one is gone."""

import socket
import time
from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context

_JOB = "worker"
# Time for a worker to answer at all, once it has been there.
_PROBE_SECONDS = 2.0
# Time for the sockets of a process that ends to close.
_CLOSING_SECONDS = 2.0


def connect(addresses: Sequence[str], timeout: float = 30.0) -> list[str]:
    """Connects to workers, and returns their devices for `devices=`.

    Start the workers first, with `python -m tf_gpipe.worker --port=PORT`, and
    connect before anything is computed. TensorFlow's servers have no
    authentication: use them on a private network.

    Args:
        addresses: List of strings `"host:port"`, one a worker. All workers
            must be able to reach one another by them.
        timeout: Float, seconds to wait for workers that are still starting.

    Returns:
        List of TensorFlow device strings in the order of the workers: the
        accelerators of each, or else its CPU.

    Raises:
        ValueError: If an address is not valid, is given twice, or workers
            have been connected to before.
        tf.errors.UnavailableError: If a worker cannot be reached.

    Example:

    ```python
    devices = tf_gpipe.connect(["10.0.0.1:2222", "10.0.0.2:2222"])
    model = tf_gpipe.PipelinedSequential(layers, devices=devices)
    ```
    """
    addresses = _checked(addresses)
    connected = _addresses()
    if connected != addresses:
        if connected:
            raise ValueError(
                "A process can connect to workers only once. Connected to: "
                f"{', '.join(connected)}. Received: {', '.join(addresses)}"
            )
        deadline = time.monotonic() + timeout
        missing = addresses
        while True:
            missing = unreachable(missing)
            if not missing:
                break
            if time.monotonic() > deadline:
                stages = [str(addresses.index(each)) for each in missing]
                raise tf.errors.UnavailableError(
                    None,
                    None,
                    f"No worker answers at {', '.join(missing)} within "
                    f"{timeout:g} seconds. With a device a worker, stage "
                    f"{', '.join(stages)} would run there. Start one with "
                    "`python -m tf_gpipe.worker --port=PORT`, and see that "
                    "its `--bind` address is the one given here.",
                )
            time.sleep(0.2)
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec({_JOB: addresses}),
            make_master_device_default=False,
        )
    devices = []
    for task in range(len(addresses)):
        own = [
            x
            for x in tf.config.list_logical_devices()
            if f"/job:{_JOB}/replica:0/task:{task}/" in x.name
        ]
        accelerators = [x for x in own if x.device_type in ("GPU", "TPU")]
        cpus = [x for x in own if x.device_type == "CPU"]
        devices += [x.name for x in accelerators or cpus[:1]]
    return devices


def unreachable(addresses: Iterable[str], broken: bool = False) -> list[str]:
    """Returns those of `addresses` where nothing answers.

    Args:
        addresses: List of strings.
        broken: Boolean, whether a connection has broken. The sockets of a
            process that is killed close one after another: for a moment it
            may still answer, and is asked again.
    """
    end = time.monotonic() + (_CLOSING_SECONDS if broken else 0.0)
    while not (found := [x for x in addresses if not _answers(x)]):
        if time.monotonic() >= end:
            break
        time.sleep(0.1)
    return found


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def address(device: str) -> str | None:
    """Returns the address of a device's worker.

    `None` if the device belongs to this process.
    """
    spec = tf.DeviceSpec.from_string(device)
    addresses = _addresses()
    if spec.job != _JOB or not addresses:
        return None
    return addresses[spec.task or 0]


def _addresses() -> list[str]:
    """Returns the addresses of the workers that we are connected to."""
    server_def = context.get_server_def()
    if server_def is None:
        return []
    for job in server_def.cluster.job:
        if job.name == _JOB:
            return [job.tasks[task] for task in sorted(job.tasks)]
    return []


def _checked(addresses: Sequence[str]) -> list[str]:
    if isinstance(addresses, str):
        addresses = [addresses]
    addresses = list(addresses)
    for each in addresses:
        host, _, port = str(each).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                "Each address of a worker must be of the form host:port. "
                f"Received: {each!r}"
            )
    if not addresses or len(set(addresses)) < len(addresses):
        raise ValueError(
            "`addresses` must name each worker once, and at least one. "
            f"Received: {addresses}"
        )
    return addresses
