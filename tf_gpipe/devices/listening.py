"""Restricts a TensorFlow server to one IP address of this host.

TensorFlow's servers have no authentication and always listen at all addresses.
A packet filter on their sockets drops packets sent to other addresses.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

from tf_gpipe.devices import sockets

EVERY_ADDRESS = "0.0.0.0"
# Only Linux has such filters.
AVAILABLE = sys.platform == "linux"
# Constants of Linux, from <asm-generic/socket.h> and <linux/filter.h>.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD_WORD, _LOAD_BYTE, _AND = 0x20, 0x30, 0x54
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06
_IP_HEADER = 0xFFF00000
_IP_DESTINATION = _IP_HEADER + 16


def unused_port(address: str, port: int = 0) -> int:
    """Returns a port that no server uses: `port`, or any if that is 0.

    Raises:
        OSError: If the port is taken, or this host does not have the address.
    """
    with socket.socket() as probe:
        # Connections of a process that has been killed may still be closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # TensorFlow would silently share a port with another server.
        probe.bind((address, port))
        return probe.getsockname()[1]


def claimed_port(address: str, port: int = 0) -> tuple[int, socket.socket]:
    """Returns a port that no server uses, and a claim on it.

    A worker's server lets others share its port, which it needs to restart. Two
    workers that are started at the same moment would both find the same port
    unused, and share it for good. A claim is what only one of them gets.

    Args:
        address: IP address that the server will listen at.
        port: Integer, the wanted port, or 0 for any.

    Returns:
        Tuple of the port and of a socket, which claims it until it is closed.

    Raises:
        OSError: If the port is taken, or this host does not have the address.
    """
    while True:
        found = unused_port(address, port)
        # Linux gives a name that begins with a zero byte to one socket at a
        # time, and it is no file that outlives a process.
        claim = socket.socket(socket.AF_UNIX)
        try:
            if AVAILABLE:
                claim.bind(f"\0tf_gpipe worker {found}")
            return found, claim
        except OSError as error:
            claim.close()
            if port or error.errno != errno.EADDRINUSE:
                raise


def address_towards(hosts: Sequence[str]) -> str:
    """Returns the IPv4 address of this host that `hosts` can reach it by.

    Loopback, if all of them are on this host's loopback.
    """
    found = "127.0.0.1"
    for host in hosts:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # For a datagram socket this sends nothing, but looks up the route.
            probe.connect((host, 9))
            address = probe.getsockname()[0]
        if not ipaddress.IPv4Address(address).is_loopback:
            found = address
    return found


def accept_only(address: str, port: int) -> None:
    """Makes a server of this process reachable at `address` only.

    Raises:
        OSError: If the system refuses the filter.
        RuntimeError: If this process has no socket bound to that port.
    """
    with sockets.copies() as copies:
        of_server = [x for x in copies if x.getsockname()[1:2] == (port,)]
        _accept_only(address, of_server)
        if not of_server:
            raise RuntimeError(
                f"The socket of the server at port {port} was not found, so "
                "that it cannot be kept from other addresses than "
                f"{address}."
            )


@contextlib.contextmanager
def paused(address: str, port: int) -> Iterator[list[int]]:
    """A scope in which a server of this process gets no new connections.

    Clients are not refused: their systems try again every few seconds.

    Args:
        address: IP address that the server is restricted to afterwards.
        port: Integer, the server's port.

    Yields:
        List of integers, the descriptors of its listening sockets.
    """
    numbers = [x.fileno() for x in sockets.borrowed() if _listens(x, port)]
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.socket(fileno=os.dup(x)))
            for x in numbers
        ]
        _filter(listeners, [(_RETURN, 0, 0, 0)])
        yield [x.fileno() for x in listeners]
        if address != EVERY_ADDRESS:
            _accept_only(address, listeners)
        else:
            for each in listeners:
                each.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _listens(each: socket.socket, port: int) -> bool:
    try:
        return each.getsockname()[1:2] == (port,) and bool(
            each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )
    except OSError:
        return False  # It has been closed since.


def _accept_only(address: str, filtered: Iterable[socket.socket]) -> None:
    program = [
        # Drop all but IPv4: in an IPv6 header, the bytes at this offset are
        # the sender's choice.
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 0, 3, 4 << 4),
        (_LOAD_WORD, 0, 0, _IP_DESTINATION),
        (_JUMP_IF_EQUAL, 0, 1, int(ipaddress.IPv4Address(address))),
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    ]
    _filter(filtered, program)


def _filter(filtered: Iterable[socket.socket], program: list[tuple]) -> None:
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    )
    value = struct.pack("HL", len(program), ctypes.addressof(code))
    for each in filtered:
        each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)


def announce(who: str, address: str, port: int) -> None:
    """Prints to stderr where a server listens, and who can use it."""
    where = f"{address}:{port}"
    if address == EVERY_ADDRESS:
        where = f"port {port} of every address of this host"
    print(
        f"tf_gpipe: the {who} listens at {where}, without authentication: "
        "whoever reaches it can run anything here.",
        file=sys.stderr,
        flush=True,
    )
