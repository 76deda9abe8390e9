"""A process that finds dead and silent workers, and ends what waits for them.

TensorFlow asks workers without a time limit, at times while it keeps all
threads of Python from running. Hence a process of its own, which has copies of
the client's sockets: once it shuts one down, what waits for that worker ends.

A worker answers if its server begins to speak HTTP/2, on a new connection. Its
threads do, however long an operation takes; those of a process that is stopped
do not, while its host goes on accepting connections.

This file is the program, and needs nothing but Python. `watcher` starts it.
The two exchange lines of JSON:

    client     {"watch": {NAME: [HOST, PORT], ...}}
    client     {"seconds": SECONDS or null}: how long they may be silent
    client     {"sockets": [NAME, ...]}, with a copy of each socket
    heartbeat  {"lost": NAME, "why": DEAD or SILENT}

and the client writes the numbers of signals to a socket of their own.
"""

import contextlib
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

DEAD = "dead"
SILENT = "silent"
OTHER = "other"
# What a client of HTTP/2 says first, with settings that are the usual ones.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
QUESTION_BYTES = len(_HELLO)
_FRAME_HEADER = 9
_SETTINGS = 4
# Between two questions at most, and after one that was refused.
_PAUSE_SECONDS = 1.0
_AGAIN_SECONDS = 0.1
# How long a worker may be silent if the user wants it to end.
_HURRY_SECONDS = 5.0
# For an answer at most: meanwhile the user may want it to end.
_ANSWER_SECONDS = 10.0
# Three years. Systems do not wait any number of seconds.
MOST_SECONDS = 1e8
# Of Linux, between two probes of TCP.
_MOST_PAUSE_SECONDS = 32767
# More sockets of a client do not fit a message.
MOST_SOCKETS = 200


def ask(
    host: str,
    port: int,
    seconds: float,
    kept: list[socket.socket] | None = None,
) -> str | None:
    """Asks a server whether it is there.

    Args:
        host: IP address.
        port: Integer.
        seconds: Float, how long to wait for its answer.
        kept: List that gets the connection, if the server has answered. It
            stays open: a worker knows by it that somebody is there.

    Returns:
        `None` if it is; `DEAD` if nothing listens there; `OTHER` if what
        listens is no such server; `SILENT` if there is no answer in this time.
    """
    end = time.monotonic() + seconds
    header = b""
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(
                socket.create_connection((host, port), seconds)
            )
            connection.sendall(_HELLO)
            while len(header) < _FRAME_HEADER:
                # What has arrived counts, however late it is looked at.
                connection.settimeout(max(end - time.monotonic(), 0.001))
                data = connection.recv(_FRAME_HEADER - len(header))
                if not data:
                    return OTHER
                header += data
            if header[3] != _SETTINGS:
                return OTHER
            if kept is not None:
                stack.pop_all()
                kept.append(connection)
    except TimeoutError:
        return SILENT
    except OSError:
        return DEAD
    return None


class _Worker:
    """A worker, asked again and again by a thread."""

    def __init__(self, name: str, host: str, port: int):
        self.name = name
        self._address = (host, port)
        self._seconds: float | None = None
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._lost = False

    def allow(self, seconds: float | None) -> None:
        """Sets how long it may be silent."""
        self._seconds = seconds and min(seconds, MOST_SECONDS)

    def hurry(self) -> None:
        """Lets it be silent for a moment only."""
        self._seconds = min(self._seconds or _HURRY_SECONDS, _HURRY_SECONDS)

    def hold(self, sockets: list[socket.socket]) -> None:
        """Takes the sockets of the client that lead to this worker."""
        with self._lock:
            for each in self._sockets:
                each.close()
            self._sockets = sockets
            if self._lost:
                self._shut()
            elif self._seconds is not None:
                for each in sockets:
                    _probe_idle(each, self._seconds)

    def watch(self) -> str:
        """Returns what has become of it, once it is lost."""
        answered = time.monotonic()
        refused = False
        kept: list[socket.socket] = []
        while True:
            # Short enough to try several times.
            limit = self._seconds or _HURRY_SECONDS
            state = ask(*self._address, min(limit / 3, _ANSWER_SECONDS), kept)
            while len(kept) > 1:
                kept.pop(0).close()
            now = time.monotonic()
            if state is None:
                answered, refused = now, False
                time.sleep(min(limit / 4, _PAUSE_SECONDS))
            elif state != SILENT:
                if refused:
                    state = DEAD
                    break
                refused = True
                time.sleep(_AGAIN_SECONDS)
            elif self._seconds is not None and now - answered >= self._seconds:
                break
        with self._lock:
            self._lost = True
            self._shut()
        return state

    def _shut(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _probe_idle(each: socket.socket, seconds: float) -> None:
    """Makes the system notice that the host at the other end has restarted."""
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", 0))
    pause = min(max(1, int(seconds / 4)), _MOST_PAUSE_SECONDS)
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        each.setsockopt(socket.IPPROTO_TCP, idle, pause)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _serve(client: socket.socket, signals: socket.socket) -> None:
    """Watches what the client tells, until it is gone."""
    parent = os.getppid()
    workers: dict[str, _Worker] = {}
    lost: queue.Queue = queue.Queue()

    def watch(worker: _Worker) -> None:
        lost.put({"lost": worker.name, "why": worker.watch()})

    def tell() -> None:
        while True:
            client.sendall(json.dumps(lost.get()).encode() + b"\n")

    threading.Thread(target=tell, daemon=True).start()
    pending = b""
    # Children of the client may hold its end open when it is gone.
    while os.getppid() == parent:
        listened = [client, signals]
        ready, _, _ = select.select(listened, [], [], _PAUSE_SECONDS)
        if signals in ready and signal.SIGINT in signals.recv(4096):
            for worker in workers.values():
                worker.hurry()
        if client not in ready:
            continue
        data, copies, _, _ = socket.recv_fds(client, 2**16, MOST_SOCKETS)
        if not data:
            return
        sockets = [socket.socket(fileno=copy) for copy in copies]
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            for name, (host, port) in message.get("watch", {}).items():
                workers[name] = _Worker(name, host, port)
                threading.Thread(
                    target=watch, args=(workers[name],), daemon=True
                ).start()
            if "seconds" in message:
                for worker in workers.values():
                    worker.allow(message["seconds"])
            if "sockets" in message:
                held: dict[str, list] = {name: [] for name in workers}
                for name in message["sockets"]:
                    held[name].append(sockets.pop(0))
                for name, worker in workers.items():
                    worker.hold(held[name])


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        _serve(*(socket.socket(fileno=int(x)) for x in sys.argv[1:]))
