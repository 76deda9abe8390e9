"""Pipelines over worker processes, some of which fail."""

import fractions
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import quick_python
from tf_gpipe.commands import workers
from tf_gpipe.devices import cluster
from tf_gpipe.devices import listening
from tf_gpipe.devices import worker_lost
from tf_gpipe.devices.listening import accept_only
from tf_gpipe.devices.listening import address_towards
from tools import child_process


def client(program, addresses, **kwargs):
    """Starts a program of `cluster_client`."""
    return subprocess.Popen(
        [
            *quick_python.command(),
            "-m",
            "tests.tf_gpipe.devices.cluster_client",
            program,
            *addresses,
        ],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=child_process.end_with_parent,
        **kwargs,
    )


def unused_address():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def _unreachable(address, broken=False):
    """Returns the address in a list if no worker answers there."""
    return list(worker_lost.states(worker_lost.places_of([address]), broken))


class ClusterTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.workers = [workers.Worker() for _ in range(4)]
        for worker in cls.workers:
            worker.wait_until_ready()
        cls.addresses = [worker.address for worker in cls.workers]

    @classmethod
    def tearDownClass(cls):
        for worker in cls.workers:
            worker.kill()
        super().tearDownClass()

    @parameterized.parameters(2, 4)
    @pytest.mark.slow_after(1)
    def test_numbers_and_places(self, num_workers):
        process = client("equal", self.addresses[:num_workers])
        output, _ = process.communicate()
        self.assertEqual(output.splitlines()[-1], "done")

    @pytest.mark.slow
    def test_skips(self):
        output, _ = client("skips", self.addresses).communicate()
        self.assertEqual(output.splitlines()[-1], "done")

    @pytest.mark.slow
    def test_masks(self):
        output, _ = client("masks", self.addresses[:2]).communicate()
        self.assertEqual(output.splitlines()[-1], "done")

    @pytest.mark.slow
    def test_boundary_tensors_go_from_worker_to_worker(self):
        output, _ = client("boundary", self.addresses[:2]).communicate()
        self.assertEqual(output.splitlines()[-1], "done")

    @pytest.mark.slow
    def test_gradients_add_up_in_place(self):
        output, _ = client("sums", []).communicate()
        self.assertEqual(output.splitlines()[-1:], ["done"])

    @pytest.mark.slow
    def test_killed_client_leaves_workers_usable(self):
        first = client("endless", self.addresses[:2])
        self.assertEqual(first.stdout.readline(), "training\n")
        first.kill()
        first.wait()
        second = client("endless", self.addresses[:2])
        self.assertEqual(second.stdout.readline(), "training\n")
        second.kill()
        second.wait()

    @pytest.mark.slow
    def test_killed_worker(self):
        process = client("endless", self.addresses[:3])
        self.assertEqual(process.stdout.readline(), "training\n")
        worker = self.workers[1]
        start = time.monotonic()
        os.kill(worker.process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        # A limit of the contract, far above what it takes.
        self.assertLess(time.monotonic() - start, 15)
        self.assertIn(
            f"failed: Stage 1 has failed: its worker at {worker.address} no "
            "longer answers.",
            output,
        )
        # Started again at the same port, it serves again.
        worker.kill()
        port = int(worker.address.rpartition(":")[2])
        self.workers[1] = workers.Worker(port=port)
        self.workers[1].wait_until_ready()
        self.assertEqual(self.workers[1].address, worker.address)
        process = client("endless", self.addresses[:3])
        self.assertEqual(process.stdout.readline(), "training\n")
        process.kill()
        process.wait()

    @pytest.mark.slow
    def test_worker_that_is_closing_its_sockets(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"

            def close():
                server.accept()[0].close()
                server.close()

            closing = threading.Thread(target=close)
            closing.start()
            self.assertEqual(_unreachable(address, broken=True), [address])
            closing.join()

    def test_only_the_address_of_bind_is_served(self):
        host, port = self.addresses[0].split(":")
        self.assertEmpty(_unreachable(self.addresses[0]))
        self.assertNotEmpty(_unreachable(f"127.0.0.2:{port}"))

    @pytest.mark.slow
    def test_the_client_is_not_served_to_other_addresses(self):
        process = client("listening", [f"grpc://{self.addresses[0]}"])
        port = int(process.stdout.readline().removeprefix("port "))
        self.assertEmpty(_unreachable(f"127.0.0.1:{port}"))
        self.assertNotEmpty(_unreachable(f"127.0.0.2:{port}"))
        process.kill()
        process.wait()

    @pytest.mark.slow
    def test_the_heartbeat_ends_with_the_client(self):
        process = client("listening", self.addresses[:1])
        process.stdout.readline()
        pid = int(process.stdout.readline().removeprefix("heartbeat "))
        heartbeat = os.pidfd_open(pid)
        process.kill()
        process.wait()
        # A pidfd is readable once its process has ended.
        self.assertNotEmpty(select.select([heartbeat], [], [], 30)[0])
        os.close(heartbeat)

    def test_ipv6_is_not_served(self):
        with socket.socket(socket.AF_INET6) as server:
            try:
                server.bind(("::1", 0))
            except OSError:
                self.skipTest("This host has no IPv6.")
            server.listen()
            port = server.getsockname()[1]
            # A packet from ::1 has these bytes where IPv4 has the destination.
            accept_only("0.0.0.0", port)
            with self.assertRaises(TimeoutError):
                socket.create_connection(("::1", port), timeout=0.5)

    @pytest.mark.slow
    def test_a_second_attempt_after_a_failure(self):
        output, _ = client("again", []).communicate()
        self.assertEqual(output.splitlines()[-1:], ["done"])

    def test_one_worker_by_two_names(self):
        port = self.addresses[0].rpartition(":")[2]
        with self.assertRaisesRegex(ValueError, "are the same, 127.0.0.1:"):
            cluster.connect([f"127.0.0.1:{port}", f"localhost:{port}"])

    def test_port_in_use(self):
        port = self.addresses[0].rpartition(":")[2]
        result = subprocess.run(
            [sys.executable, "-m", "tf_gpipe.worker", f"--port={port}"],
            capture_output=True,
            text=True,
        )
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("Address already in use", result.stderr)


class ListeningTest(tf.test.TestCase):
    def test_address_towards(self):
        self.assertEqual(address_towards(["127.0.0.1"]), "127.0.0.1")
        self.assertEqual(
            address_towards(["localhost", "127.0.0.3"]), "127.0.0.1"
        )
        own = socket.gethostbyname(socket.gethostname())
        self.assertEqual(address_towards(["localhost", own]), own)

    def test_a_port_is_claimed_once(self):
        port, claim = listening.claimed_port("127.0.0.1")
        with claim:
            # Nothing listens yet.
            self.assertEqual(listening.unused_port("127.0.0.1", port), port)
            with self.assertRaisesRegex(OSError, "already in use"):
                listening.claimed_port("127.0.0.1", port)
        again, claim = listening.claimed_port("127.0.0.1", port)
        claim.close()
        self.assertEqual(again, port)

    def test_a_claimed_port_is_passed_over(self):
        port, claim = listening.claimed_port("127.0.0.1")
        other = listening.unused_port("127.0.0.1")
        found = iter((port, port, other))
        with (
            claim,
            mock.patch.object(
                listening, "unused_port", lambda address, port: next(found)
            ),
        ):
            chosen, second = listening.claimed_port("127.0.0.1")
        second.close()
        self.assertEqual(chosen, other)

    @pytest.mark.slow
    def test_a_worker_leaves_a_claimed_port(self):
        """Another worker is about to listen there."""
        port, claim = listening.claimed_port("127.0.0.1")
        with claim:
            result = subprocess.run(
                [sys.executable, "-m", "tf_gpipe", "worker", f"--port={port}"],
                capture_output=True,
                text=True,
            )
        self.assertEqual(result.returncode, 2)
        self.assertIn("Address already in use", result.stderr)


class ConnectTest(tf.test.TestCase, parameterized.TestCase):
    def test_missing_worker(self):
        address = unused_address()
        with self.assertRaisesRegex(
            tf.errors.UnavailableError,
            f"No worker answers at {address} within 0.5 seconds.*: nothing "
            "listens there.* stage 0 would run there.*--port=PORT",
        ):
            cluster.connect([address], timeout=0.5)

    @parameterized.parameters(
        *(np.float32(0.1), np.float16(0.1), np.array(0.1)[()]),
        fractions.Fraction(1, 10),
    )
    def test_seconds_of_any_library(self, seconds):
        with self.assertRaisesRegex(
            tf.errors.UnavailableError, r" within 0\.(0999|1)"
        ):
            cluster.connect([unused_address()], timeout=seconds)

    @parameterized.parameters(
        "no-such-host.invalid:1", "a" * 80 + ":1", "..:1", "\udcff:1"
    )
    def test_unknown_host(self, address):
        with self.assertRaisesRegex(
            tf.errors.UnavailableError, f"{address}: this host is not known"
        ):
            cluster.connect(address, timeout=0.5)

    @parameterized.parameters(
        *("host", "host:", ":1", "host:x", "host:0", "host:65536", 1, None),
        *("http://host:80", "host:80/", "host:" + "9" * 5000, "host:\u0661"),
        *("a b:1", "host:1\n", "a\0b:1", (b"host:1",), "host:+1", "host:1_0"),
    )
    def test_bad_address(self, address):
        with self.assertRaisesRegex(ValueError, "form host:port"):
            cluster.connect([address])

    @parameterized.parameters("[::1]:2222", "::1:2222", "grpc://[fe80::1]:1")
    def test_ipv6_address(self, address):
        with self.assertRaisesRegex(ValueError, "reached by IPv4.*host:port"):
            cluster.connect([address])

    @parameterized.parameters(
        [[]], [["a:1", "a:1"]], [["a:1", "grpc://a:1"]], [()]
    )
    def test_addresses_named_once(self, addresses):
        with self.assertRaisesRegex(ValueError, "each worker once"):
            cluster.connect(addresses)

    @parameterized.parameters(
        *((x,) for x in (None, 5, 2.5, np.array("a:1"), b"a:1", {"a:1"}))
    )
    def test_no_list(self, addresses):
        with self.assertRaisesRegex(TypeError, "list of strings host:port"):
            cluster.connect(addresses)

    @parameterized.product(
        name=("timeout", "heartbeat"), value=("5", [1], True, 1j)
    )
    def test_no_seconds(self, name, value):
        with self.assertRaisesRegex(TypeError, f"`{name}` must be a number"):
            cluster.connect(["a:1"], **{name: value})

    @parameterized.parameters(
        (0, ValueError, "positive integer"),
        ("1", ValueError, "positive integer"),
        (2, ValueError, "at most the number of `addresses`, 1"),
    )
    def test_at_least(self, at_least, error, message):
        with self.assertRaisesRegex(error, message):
            cluster.connect(["a:1"], at_least=at_least)

    @parameterized.parameters(
        ("timeout", -1),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("heartbeat", -1.0),
        ("heartbeat", 0),
    )
    def test_seconds_out_of_range(self, name, value):
        with self.assertRaisesRegex(ValueError, f"`{name}` must be a number"):
            cluster.connect(["a:1"], **{name: value})


if __name__ == "__main__":
    tf.test.main()
