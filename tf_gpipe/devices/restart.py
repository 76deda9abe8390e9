"""Restarts a worker process once no client program uses it.

A TensorFlow server keeps threads and its allocators' memory for each program
that it has served, for good; and all weights of a program that was killed, for
ten minutes. A restarted process has none of it.

Linux knows for each connection when data last arrived. A running program asks
its workers about once a second, see `heartbeat`, and TensorFlow sends something
every five minutes. Connections between workers, which stay open, carry nothing
once the program is gone, nor does that of a program whose host lost power.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from tf_gpipe.devices import heartbeat
from tf_gpipe.devices import listening
from tf_gpipe.devices import sockets

_LOOK_SECONDS = 1.0
_SOCKETS = "--sockets"
# Offsets in Linux's `struct tcp_info`, <linux/tcp.h>, of the milliseconds since
# data last arrived, and of the number of bytes received.
_SINCE, _BYTES = 52, 128
_SIZE = 136


class Use(NamedTuple):
    """The use of a server, according to its open connections.

    Attributes:
        last: Float, when data last arrived on one of them, in seconds of
            `time.monotonic()`, or 0.
        served: Boolean, whether one has received more than the question of a
            heartbeat.
    """

    last: float = 0.0
    served: bool = False


def use_of(port: int) -> Use:
    """Returns the `Use` of a server of this process."""
    found = Use()
    for each in sockets.borrowed():
        ends = sockets.ends(each)
        if ends is None or ends[0][1] != port:
            continue
        try:
            info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        except OSError:
            continue  # It has been closed since.
        (since,) = struct.unpack_from("I", info, _SINCE)
        (count,) = struct.unpack_from("Q", info, _BYTES)
        found = Use(
            max(found.last, time.monotonic() - since / 1000),
            found.served or count > heartbeat.QUESTION_BYTES,
        )
    return found


def restart_when_unused(
    seconds: float, bind: str, port: int, arguments: Sequence[str]
) -> None:
    """Waits until all client programs are gone, then restarts this process.

    Does not return. By `execv`, with the same command: the process keeps its
    process id and its listening sockets, so that connections made meanwhile
    wait instead of being refused.

    Args:
        seconds: Float, for how long no data must have arrived.
        bind: IP address that its server listens at.
        port: Integer, the server's port.
        arguments: Strings that are added to the command line, before the
            descriptors of the sockets.
    """
    last, served = 0.0, False
    while True:
        time.sleep(_LOOK_SECONDS)
        use = use_of(port)
        last, served = max(last, use.last), served or use.served
        if not served or time.monotonic() - last < seconds:
            continue
        with listening.paused(bind, port) as descriptors:
            # A request that arrived just before the pause would be lost.
            if use_of(port).last > last:
                continue
            sockets.keep_over_exec(descriptors)
            kept = ",".join(map(str, descriptors))
            before = [x for x in sys.orig_argv[1:] if _SOCKETS not in x]
            os.execv(
                sys.executable,
                [sys.executable, *before, *arguments, f"{_SOCKETS}={kept}"],
            )
