"""Workers start before a command, and end after it."""

import os
import signal
import subprocess
import sys
from unittest import mock

import pytest
from absl.testing import absltest
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.commands import workers
from tf_gpipe.devices import worker_lost
from tools import child_process

# When told to stop, it exits with 5 if its worker lives for another second.
STOPPABLE = """
import signal, socket, sys

host, port = sys.argv[-1].removeprefix("--workers=").split(":")
worker = socket.create_connection((host, int(port)), timeout=1.0)

def stop(*_):
    try:
        while worker.recv(4096):
            pass
    except TimeoutError:
        sys.exit(5)
    sys.exit(6)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
print("ready", flush=True)
"""

# Starts workers, prints "ready", and ends as its arguments say.
STARTING = """
import os, signal, sys

from tf_gpipe.commands import workers

with workers.started(2) as processes:
    if "stop" in sys.argv:
        processes[1].process.send_signal(signal.SIGSTOP)
    if "fork" in sys.argv and not os.fork():
        # Has what its parent has open, but its output.
        os.close(1)
        os.close(2)
        os.read(0, 1)
        os._exit(0)
    print("ready", flush=True)
    if "raise" in sys.argv:
        raise SystemExit(3)
    signal.pause()
"""


def started(*command):
    """Starts a program, and waits until it is ready."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Inherited by all that the program starts: it ends with the last one.
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=child_process.end_with_parent,
    )
    line = process.stdout.readline()
    assert line == "ready\n", process.stderr.read()
    return process


class WorkersTest(parameterized.TestCase):
    @parameterized.parameters(
        (signal.SIGKILL,),
        (signal.SIGTERM,),
        (signal.SIGKILL, "fork"),
        (signal.SIGKILL, "stop"),
        (None, "raise"),
    )
    @pytest.mark.slow_after(1)
    def test_workers_end_with_what_has_started_them(self, number, *args):
        process = started("-c", STARTING, *args)
        if number is not None:
            process.send_signal(number)
        process.stderr.read()
        process.communicate()

    @parameterized.parameters((), ("--restart",))
    def test_all_end_with_the_command_of_theirs(self, *flags):
        process = started(
            *("-m", "tf_gpipe", "workers", *flags, "1", sys.executable, "-c"),
            # The program does not notice when its worker ends.
            STOPPABLE + "while True: signal.pause()",
        )
        process.kill()
        process.stderr.read()
        process.communicate()

    def test_a_signal_before_the_command_has_started(self):
        status = workers.run_in_foreground(
            [sys.executable, "-c", "import signal; signal.pause()"],
            preexec_fn=lambda: (
                signal.alarm(20),
                os.kill(os.getppid(), signal.SIGTERM),
            ),
        )
        self.assertEqual(status, 128 + signal.SIGTERM)

    def test_a_worker_with_several_devices(self):
        devices = [f"/job:worker/task:0/device:GPU:{i}" for i in range(2)]
        with mock.patch.object(tf_gpipe, "connect", lambda addresses: devices):
            (worker,) = workers.connected(1)
        self.addCleanup(worker.kill)
        self.assertEqual(worker.device, devices[0])

    @mock.patch.object(workers, "_RESTART_SECONDS", 600.0)
    def test_a_worker_that_cannot_start_is_not_restarted_at_once(self):
        worker = workers.Worker(port=-1)
        self.addCleanup(worker.kill)
        first = worker.process
        first.wait()
        worker.restart_if_dead()
        self.assertIs(worker.process, first)

    @pytest.mark.slow
    def test_workers_are_ended_with_the_command(self):
        program = (
            "import sys; from tf_gpipe.devices.worker_lost import *; "
            "a = sys.argv[-1].removeprefix('--workers=').split(','); "
            "print(*a, len(states(places_of(a)))); sys.exit(3)"
        )
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "tf_gpipe",
                "workers",
                "2",
                sys.executable,
                "-c",
                program,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.assertEqual(result.returncode, 3)
        first, second, num_unreachable = result.stdout.split()
        self.assertEqual(num_unreachable, "0")
        places = worker_lost.places_of([first, second])
        self.assertLen(worker_lost.states(places), 2)

    @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
    @pytest.mark.slow_after(1)
    def test_a_command_with_workers_ends_as_it_wants(self, number):
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tf_gpipe",
                "workers",
                "1",
                sys.executable,
                "-c",
                STOPPABLE + "signal.pause()",
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.assertEqual(process.stdout.readline(), "ready\n")
        if number == signal.SIGINT:
            # To the whole process group, as a terminal does.
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        self.assertEqual(process.wait(), 5)
        process.stdout.close()


if __name__ == "__main__":
    absltest.main()
