"""A worker process, which runs stages of pipelines for other processes.

    python -m tf_gpipe.worker --port=2222 --bind=10.0.0.1

starts a TensorFlow server that accepts connections to one address. Trainers
find it with `tf_gpipe.connect(["10.0.0.1:2222"])`. It serves one trainer
after another, until it is killed.

TensorFlow's servers have no authentication: whoever reaches the port can run
anything here. Keep it on a private network.
"""

import argparse
import ctypes
import ipaddress
import os
import socket
import struct
import sys

# A process of one core gets one thread for operations, which sends what a
# task has made only after the next task.
if sys.platform == "linux" and len(os.sched_getaffinity(0)) == 1:
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")

_EVERY_ADDRESS = "0.0.0.0"
# Of Linux, <asm-generic/socket.h> and <linux/filter.h>.
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _LOAD_BYTE, _AND = 0x20, 0x30, 0x54
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06
_IP_HEADER = 0xFFF00000
_IP_DESTINATION = _IP_HEADER + 16


def serve(port: int, bind: str) -> None:
    """Starts a TensorFlow server, and returns when the process is killed.

    Prints a line with its address once it accepts connections. See the help of
    the command for arguments.

    Raises:
        OSError: If the port is taken, or `bind` is no address of this host.
    """
    with socket.socket() as probe:
        # Connections of a worker that has been killed may still be closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # TensorFlow shares a port that another server has, without a word.
        probe.bind((bind, port))
        port = probe.getsockname()[1]
    import tensorflow as tf

    server = tf.distribute.Server(
        {"worker": [f"{bind}:{port}"]}, job_name="worker", task_index=0
    )
    if bind != _EVERY_ADDRESS:
        accept_only(bind, port)
    print(f"worker at {bind}:{port}", flush=True)
    server.join()


def accept_only(address: str, port: int) -> None:
    """Makes the server unreachable by other addresses of the host.

    TensorFlow listens to all of them and cannot be told otherwise. A filter
    on its sockets drops what is sent to another one.
    """
    program = [
        # In IPv6 the sender chooses what is where IPv4 has the destination.
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 0, 3, 4 << 4),
        (_LOAD_WORD, 0, 0, _IP_DESTINATION),
        (_JUMP_IF_EQUAL, 0, 1, int(ipaddress.IPv4Address(address))),
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    ]
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    )
    value = struct.pack("HL", len(program), ctypes.addressof(code))
    found = False
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            each = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with each:
            if each.getsockname()[1:2] == (port,):
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)
                found = True
    if not found:
        raise RuntimeError(
            f"The socket of the server at port {port} was not found, so that "
            f"it cannot be kept from other addresses than {address}."
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tf_gpipe.worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--port", type=int, required=True, help="TCP port; 0 for a free one"
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        help="IPv4 address of this host that it can be reached by, 0.0.0.0 "
        "for all of them (default: %(default)s, only from this host)",
    )
    args = parser.parse_args()
    if not 0 <= args.port < 2**16:
        parser.error(f"--port must be from 0 to 65535. Received: {args.port}")
    try:
        ipaddress.IPv4Address(args.bind)
    except ValueError:
        parser.error(f"--bind must be an IPv4 address. Received: {args.bind}")
    if args.bind != _EVERY_ADDRESS and sys.platform != "linux":
        parser.error(
            "Only Linux lets a TensorFlow server be kept from other addresses. "
            f"Use --bind={_EVERY_ADDRESS}, behind a firewall."
        )
    try:
        serve(args.port, args.bind)
    except OSError as error:
        parser.error(f"Cannot serve at {args.bind}:{args.port}: {error}")


if __name__ == "__main__":
    main()
