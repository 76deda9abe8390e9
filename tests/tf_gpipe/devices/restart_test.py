"""A worker restarts once its clients are gone, and not before."""

import json
import socket
import subprocess
import sys
import threading
import time

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.devices import heartbeat
from tf_gpipe.devices import listening
from tf_gpipe.devices import restart
from tools import child_process

# The header of the frame with which a server of HTTP/2 begins.
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def arrived(connection, size):
    """Waits until `size` bytes have arrived, and leaves them unread."""
    while len(connection.recv(size, socket.MSG_PEEK)) < size:
        pass


class UseTest(absltest.TestCase):
    def test_use(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            port = address[1]
            self.assertEqual(restart.use_of(port), restart.Use())
            with socket.create_connection(address) as client:
                connection, _ = server.accept()
                with connection:
                    size = heartbeat.QUESTION_BYTES
                    client.sendall(bytes(size))
                    arrived(connection, size)
                    asked = restart.use_of(port)
                    self.assertGreater(asked.last, 0.0)
                    self.assertFalse(asked.served)
                    before = time.monotonic()
                    client.sendall(bytes(1))
                    arrived(connection, size + 1)
                    use = restart.use_of(port)
                    self.assertTrue(use.served)
                    # The system counts in ticks of up to 10 ms.
                    self.assertGreater(use.last, before - 0.1)
                    # The client's own port serves nobody.
                    other = client.getsockname()[1]
                    self.assertFalse(restart.use_of(other).served)
            self.assertEqual(restart.use_of(port), restart.Use())

    def test_a_question_that_is_kept(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()

            def answer():
                for _ in range(2):
                    connections.append(server.accept()[0])
                    connections[-1].sendall(SETTINGS)

            connections, kept = [], []
            thread = threading.Thread(target=answer)
            thread.start()
            self.assertIsNone(heartbeat.ask(*address, 30.0))
            self.assertIsNone(heartbeat.ask(*address, 30.0, kept))
            thread.join()
            size = heartbeat.QUESTION_BYTES
            for connection in connections:
                self.assertLen(connection.recv(size, socket.MSG_WAITALL), size)
            self.assertEmpty(connections[0].recv(1))
            with self.assertRaises(BlockingIOError):
                connections[1].recv(1, socket.MSG_DONTWAIT)
            kept[0].close()
            self.assertEmpty(connections[1].recv(1))
            for connection in connections:
                connection.close()


class PausedTest(parameterized.TestCase):
    @parameterized.parameters("127.0.0.1", listening.EVERY_ADDRESS)
    def test_no_connection_is_made_and_none_refused(self, bind):
        # TensorFlow's server listens at every address, too.
        with socket.create_server((listening.EVERY_ADDRESS, 0)) as server:
            address = ("127.0.0.1", server.getsockname()[1])
            if bind != listening.EVERY_ADDRESS:
                listening.accept_only(*address)
            with socket.create_connection(address) as before:
                connection, _ = server.accept()
                with connection, listening.paused(bind, address[1]) as found:
                    with self.assertRaises(TimeoutError):
                        socket.create_connection(address, timeout=0.1)
                    # Open connections go on.
                    before.sendall(b"x")
                    self.assertEqual(connection.recv(1), b"x")
                    self.assertLen(found, 1)
            socket.create_connection(address, timeout=30.0).close()
            other = ("127.0.0.2", address[1])
            if bind == listening.EVERY_ADDRESS:
                socket.create_connection(other, timeout=30.0).close()
            else:
                with self.assertRaises(TimeoutError):
                    socket.create_connection(other, timeout=0.1)


@pytest.mark.slow
class MemoryTest(absltest.TestCase):
    def test_clients_that_ended(self):
        result = subprocess.run(
            [
                *(sys.executable, "-m"),
                *("tests.tf_gpipe.devices.ended_clients", "10"),
            ],
            capture_output=True,
            text=True,
            preexec_fn=child_process.end_with_parent,
        )
        self.assertEqual(result.returncode, 0, result.stderr[-2000:])
        told = json.loads(result.stdout.splitlines()[-1])
        self.assertEqual(told["statuses"], [0, 0], result.stderr[-2000:])
        self.assertFalse(told["ended"])
        start, most, end = told["start"], told["most"], told["end"]
        # In kB.
        self.assertGreater(most["memory"], start["memory"] + 200e3)
        self.assertLess(end["memory"], start["memory"] + 100e3)
        self.assertGreater(most["threads"], start["threads"] + 40)
        self.assertLess(end["threads"], start["threads"] + 10)


if __name__ == "__main__":
    absltest.main()
