"""The sockets of this process, also those that TensorFlow has opened."""

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Container
from collections.abc import Iterator

_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


@contextlib.contextmanager
def copies() -> Iterator[list[socket.socket]]:
    """A scope with a copy of each socket of this process.

    What is set on a copy, or shut down, is so for the socket.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for number in os.listdir(_DESCRIPTORS):
            try:
                copy = os.dup(int(number))
            except OSError:
                continue
            try:
                each = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)  # It is no socket.
                continue
            found.append(stack.enter_context(each))
        yield found


def looked_at() -> Iterator[socket.socket]:
    """Yields each socket of this process, itself, to be asked what it is.

    Where a server opens and closes sockets at the same time, copies would keep
    those open of which it knows nothing any more.
    """
    for number in os.listdir(_DESCRIPTORS):
        # It may have been closed since.
        with contextlib.suppress(OSError):
            each = socket.socket(fileno=int(number))
            try:
                yield each
            finally:
                each.detach()


def hand_on(descriptors: Container[int]) -> None:
    """Has a program that this process becomes have these open files alone.

    And the standard ones. Others, such as those of a GPU, would keep memory.
    """
    for number in map(int, os.listdir(_DESCRIPTORS)):
        if number > 2:
            # It may have been closed since.
            with contextlib.suppress(OSError):
                os.set_inheritable(number, number in descriptors)


def ends(each: socket.socket) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Returns the addresses of both ends of a connection over IP, if it is."""
    try:
        return _address(each.getsockname()), _address(each.getpeername())
    except (OSError, ValueError):
        return None


def _address(name: tuple) -> tuple[str, int]:
    host, port = name[:2]
    address = ipaddress.ip_address(host)
    # As which a socket of IPv6 has an address of IPv4.
    return str(getattr(address, "ipv4_mapped", None) or address), port
