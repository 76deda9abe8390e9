"""A worker process, which runs stages of pipelines for other processes.

    python -m tf_gpipe worker --port=2222 --bind=10.0.0.1

starts a TensorFlow server that accepts connections to one address. Trainers
find it with `tf_gpipe.connect(["10.0.0.1:2222"])`. It serves one trainer
after another, until it is killed. With --with_stdin it also ends when its
standard input does, as the end of a pipe does with the process that holds it.
On Linux it starts anew once the trainers that it has served are gone for some
time, which gives back their memory and threads.

TensorFlow's servers have no authentication: whoever reaches the port can run
anything here. Keep it on a private network.
"""

import argparse
import ipaddress
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence

from tf_gpipe import upstream_server
from tf_gpipe.commands import start
from tf_gpipe.commands.parser import Parser
from tf_gpipe.devices import fail_fast
from tf_gpipe.devices import listening
from tf_gpipe.devices import restart

_LOOK_SECONDS = 1.0
# A busy worker may read a trainer's question with such a delay.
_LEAST_SECONDS = 10.0

# On one core TensorFlow runs operations by one thread, which would send a
# task's results only after the next task.
if sys.platform == "linux" and len(os.sched_getaffinity(0)) == 1:
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")


def serve(
    port: int,
    bind: str,
    with_stdin: bool = False,
    forget_after: float = 600.0,
    sockets: Sequence[int] = (),
) -> None:
    """Starts a TensorFlow server, which runs until the process is ended.

    Prints a line with its address to stdout once it accepts connections, for
    programs that start it; with `with_stdin`, whatever operations print to
    stdout later goes to stderr, since such a program may not read on. See the
    help of the command for other arguments.

    Args:
        sockets: Descriptors of the listening sockets that this process had
            before it restarted itself.

    Raises:
        OSError: If the port is taken, or `bind` is no address of this host.
    """
    if not sockets:
        # The claim ends with this function, which serves as long as it runs.
        port, _claim = listening.claimed_port(bind, port)
    if with_stdin:
        threading.Thread(
            target=_end_with_stdin, args=(os.getppid(),), daemon=True
        ).start()
    fail_fast.fail_fast()
    # TensorFlow would import Keras and JAX if they are installed, which doubles
    # the time. A worker needs neither: stages reach it as graphs.
    with start.left_out("keras", "jax"), start.quiet():
        server_class = upstream_server.server()
    if listening.AVAILABLE:
        # The new server shares the port with the sockets from before the
        # restart, which are closed below.
        os.environ["TF_GRPC_REUSE_PORT"] = "true"
    server = server_class(
        {"worker": [f"{bind}:{port}"]}, job_name="worker", task_index=0
    )
    for each in sockets:
        os.close(each)
    if bind != listening.EVERY_ADDRESS:
        listening.accept_only(bind, port)
    if not sockets:
        listening.announce("worker", bind, port)
        print(f"worker at {bind}:{port}", flush=True)
    if with_stdin:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        # At Ctrl-C a trainer in the same terminal saves a checkpoint, for which
        # it needs this worker.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if listening.AVAILABLE:
            restart.restart_when_unused(
                forget_after, bind, port, [] if sockets else [f"--port={port}"]
            )
        server.join()
    except KeyboardInterrupt:
        # A TensorFlow server cannot be stopped.
        os._exit(128 + signal.SIGINT)


def _end_with_stdin(parent: int) -> None:
    """Ends this process when its standard input or its parent process ends.

    Not by its input alone: other children of the parent may keep the pipe open.
    """
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], _LOOK_SECONDS)
        if ready and not os.read(0, 4096):
            break
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("worker", __doc__)
    parser.add_argument(
        "--port", type=int, help="TCP port, required; 0 for a free one"
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        help="IPv4 address of this host that it can be reached by, 0.0.0.0 "
        "for all of them (default: %(default)s, only from this host)",
    )
    parser.add_argument(
        "--with_stdin",
        action="store_true",
        help="end when standard input ends",
    )
    parser.add_argument(
        "--forget_after",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long trainers that it has served must be gone, or silent, "
        f"until it starts anew, at least {_LEAST_SECONDS:g} (default: "
        "%(default)g)",
    )
    # Set by this process itself when it restarts, see `devices.restart`.
    parser.add_argument(
        "--sockets",
        type=lambda text: [int(x) for x in text.split(",")],
        default=(),
        help=argparse.SUPPRESS,
    )
    args = parser.parse_args(argv)
    # Not by argparse, which would not suggest it for a misspelt one.
    if args.port is None:
        parser.error("the following arguments are required: --port")
    if not 0 <= args.port < 2**16:
        parser.error(f"--port must be from 0 to 65535. Received: {args.port}")
    if not _LEAST_SECONDS <= args.forget_after < math.inf:
        parser.error(
            f"--forget_after must be a number of at least {_LEAST_SECONDS:g}. "
            f"Received: {args.forget_after}"
        )
    try:
        ipaddress.IPv4Address(args.bind)
    except ValueError:
        parser.error(f"--bind must be an IPv4 address. Received: {args.bind}")
    if args.bind != listening.EVERY_ADDRESS and not listening.AVAILABLE:
        parser.error(
            "Only Linux lets a TensorFlow server be kept from other addresses. "
            f"Use --bind={listening.EVERY_ADDRESS}, behind a firewall."
        )
    try:
        serve(**vars(args))
    except OSError as error:
        parser.error(f"Cannot serve at {args.bind}:{args.port}: {error}")
