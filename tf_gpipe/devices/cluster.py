"""Worker processes: connecting to them, and telling which one is gone."""

import collections
import functools
import socket
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import errors
from tf_gpipe.devices import listening
from tf_gpipe.devices import placement

_JOB = "worker"
# What TensorFlow calls the job of a process that has none.
_CLIENT = "localhost"
# Time for a worker to answer at all, once it has been there.
_PROBE_SECONDS = 2.0
# Time for the sockets of a process that ends to close.
_CLOSING_SECONDS = 2.0


def connect(addresses: Sequence[str], timeout: float = 30.0) -> list[str]:
    """Connects to workers, and returns their devices for `devices=`.

    Start the workers first, with `python -m tf_gpipe worker --port=PORT`, and
    connect before anything is computed. TensorFlow's servers have no
    authentication: use them on a private network. This process gets one too.
    It answers at the address by which workers reach it alone, which is
    loopback if they are there; on systems other than Linux, at every address.

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
    if not connected:
        _wait_for(addresses, timeout)
        _open(addresses)
    elif connected != addresses:
        raise ValueError(
            "A process can connect to workers only once. Connected to: "
            f"{', '.join(connected)}. Received: {', '.join(addresses)}"
        )
    return [
        device
        for task in range(len(addresses))
        for device in placement.accelerators(
            f"/job:{_JOB}/replica:0/task:{task}/"
        )
    ]


def _open(addresses: list[str]) -> None:
    """Connects, which opens a server in this process that workers ask."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    address = listening.address_towards(hosts)
    port = listening.unused_port(address)
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec({_JOB: addresses, _CLIENT: [f"{address}:{port}"]}),
        job_name=_CLIENT,
        make_master_device_default=False,
    )
    # The server starts with the first use of any device.
    tf.config.list_logical_devices()
    if listening.AVAILABLE:
        listening.accept_only(address, port)
    else:
        # Only Linux lets it be kept from the others.
        address = listening.EVERY_ADDRESS
    listening.announce("client", address, port)


def _checked(addresses: Sequence[str]) -> list[str]:
    addresses = [addresses] if isinstance(addresses, str) else list(addresses)
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


def _wait_for(addresses: list[str], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    missing = addresses
    while missing := unreachable(missing):
        if time.monotonic() > deadline:
            stages = [str(addresses.index(each)) for each in missing]
            raise tf.errors.UnavailableError(
                None,
                None,
                f"No worker answers at {', '.join(missing)} within "
                f"{timeout:g} seconds. With a device a worker, stage "
                f"{', '.join(stages)} would run there. Start one with "
                "`python -m tf_gpipe worker --port=PORT`, and see that "
                "its `--bind` address is the one given here.",
            )
        time.sleep(0.2)


def unreachable(addresses: Iterable[str], broken: bool = False) -> list[str]:
    """Returns those of `addresses` where nothing answers.

    If a connection has `broken`, they are asked for some time: the sockets of
    a process that is killed close one after another, so that for a moment it
    may still answer.
    """
    end = time.monotonic() + (_CLOSING_SECONDS if broken else 0.0)
    while (
        not (found := [x for x in addresses if not _answers(x)])
        and time.monotonic() < end
    ):
        time.sleep(0.1)
    return found


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _addresses() -> list[str]:
    """Returns the addresses of the workers that we are connected to."""
    return upstream.connected_to().get(_JOB, [])


def naming_failures(method: Callable) -> Callable:
    """Returns a method of a pipelined model that names what fails.

    TensorFlow tells of a worker that has been killed or started again by one
    of several errors, which name a connection or an operation. They become
    `tf.errors.UnavailableError`s, if the worker of a stage no longer answers
    or has forgotten the model.
    """

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except tf.errors.OpError as error:
            message = _diagnosis(self._pipeline, error)
            if message is None:
                if self._pipeline is not None:
                    errors.add_place(error, self._pipeline)
                raise
            raise tf.errors.UnavailableError(None, None, message) from error

    return wrapper


def _diagnosis(pipeline: Any, error: tf.errors.OpError) -> str | None:
    """Returns which worker failed, or `None` if none did."""
    if pipeline is None:
        return None
    addresses = _addresses()
    stages: dict[str, list[str]] = collections.defaultdict(list)
    for stage in pipeline.stages:
        for device in map(tf.DeviceSpec.from_string, stage.devices):
            if addresses and device.job == _JOB:
                stages[addresses[device.task]].append(str(stage.index))
    # What a worker that was started again says to a client of the old one.
    again = "Unable to find a context_id" in error.message
    broken = isinstance(error, tf.errors.UnavailableError) and not again
    gone = unreachable(stages, broken)
    if not gone and not again:
        return None
    lines = [
        f"Stage {', '.join(stages[address])} has failed: its worker at "
        f"{address} no longer answers."
        for address in gone
    ] or ["A worker has been started again and no longer has its stage."]
    return "\n".join(
        [
            *lines,
            "The weights of its stage are lost. Start it again, with `python "
            "-m tf_gpipe worker --port=PORT`, then this program, and resume "
            "from the newest checkpoint.",
        ]
    )
