"""`connect`: connects this process to worker processes."""

import contextlib
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe.devices import fail_fast
from tf_gpipe.devices import heartbeat as heartbeats
from tf_gpipe.devices import listening
from tf_gpipe.devices import placement
from tf_gpipe.devices import watcher
from tf_gpipe.devices import worker_lost

# TensorFlow's job name for a process that is in no cluster.
_CLIENT = "localhost"
_AGAIN_SECONDS = 0.2
_SCHEME = "grpc://"
# TensorFlow's first request to a worker, of <tensorflow/core/protobuf/
# worker_service.proto>. It has no arguments, and returns the devices.
_STATUS = "/tensorflow.WorkerService/GetStatus"
_ADDRESS = re.compile(r"([^/\s\0]+):([0-9]{1,5})")
_NO_WORKER = {
    heartbeats.DEAD: "nothing listens there",
    heartbeats.SILENT: "there is no answer",
    heartbeats.OTHER: "what listens there is no worker",
}
# Whether an attempt to connect has failed: TensorFlow cannot make another one.
_half_connected = False


def connect(
    addresses: Sequence[str],
    timeout: float = 15.0,
    heartbeat: float | None = 30.0,
    at_least: int | None = None,
) -> list[str]:
    """Connects to workers, and returns their devices for `devices=`.

    Start the workers first, with `python -m tf_gpipe worker --port=PORT`, and
    connect before anything is computed. TensorFlow's servers have no
    authentication: use them on a private network. This process gets a server,
    too. It answers only at the address by which workers reach it (loopback, if
    they are on this host); on systems other than Linux, at every address.

    From then on whatever needs a lost worker raises a
    `tf.errors.UnavailableError`, which names its stages and address: at once if
    the worker's process has ended; within `heartbeat` seconds if the worker is
    silent, as without power. A worker that computes for long is not silent.

    Args:
        addresses: List of strings `"host:port"`, one a worker. All workers
            must be able to reach one another by them.
        timeout: Float, seconds to wait for workers that are still starting.
        heartbeat: Float, seconds for which a worker may be silent before it
            is taken for dead, or `None` for as long as it likes.
        at_least: Positive integer, how many workers are enough: once `timeout`
            is over, those that do not answer are named and left out. Stages
            may share a device. Defaults to `None`: all of them.

    Returns:
        List of TensorFlow device strings in the order of the workers: the
        accelerators of each, or else its CPU.

    Raises:
        ValueError: If an address is not valid, is given twice, or workers
            have been connected to before.
        TypeError: If an argument is of another type.
        tf.errors.UnavailableError: If a worker cannot be reached.

    Example:

    ```python
    devices = tf_gpipe.connect(["10.0.0.1:2222", "10.0.0.2:2222"])
    model = tf_gpipe.PipelinedSequential(layers, devices=devices)
    ```
    """
    addresses = _checked(addresses)
    timeout = checks.number(
        "timeout", timeout, "a number of seconds, of 0 or more"
    )
    if heartbeat is not None:
        heartbeat = checks.number(
            "heartbeat",
            heartbeat,
            "a number of seconds above 0, or None for no limit",
            above=True,
        )
    if at_least is not None:
        at_least = checks.positive_integer("at_least", at_least)
        if at_least > len(addresses):
            raise ValueError(
                "`at_least` must be at most the number of `addresses`, "
                f"{len(addresses)}. Received: at_least={at_least}"
            )
    connected = worker_lost.addresses()
    if not connected:
        with contextlib.ExitStack() as kept:
            found = _wait_for(
                addresses, timeout, at_least or len(addresses), kept
            )
            _check_apart(found)
            _open(found, heartbeat)
        connected = list(found)
    elif _half_connected:
        raise worker_lost.WorkerLostError(
            None,
            None,
            "This process has failed to connect to workers, and TensorFlow "
            "tries only once. Start this program again.",
        )
    elif connected != addresses and not (
        at_least and [x for x in addresses if x in connected] == connected
    ):
        raise ValueError(
            "A process can connect to workers only once. Connected to: "
            f"{', '.join(connected)}. Received: {', '.join(addresses)}"
        )
    elif watcher.current is not None:
        watcher.current.allow(heartbeat)
    return [
        device
        for task in range(len(connected))
        for device in placement.accelerators(
            f"/job:{worker_lost.JOB}/replica:0/task:{task}/"
        )
    ]


def _open(found: dict[str, tuple[str, int]], heartbeat: float | None) -> None:
    """Connects TensorFlow to workers, and makes the `Watcher` of them.

    This opens a server in this process, which the workers send tensors to.
    """
    global _half_connected
    fail_fast.fail_fast()
    address = listening.address_towards([host for host, _ in found.values()])
    port = listening.unused_port(address)
    watcher.current = watcher.Watcher(found, heartbeat)
    _half_connected = True
    try:
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(
                {worker_lost.JOB: list(found), _CLIENT: [f"{address}:{port}"]}
            ),
            job_name=_CLIENT,
            make_master_device_default=False,
        )
        # The server starts with the first use of any device.
        tf.config.list_logical_devices()
    except tf.errors.OpError as error:
        watcher.current.wait(worker_lost.CLOSING_SECONDS)
        lost = watcher.current.lost or worker_lost.states(found)
        at = "; ".join(f"{x} ({_NO_WORKER[lost[x]]})" for x in lost)
        raise worker_lost.WorkerLostError(
            None,
            None,
            f"Cannot connect to workers at {at or ', '.join(found)}. Start "
            "them again, and this program. TensorFlow says: "
            f"{error.message.splitlines()[0] if error.message else error!r}",
        ) from error
    watcher.current.look()
    if listening.AVAILABLE:
        listening.accept_only(address, port)
    if not listening.AVAILABLE:
        # Only Linux can restrict a server to one address.
        address = listening.EVERY_ADDRESS
    listening.announce("client", address, port)
    _half_connected = False


def _checked(addresses: Any) -> list[str]:
    given = checks.items(
        [addresses] if isinstance(addresses, str) else addresses,
        "`addresses` must be a list of strings host:port, one a worker. "
        f"Received: addresses={addresses!r}",
    )
    checked = []
    for each in given:
        address = str(each).removeprefix(_SCHEME)
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2]) < 2**16:
            raise ValueError(
                "Each address of a worker must be of the form host:port. "
                f"Received: {each!r}"
            )
        if ":" in match[1]:
            raise ValueError(
                "Workers are reached by IPv4: each address must be of the "
                "form host:port, where the host is a name or an IPv4 address. "
                f"Received: {each!r}"
            )
        checked.append(address)
    if not checked or len(set(checked)) < len(checked):
        raise ValueError(
            "`addresses` must name each worker once, and at least one. "
            f"Received: {addresses}"
        )
    return checked


def _check_apart(found: dict[str, tuple[str, int]]) -> None:
    """Refuses two names of the same IP address and port."""
    by_place: dict[tuple[str, int], str] = {}
    for name, place in found.items():
        other = by_place.setdefault(place, name)
        if other != name:
            raise ValueError(
                "`addresses` must name each worker once. "
                f"'{other}' and '{name}' are the same, {place[0]}:{place[1]}. "
                f"Received: {list(found)}"
            )


def _ask_as_tensorflow(host: str, port: int, seconds: float) -> str | None:
    """Sends a server TensorFlow's first request, but with a time limit.

    TensorFlow has none, and would wait for ever for a server that is not
    TensorFlow's.

    Returns:
        The state of the server, as of `heartbeat.ask`.
    """
    grpc = _grpc()
    options = {"grpc.enable_http_proxy": 0, "grpc.use_local_subchannel_pool": 1}
    with grpc.insecure_channel(f"{host}:{port}", [*options.items()]) as channel:
        try:
            status = channel.unary_unary(_STATUS)(b"", timeout=seconds)
        except grpc.RpcError as error:
            silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return heartbeats.SILENT if silent else heartbeats.OTHER
    return None if status else heartbeats.OTHER


def _grpc() -> Any:
    """Returns the package `grpc`, which only programs with workers import.

    Raises:
        ImportError: If it is another module of that name.
    """
    import grpc

    if not hasattr(grpc, "insecure_channel"):
        raise ImportError(
            "Workers are asked by the package grpc, and another module has its "
            f"name. Rename that one. Received: {grpc}"
        )
    return grpc


def _wait_for(
    addresses: list[str],
    timeout: float,
    enough: int,
    scope: contextlib.ExitStack,
) -> dict[str, tuple[str, int]]:
    """Returns the IP address and port of each worker, once all answer.

    Args:
        addresses: List of strings `"host:port"`.
        timeout: Float, seconds to wait.
        enough: Integer. If so many answer within `timeout`, only they are
            returned; otherwise it is an error.
        scope: Exit stack that gets an open connection to each worker, so that
            no worker restarts before the program uses it.

    Raises:
        tf.errors.UnavailableError: If too few answer.
        Exception: What has kept a thread from asking.
    """
    # At most a time that the system can wait for.
    deadline = time.monotonic() + min(timeout, heartbeats.MOST_SECONDS)
    unheard = _NO_WORKER[heartbeats.SILENT]
    states: dict[str, str] = dict.fromkeys(addresses, unheard)
    answers: queue.Queue = queue.Queue()

    def left() -> float:
        return max(deadline - time.monotonic(), 0.05)

    def find(address: str) -> dict[str, tuple[str, int]]:
        name, _, port = address.rpartition(":")
        while True:
            kept: list[socket.socket] = []
            seconds = min(left(), worker_lost.PROBE_SECONDS)
            try:
                place = socket.gethostbyname(name), int(port)
            except (OSError, ValueError):
                states[address] = "this host is not known"
            else:
                state = heartbeats.ask(*place, seconds, kept)
                state = state or _ask_as_tensorflow(*place, left())
                for connection in kept:
                    scope.enter_context(connection)
                if state is None:
                    return {address: place}
                states[address] = _NO_WORKER[state]
            # Too little time is left for one more attempt.
            if time.monotonic() > deadline - 2 * _AGAIN_SECONDS:
                return {}
            time.sleep(_AGAIN_SECONDS)

    def answer(address: str) -> None:
        try:
            answers.put(find(address))
        except BaseException as error:
            answers.put(error)

    for address in addresses:
        # A thread for each: DNS look-ups have no time limit.
        threading.Thread(target=answer, args=(address,), daemon=True).start()
    found: dict[str, tuple[str, int]] = {}
    failed: list[BaseException] = []
    # Some time more than the deadline, for the threads' last attempts.
    end = deadline + 2 * _AGAIN_SECONDS
    with contextlib.suppress(queue.Empty):
        for _ in addresses:
            each = answers.get(timeout=max(end - time.monotonic(), 0))
            if isinstance(each, BaseException):
                failed.append(each)
            else:
                found.update(each)
    missing = [x for x in addresses if x not in found]
    reasons = "; ".join(f"{x}: {states[x]}" for x in missing)
    if missing and len(found) >= enough:
        print(
            f"tf_gpipe: going on without {len(missing)} of {len(addresses)} "
            f"workers. ({reasons}.)",
            file=sys.stderr,
            flush=True,
        )
    elif failed:
        raise failed[0]
    elif missing:
        stages = [str(addresses.index(each)) for each in missing]
        raise tf.errors.UnavailableError(
            None,
            None,
            f"No worker answers at {', '.join(missing)} within "
            f"{timeout:g} seconds. ({reasons}.) With a device a worker, stage "
            f"{', '.join(stages)} would run there. Start one with "
            "`python -m tf_gpipe worker --port=PORT`, and see that "
            "its `--bind` address is the one given here.",
        )
    return {x: found[x] for x in addresses if x in found}
