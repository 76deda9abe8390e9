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
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tf_gpipe
from tf_gpipe.commands import flags
from tf_gpipe.commands.parser import Parser

# A constant of Linux, from <linux/prctl.h>.
_SET_PARENT_DEATH_SIGNAL = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
# The time between two checks whether a worker has died.
_LOOK_SECONDS = 0.1
# The most workers that the command starts. Each is a process of its own, with
# some 300 MB and many threads: a typing error could halt the host.
_MOST = 256
# The least time between two starts of a worker.
_RESTART_SECONDS = 5.0


def end_with_parent() -> None:
    """Makes Linux kill this process when the thread that started it ends.

    By SIGKILL, so that a stopped process ends, too. On other systems it does
    nothing.
    """
    if _libc is not None:
        _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Worker:
    """A worker process on this host. It ends with this process, if not before.

    Args:
        core: Integer, the only CPU core that it may use, or `None` for all.
        port: Integer, or 0 for a free one.
        environment: Dict of variables that are added to its environment.

    Attributes:
        process: The `subprocess.Popen`.
        address: String `"host:port"`.
        device: String, its TensorFlow device, once this process is connected.
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
        self._started = time.monotonic()
        # `end_with_parent` ties it to the thread that starts it, so only the
        # main thread may use that.
        main = threading.current_thread() is threading.main_thread()

        def prepare() -> None:
            if main:
                # A stopped worker cannot notice that its input has ended.
                end_with_parent()
            if self._core is not None:
                # Before TensorFlow starts its threads, which inherit it.
                os.sched_setaffinity(0, {self._core})

        return subprocess.Popen(
            [
                *(sys.executable, "-m", "tf_gpipe", "worker"),
                *(f"--port={port}", "--with_stdin"),
            ],
            # A pipe that the system closes when this process ends.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            preexec_fn=prepare,
        )

    def restart_if_dead(self) -> None:
        """Starts the worker again at its address, if it has ended.

        Not at once, if it has just been started, and may not be able to.
        """
        since = time.monotonic() - self._started
        if since >= _RESTART_SECONDS and self.process.poll() is not None:
            self.kill()
            self.process = self._start(int(self.address.rpartition(":")[2]))

    def wait_until_ready(self) -> None:
        """Waits until the worker accepts connections, and sets `address`."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        self.address = line.rpartition(" ")[2].strip()
        if not line.startswith("worker at "):
            raise RuntimeError("A worker process failed to start.")

    def outlive_models(self) -> None:
        """Keeps the worker until the system closes this process's files.

        Python would close the pipe before it deletes the last models, whose
        functions TensorFlow then removes from the worker.
        """
        if self.process.stdin is not None:
            os.dup(self.process.stdin.fileno())

    def kill(self) -> None:
        """Kills the process, and waits until it has ended."""
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            if end is not None:
                end.close()


@contextlib.contextmanager
def started(num_workers: int) -> Iterator[list[Worker]]:
    """Starts workers on loopback, and ends them.

    Yields:
        List of `Worker`s.
    """
    with contextlib.ExitStack() as stack:
        yield _start(stack, [None] * num_workers)


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
        environment: Dict of variables that are added to their environment.
        one_core: Boolean, whether each worker may use one core only.

    Returns:
        List of `Worker`s.

    Raises:
        ValueError: If there are not that many cores.
    """
    cores: list[int | None] = [None] * num_workers
    if one_core:
        cores = [*sorted(os.sched_getaffinity(0))[:num_workers]]
        if num_workers > len(cores):
            raise ValueError(
                "A core for each worker is needed. Received: "
                f"{num_workers} workers, {len(cores)} cores"
            )
    with contextlib.ExitStack() as stack:
        workers = _start(stack, cores, environment)
        devices = tf_gpipe.connect([worker.address for worker in workers])
        for task, worker in enumerate(workers):
            # Each of them sees all accelerators of this host.
            worker.device = next(x for x in devices if f"/task:{task}/" in x)
            worker.outlive_models()
        stack.pop_all()
    return workers


def _start(
    stack: contextlib.ExitStack,
    cores: Sequence[int | None],
    environment: Mapping[str, str] | None = None,
) -> list[Worker]:
    """Returns a ready worker for each core. Closing `stack` kills them."""
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
    stops: list[int] | None = None,
    **kwargs: Any,
) -> int:
    """Runs a command to its end, and passes SIGTERM and Ctrl-C on to it.

    The terminal sends Ctrl-C to both processes, and this one only notes it: a
    second one could end a trainer while it saves a checkpoint. SIGTERM is sent
    on.

    Args:
        command: List of strings.
        meanwhile: Function that is called repeatedly while the command runs.
        stops: List that gets the number of each of these signals, or `None`.
        **kwargs: Arguments of `subprocess.Popen`.

    Returns:
        Integer, the exit status; 128 plus the signal's number if a signal has
        ended the command.
    """
    process = None
    stops = [] if stops is None else stops

    def note(number, frame):
        stops.append(number)
        if process is not None and number == signal.SIGTERM:
            process.send_signal(number)

    with contextlib.ExitStack() as stack:
        # Not `SIG_IGN`, which the command would inherit.
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, note)
            stack.callback(signal.signal, number, before)
        process = subprocess.Popen(command, **kwargs)
        if signal.SIGTERM in stops:
            # It came before the command had started.
            process.terminate()
        while meanwhile is not None and process.poll() is None:
            meanwhile()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
        status = process.wait()
    return status if status >= 0 else 128 - status


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("workers", __doc__)
    parser.add_argument(
        "num_workers",
        type=flags.positive,
        help=f"how many to start, at most {_MOST}",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start a worker again that dies, at the same address",
    )
    args = flags.parse_with_program(parser, argv)
    if args.num_workers > _MOST:
        parser.error(
            f"a host may have at most {_MOST} workers. Received: "
            f"{args.num_workers}"
        )
    with started(args.num_workers) as workers:
        addresses = ",".join(worker.address for worker in workers)

        def look() -> None:
            for worker in workers:
                worker.restart_if_dead()

        return run_in_foreground(
            [*args.command, f"--workers={addresses}"],
            meanwhile=look if args.restart else None,
            # If this process dies, so do the workers that the command needs.
            preexec_fn=end_with_parent,
        )
