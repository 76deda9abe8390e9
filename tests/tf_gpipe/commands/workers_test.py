"""Workers start before a command, and end after it."""

import os
import signal
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.devices import cluster

# Told to stop, it ends with 5 if its worker is there for a second more.
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
signal.pause()
"""


class WorkersTest(parameterized.TestCase):
    def test_workers_are_ended_with_the_command(self):
        program = (
            "import sys; from tf_gpipe.devices import cluster; "
            "a = sys.argv[-1].removeprefix('--workers=').split(','); "
            "print(*a, len(cluster.unreachable(a))); sys.exit(3)"
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
        self.assertLen(cluster.unreachable([first, second]), 2)

    @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
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
                STOPPABLE,
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.assertEqual(process.stdout.readline(), "ready\n")
        if number == signal.SIGINT:
            # As a terminal does: to all that it has started.
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        self.assertEqual(process.wait(), 5)
        process.stdout.close()


if __name__ == "__main__":
    absltest.main()
