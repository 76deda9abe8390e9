"""The client's record of its workers: which are dead or silent.

A call that waits for a lost worker fails, since `heartbeat` shuts down the
sockets that lead to it.
"""

import contextlib
import contextvars
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping

import tensorflow as tf

from tf_gpipe.devices import fail_fast
from tf_gpipe.devices import heartbeat
from tf_gpipe.devices import sockets

# The time between two scans of this process's sockets.
_LOOK_SECONDS = 0.2


class Watcher:
    """Watches workers, by a thread and a `heartbeat` process.

    Args:
        workers: Dict from the name of a worker to `(host, port)`, where the
            host is an IP address.
        seconds: Float, how long a worker may be silent, or `None` for no
            limit.

    Attributes:
        seconds: Float or `None`, the silence after which a worker is given up.
            Less than the argument, so that a call fails within that time, and
            still less after Ctrl-C.
        lost: Dict from the names of lost workers to the reason:
            `heartbeat.DEAD` or `heartbeat.SILENT`.
        pid: Integer, the id of the `heartbeat` process.
    """

    def __init__(
        self, workers: Mapping[str, tuple[str, int]], seconds: float | None
    ):
        self.seconds: float | None = None
        self.lost: dict[str, str] = {}
        self._names = {address: name for name, address in workers.items()}
        self._told: set = set()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._socket, other = socket.socketpair()
        self._socket.settimeout(_LOOK_SECONDS)
        self._wake, signals = socket.socketpair()
        _hear_interrupts(self._wake)
        with other, signals:
            # In another session, so that Ctrl-C does not end it.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-I", "-S", heartbeat.__file__),
                    *(str(each.fileno()) for each in (other, signals)),
                ],
                pass_fds=[other.fileno(), signals.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._send({"watch": dict(workers)})
        self.allow(seconds)
        self._thread = threading.Thread(
            target=self._run, name="tf_gpipe-watcher", daemon=True
        )
        self._thread.start()

    def allow(self, seconds: float | None) -> None:
        """Sets for how many seconds a worker may be silent, or `None`."""
        self.seconds = seconds
        if seconds is not None:
            # After a loss, a call still waits until TensorFlow has tried to
            # connect once more.
            self.seconds = max(
                seconds - fail_fast.RECONNECT_SECONDS, seconds / 2
            )
        self._send({"seconds": self.seconds})

    def wait(self, seconds: float) -> None:
        """Waits until a worker is lost, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.lost), seconds)

    def look(self) -> None:
        """Sends `heartbeat` this process's sockets to workers, if changed."""
        there = {
            ends
            for each in sockets.borrowed()
            if (ends := sockets.ends(each)) and ends[1] in self._names
        }
        if there == self._told:
            return
        with sockets.copies() as copies:
            found = {
                ends: each
                for each in copies
                if (ends := sockets.ends(each)) and ends[1] in self._names
            }
            # A message without sockets, too, if there are none any more.
            for first in range(0, len(found) or 1, heartbeat.MOST_SOCKETS):
                some = [*found][first : first + heartbeat.MOST_SOCKETS]
                names = [self._names[far] for _, far in some]
                self._send(
                    {"sockets": names, "more": first > 0},
                    [found[x].fileno() for x in some],
                )
            self._told = set(found)

    def _send(self, message: dict, descriptors: list[int] | None = None):
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            socket.send_fds(self._socket, [line], descriptors or [])

    def _run(self) -> None:
        for (_, port), name in list(self._names.items()):
            # Of a host's addresses, TensorFlow may choose another. Here, since
            # a look-up has no time limit.
            for host in sockets.addresses(name.rpartition(":")[0]):
                self._names.setdefault((host, port), name)
        pending = b""
        while True:
            # It may succeed the next time: too many files were open, say.
            with contextlib.suppress(OSError):
                self.look()
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                print(
                    "tf_gpipe: the process that finds lost workers has ended. "
                    "Calls may wait for a lost worker without a time limit.",
                    file=sys.stderr,
                    flush=True,
                )
                return
            *lines, pending = (pending + data).split(b"\n")
            for message in map(json.loads, lines):
                with self._changed:
                    self.seconds = message["seconds"]
                    self.lost[message["lost"]] = message["why"]
                    self._changed.notify_all()


def _hear_interrupts(wake: socket.socket) -> bool:
    """Has signals written to a socket at once, even if Python is blocked.

    Returns:
        Boolean, whether that is possible: only from the main thread, and if
        nobody else, such as `asyncio`, uses Python's wake-up descriptor.
    """
    wake.setblocking(False)
    try:
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    except ValueError:
        return False
    if before != -1:
        signal.set_wakeup_fd(before)
    return before == -1


# The watcher of the workers that this process is connected to.
current: Watcher | None = None
_needed: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "needed", default=frozenset()
)


@contextlib.contextmanager
def needing(names: Iterable[str]) -> Iterator[None]:
    """A scope in which `check` raises an error if one of these is lost."""
    token = _needed.set(frozenset(names))
    try:
        yield
    finally:
        _needed.reset(token)


def check() -> None:
    """Raises `tf.errors.UnavailableError` if a needed worker is lost."""
    if current is None:
        return
    lost = _needed.get() & current.lost.keys()
    if lost:
        raise tf.errors.UnavailableError(
            None, None, f"Lost workers: {', '.join(lost)}"
        )
