"""When programs last used a worker, which starts anew once they are gone.

Of each program that it has served a TensorFlow server keeps threads, and memory
that its allocators hold, for good; of one that was killed, all weights for ten
minutes. A process that starts anew has none of it.

Linux tells of each connection when it last brought something. A program that
is there asks its workers about once a second, see `heartbeat`, and TensorFlow
says something every five minutes. What workers keep open among one another
brings nothing once the program is gone, nor does the connection of a program
whose host is without power.
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
# Of Linux, <linux/tcp.h>: the places in `struct tcp_info` of the milliseconds
# since something came, and of how many bytes have come.
_SINCE, _BYTES = 52, 128
_SIZE = 136


class Use(NamedTuple):
    """How a server is used, as far as its open connections tell.

    Attributes:
        last: Float, when one has last brought something, in seconds of
            `time.monotonic()`, or 0.
        served: Boolean, whether one has brought more than the question whether
            the server is there.
    """

    last: float = 0.0
    served: bool = False


def use_of(port: int) -> Use:
    """Returns the `Use` of a server of this process."""
    found = Use()
    for each in sockets.looked_at():
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


def start_anew_after(
    seconds: float, bind: str, port: int, arguments: Sequence[str]
) -> None:
    """Waits until programs that were there are gone, and starts anew.

    The process becomes one that runs the same command. It keeps its number and
    the sockets that it listens with: what connects meanwhile waits.

    Args:
        seconds: Float, how long nothing must have come.
        bind: IP address that its server listens at.
        port: Integer, of the server.
        arguments: Strings that are added to the command line, but for the
            numbers of the sockets.
    """
    last, served = 0.0, False
    while True:
        time.sleep(_LOOK_SECONDS)
        use = use_of(port)
        last, served = max(last, use.last), served or use.served
        if not served or time.monotonic() - last < seconds:
            continue
        with listening.paused(bind, port) as descriptors:
            # What has come before that would be lost.
            if use_of(port).last > last:
                continue
            sockets.hand_on(descriptors)
            kept = ",".join(map(str, descriptors))
            before = [x for x in sys.orig_argv[1:] if _SOCKETS not in x]
            os.execv(
                sys.executable,
                [sys.executable, *before, *arguments, f"{_SOCKETS}={kept}"],
            )
