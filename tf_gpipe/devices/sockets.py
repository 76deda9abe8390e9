"""The sockets of this process, including those that TensorFlow has opened."""

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
    """A scope with a duplicate of each socket of this process.

    Setting an option of a duplicate, or shutting it down, does so for the
    socket itself.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for number in os.listdir(_DESCRIPTORS):
            try:
                copy = os.dup(int(number))
            except OSError:
                continue
            try:
                each = _socket(copy)
            except OSError:
                os.close(copy)  # It is no socket.
                continue
            found.append(stack.enter_context(each))
        yield found


def borrowed() -> Iterator[socket.socket]:
    """Yields each socket of this process, without a duplicate, to read only.

    A duplicate would keep a connection open that a running server closes at
    the same time.
    """
    for number in os.listdir(_DESCRIPTORS):
        # It may have been closed since.
        with contextlib.suppress(OSError):
            each = _socket(int(number))
            try:
                yield each
            finally:
                each.detach()


def keep_over_exec(descriptors: Container[int]) -> None:
    """Makes `exec` keep these file descriptors and the standard ones only.

    Others, such as those of a GPU, would keep memory allocated.
    """
    for number in map(int, os.listdir(_DESCRIPTORS)):
        if number > 2:
            # It may have been closed since.
            with contextlib.suppress(OSError):
                os.set_inheritable(number, number in descriptors)


def ends(each: socket.socket) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Returns (host, port) of this and the other end of an IP connection.

    `None` if the socket is not connected, or not over IP.
    """
    try:
        return _address(each.getsockname()), _address(each.getpeername())
    except (OSError, ValueError):
        return None


def addresses(host: str) -> list[str]:
    """Returns the IP addresses of a host; an empty list if it is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [_address(name)[0] for *_, name in found]


def _socket(number: int) -> socket.socket:
    # By default Python would make it non-blocking, for whoever uses it, if the
    # program has called `socket.setdefaulttimeout`.
    kept = getattr(socket, "SOCK_NONBLOCK", 0)
    return socket.socket(type=socket.SOCK_STREAM | kept, fileno=number)


def _address(name: tuple) -> tuple[str, int]:
    host, port = name[:2]
    address = ipaddress.ip_address(host)
    # An IPv6 socket gives IPv4 addresses in mapped form.
    return str(getattr(address, "ipv4_mapped", None) or address), port
