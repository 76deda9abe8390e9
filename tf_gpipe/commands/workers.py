"""Runs a command with worker processes on this host, and ends them.

    python -m tf_gpipe workers 2 python -m trainers.image_classification

starts two workers (`python -m tf_gpipe worker`) on loopback, runs the command
with one more argument, `--workers=127.0.0.1:PORT,127.0.0.1:PORT`, and ends the
workers when it has ended. The exit status is the command's. With --restart, a
worker that dies is started again, at the same address. When it dies itself, the
command ends as well as the workers (on Linux).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tf_gpipe
from tf_gpipe.commands import flags
from tf_gpipe.commands.parser import Parser

# Of Linux, <linux/prctl.h>.
_SET_PARENT_DEATH_SIGNAL = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
# Between two looks at whether a worker is there.
_LOOK_SECONDS = 0.1


def end_with_parent() -> None:
    """Has the system end this process with the thread that has started it.

    By SIGKILL, also if it is stopped. On systems other than Linux it does
    nothing.
    """
    if _libc is not None:
        _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Worker:
    """A worker process on this host, which ends with this process at latest.

    Args:
        core: Integer, the only CPU core that it may use, or `None`.
        port: Integer, or 0 for a free one.
        environment: Dict of variables that are added to its environment.

    Attributes:
        process: The `subprocess.Popen`.
        address: String `"host:port"`.
        device: String, its TensorFlow device, once we have connected to it.
    """

    def __init__(
        self,
        core: int | None = None,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ):
        self._core = core
        self._environment = {**os.environ, **(environment or {})}
        self.address = self.device = ""
        self.process = self._start(port)

    def _start(self, port: int) -> subprocess.Popen:
        # The system would end it with the thread that has started it.
        main = threading.current_thread() is threading.main_thread()

        def prepare() -> None:
            if main:
                # Also if it is stopped, and cannot see its input end.
                end_with_parent()
            if self._core is not None:
                # Before TensorFlow starts its threads, which inherit it.
                os.sched_setaffinity(0, {self._core})

        return subprocess.Popen(
            [
                *(sys.executable, "-m", "tf_gpipe", "worker"),
                *(f"--port={port}", "--with_stdin"),
            ],
            # Whose other end the system closes when this process ends.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            preexec_fn=prepare,
        )

    def restart_if_dead(self) -> None:
        """Starts it again at its address, if it has ended."""
        if self.process.poll() is not None:
            self.kill()
            self.process = self._start(int(self.address.rpartition(":")[2]))

    def wait_until_ready(self) -> None:
        """Waits until it accepts connections, and learns its address."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        self.address = line.rpartition(" ")[2].strip()
        if not line.startswith("worker at "):
            raise RuntimeError("A worker process failed to start.")

    def outlive_models(self) -> None:
        """Keeps the process until the system closes what this one has open.

        Python closes files before it deletes the last models.
        """
        if self.process.stdin is not None:
            os.dup(self.process.stdin.fileno())

    def kill(self) -> None:
        """Ends the process, and waits until it has."""
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            if end is not None:
                end.close()


@contextlib.contextmanager
def started(
    num_workers: int,
    environment: Mapping[str, str] | None = None,
    one_core: bool = False,
) -> Iterator[list[Worker]]:
    """Starts workers on loopback, and ends them.

    Args:
        num_workers: Integer.
        environment: Dict of variables that are added to their environment.
        one_core: Boolean, whether each is confined to a core of its own.

    Yields:
        List of `Worker`s.

    Raises:
        ValueError: If there are not that many cores.
    """
    with contextlib.ExitStack() as stack:
        yield _start(stack, num_workers, environment, one_core)


def connected(
    num_workers: int,
    environment: Mapping[str, str] | None = None,
    one_core: bool = False,
) -> list[Worker]:
    """Starts workers on loopback, and connects this process to them.

    They end with this process. If they ended before, TensorFlow would print
    an error for each function that it then cannot remove from a worker.

    Args:
        num_workers: Integer.
        environment: As for `started`.
        one_core: As for `started`.

    Returns:
        List of `Worker`s.

    Raises:
        ValueError: If there are not that many cores.
    """
    with contextlib.ExitStack() as stack:
        workers = _start(stack, num_workers, environment, one_core)
        devices = tf_gpipe.connect([worker.address for worker in workers])
        for worker, device in zip(workers, devices, strict=True):
            worker.device = device
            worker.outlive_models()
        stack.pop_all()
    return workers


def _start(
    stack: contextlib.ExitStack,
    num_workers: int,
    environment: Mapping[str, str] | None,
    one_core: bool,
) -> list[Worker]:
    """Returns workers that are ready, and that `stack` ends."""
    cores: list[int | None] = [None] * num_workers
    if one_core:
        cores = [*sorted(os.sched_getaffinity(0))[:num_workers]]
        if num_workers > len(cores):
            raise ValueError(
                "A core for each worker is needed. Received: "
                f"{num_workers} workers, {len(cores)} cores"
            )
    workers = []
    for core in cores:
        workers.append(Worker(core, environment=environment))
        stack.callback(workers[-1].kill)
    for worker in workers:
        worker.wait_until_ready()
    return workers


def run_in_foreground(
    command: Sequence[str],
    meanwhile: Callable[[], None] | None = None,
    **kwargs: Any,
) -> int:
    """Runs a command as a shell does, which hands on the signals to stop.

    Ctrl-C reaches it as it reaches this process, SIGTERM is handed on: a
    trainer saves a checkpoint before it ends.

    Args:
        command: List of strings.
        meanwhile: Function that is called again and again while it runs.
        **kwargs: Arguments of `subprocess.Popen`.

    Returns:
        Integer, the exit status, above 128 if a signal has ended the command.
    """
    process = None

    def hand_on(number, frame):
        if process is not None:
            process.send_signal(number)

    handlers = {
        # A handler, not `SIG_IGN`, which the command would inherit.
        signal.SIGINT: lambda number, frame: None,
        signal.SIGTERM: hand_on,
    }
    with contextlib.ExitStack() as stack:
        for number, handler in handlers.items():
            before = signal.signal(number, handler)
            stack.callback(signal.signal, number, before)
        process = subprocess.Popen(command, **kwargs)
        while meanwhile is not None and process.poll() is None:
            meanwhile()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
        status = process.wait()
    return status if status >= 0 else 128 - status


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("workers", __doc__)
    parser.add_argument(
        "num_workers", type=flags.positive, help="how many to start"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start a worker again that dies, at the same address",
    )
    args = flags.parse_with_program(parser, argv)
    with started(args.num_workers) as workers:
        addresses = ",".join(worker.address for worker in workers)

        def look() -> None:
            for worker in workers:
                worker.restart_if_dead()

        return run_in_foreground(
            [*args.command, f"--workers={addresses}"],
            meanwhile=look if args.restart else None,
            # Without workers there is nothing to be done.
            preexec_fn=end_with_parent,
        )
