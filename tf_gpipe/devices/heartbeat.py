"""A process that finds dead and silent workers, and ends calls that wait.

TensorFlow waits for workers without a time limit, at times while it blocks all
Python threads. This is therefore another process, with copies of the client's
sockets: once it shuts down the sockets of a worker, calls that wait for that
worker fail.

Time in which this process or the client is stopped, as by Ctrl-Z, is no silence
of workers, which may be stopped with it.

A worker counts as answering if its server begins to speak HTTP/2 on a new
connection. Its threads do, however long an operation takes; those of a stopped
process do not, although its host goes on accepting connections.

This file is the program, and needs nothing but Python. `watcher` starts it.
The two exchange lines of JSON:

    client     {"watch": {NAME: [HOST, PORT], ...}}
    client     {"seconds": SECONDS or null}: how long workers may be silent
    client     {"sockets": [NAME, ...], "more": BOOL}, with a copy of each
               socket: in place of those before, or in addition to them
    heartbeat  {"lost": NAME, "why": DEAD or SILENT, "seconds": SECONDS or null}

On a second socket the client sends the numbers of the signals that it gets.
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
# The first message of an HTTP/2 client, with default settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
QUESTION_BYTES = len(_HELLO)
_FRAME_HEADER = 9
_SETTINGS = 4
# The longest pause between two questions, and the pause after one in vain.
_PAUSE_SECONDS = 1.0
_AGAIN_SECONDS = 0.1
# How long a worker may be silent once the user has pressed Ctrl-C, until it
# answers.
_HURRY_SECONDS = 5.0
# The longest wait for one answer: only between two waits is Ctrl-C noticed.
_ANSWER_SECONDS = 10.0
# Three years: operating systems limit the time that a call can wait.
MOST_SECONDS = 1e8
# Linux's limit of the time between two TCP keep-alive probes.
_MOST_PAUSE_SECONDS = 32767
# The most sockets that one message can carry.
MOST_SOCKETS = 200


def ask(
    host: str,
    port: int,
    seconds: float,
    kept: list[socket.socket] | None = None,
) -> str | None:
    """Asks a server whether it is alive.

    Args:
        host: IP address.
        port: Integer.
        seconds: Float, how long to wait for its answer.
        kept: List that gets the open connection, if the server has answered.
            While it is open, a worker knows that a program uses it.

    Returns:
        `None` if it is alive; `DEAD` if nothing listens there; `OTHER` if
        another kind of server listens; `SILENT` if none answers in this time,
        or if this host or the network cannot ask.
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
                # At least a millisecond: an answer that has arrived counts,
                # even if this process reads it after the end.
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
    except ConnectionError:
        return DEAD
    except OSError:
        return SILENT
    return None


class _Worker:
    """A worker that a thread asks again and again whether it is alive."""

    def __init__(self, name: str, host: str, port: int, client: int):
        self.name = name
        self._client = client
        self._address = (host, port)
        self._seconds: float | None = None
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._lost = False
        self._interrupted = 0.0

    def allow(self, seconds: float | None) -> None:
        """Sets for how many seconds the worker may be silent."""
        self._seconds = seconds and min(seconds, MOST_SECONDS)

    def hurry(self) -> None:
        """Lowers the time that the worker may be silent, after Ctrl-C."""
        self._interrupted = time.monotonic()

    def limit(self, answered: float) -> float | None:
        """Returns for how many seconds the worker may be silent, or `None`.

        Args:
            answered: Float, when it last answered, by `time.monotonic()`.
        """
        if self._interrupted <= answered:
            return self._seconds
        return min(self._seconds or _HURRY_SECONDS, _HURRY_SECONDS)

    def hold(self, sockets: list[socket.socket], more: bool) -> None:
        """Takes copies of the client's sockets that lead to this worker.

        Args:
            sockets: List of these copies.
            more: Boolean, whether to keep those that it has.
        """
        with self._lock:
            while self._sockets and not more:
                self._sockets.pop().close()
            self._sockets += sockets
            if self._lost:
                self._shut()
            elif self._seconds is not None:
                for each in sockets:
                    _probe_idle(each, self._seconds)

    def watch(self) -> tuple[str, float | None]:
        """Asks the worker until it is lost.

        Before it returns, it shuts down the client's sockets to the worker.

        Returns:
            Tuple of `DEAD` or `SILENT`, and of the limit of silence.
        """
        answered = last = time.monotonic()
        refused = False
        kept: list[socket.socket] = []
        while True:
            # A third of the limit, so that there are several attempts.
            limit = self.limit(answered) or _HURRY_SECONDS
            seconds = min(limit / 3, _ANSWER_SECONDS)
            state = ask(*self._address, seconds, kept)
            while len(kept) > 1:
                kept.pop(0).close()
            now = time.monotonic()
            longest = seconds + _AGAIN_SECONDS + _PAUSE_SECONDS
            if now - last > longest or is_stopped(self._client):
                answered += now - last
            last = now
            silence = self.limit(answered)
            if state is None:
                answered, refused = now, False
                time.sleep(min(limit / 4, _PAUSE_SECONDS))
                continue
            if state != SILENT:
                if refused:
                    state = DEAD
                    break
                refused = True
            elif silence is not None and now - answered >= silence:
                break
            time.sleep(_AGAIN_SECONDS)
        with self._lock:
            self._lost = True
            self._shut()
        return state, silence

    def _shut(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, as by Ctrl-Z, where Linux tells."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After its name, which may have any characters.
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def _probe_idle(each: socket.socket, seconds: float) -> None:
    """Turns TCP keep-alive on, by which a restart of the other host shows."""
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", 0))
    pause = min(max(1, int(seconds / 4)), _MOST_PAUSE_SECONDS)
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        each.setsockopt(socket.IPPROTO_TCP, idle, pause)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _serve(client: socket.socket, signals: socket.socket) -> None:
    """Runs the client's commands until the client has ended."""
    parent = os.getppid()
    workers: dict[str, _Worker] = {}
    lost: queue.Queue = queue.Queue()

    def watch(worker: _Worker) -> None:
        why, seconds = worker.watch()
        lost.put({"lost": worker.name, "why": why, "seconds": seconds})

    def tell() -> None:
        while True:
            client.sendall(json.dumps(lost.get()).encode() + b"\n")

    threading.Thread(target=tell, daemon=True).start()
    pending = b""
    # Not until the socket closes: child processes of the client may keep its
    # end open when the client has ended.
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
                workers[name] = _Worker(name, host, port, parent)
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
                    worker.hold(held[name], message["more"])


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        _serve(*(socket.socket(fileno=int(x)) for x in sys.argv[1:]))
