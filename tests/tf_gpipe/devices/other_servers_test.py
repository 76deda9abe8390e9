"""`connect` and the heartbeat tell servers apart that are no workers."""

import contextlib
import io
import os
import queue
import select
import signal
import socket
import ssl
import sys
import threading
import time
import types
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from tf_gpipe.devices import cluster
from tf_gpipe.devices import heartbeat
from tf_gpipe.devices import sockets
from tf_gpipe.devices import watcher

# Frames of HTTP/2: length, type, flags, stream. A server begins with the first.
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
ACKNOWLEDGED = b"\0\0\0\4\1\0\0\0\0"
PING_ANSWER = b"\0\0\x08\6\1\0\0\0\0"
PREFACE_BYTES, HEADER_BYTES = 24, 9


@contextlib.contextmanager
def server(behave):
    """Yields the address of a server that calls `behave` with connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection):
            with contextlib.suppress(OSError), connection:
                behave(connection)

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(
                        target=serve, args=listener.accept()[:1], daemon=True
                    ).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def says(words):
    """Says something, and hangs up."""
    return lambda connection: connection.sendall(words)


def says_and_listens(words):
    """Says something, and then nothing more."""

    def behave(connection):
        connection.sendall(words)
        while connection.recv(4096):
            pass

    return behave


def answers_pings_alone(connection):
    """Speaks HTTP/2 well, and answers no request."""
    connection.sendall(SETTINGS)
    with connection.makefile("rb") as received:
        received.read(PREFACE_BYTES)
        while len(header := received.read(HEADER_BYTES)) == HEADER_BYTES:
            body = received.read(int.from_bytes(header[:3], "big"))
            kind, is_answer = header[3], header[4] & 1
            if kind == SETTINGS[3] and not is_answer:
                connection.sendall(ACKNOWLEDGED)
            if kind == PING_ANSWER[3] and not is_answer:
                connection.sendall(PING_ANSWER + body)


def trickles(words):
    """Says something slowly, again and again."""

    def behave(connection):
        while True:
            for byte in words:
                connection.sendall(bytes([byte]))
                # It hangs up at the end.
                if select.select([connection], [], [], 0.05)[0]:
                    if not connection.recv(4096):
                        return

    return behave


def expects_tls(connection):
    """Shakes hands as TLS does, without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ADH:@SECLEVEL=0")
    context.wrap_socket(connection, server_side=True).close()


def ended(watched):
    """Ends a watcher's heartbeat; returns what the watcher prints then."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        watched._process.kill()
        watched._process.wait()
        watched._thread.join()
    # Python would write signals to what gets the number of its socket.
    signal.set_wakeup_fd(-1)
    return printed.getvalue()


OTHER, SILENT = "what listens there is no worker", "there is no answer"
# A server that hangs up at once may be taken for one that is gone or silent.
GONE = f"{OTHER}|nothing listens there|{SILENT}"
# Seconds in which even a busy machine hears an answer.
TIMEOUT = {OTHER: 4.0}
SERVERS = {
    "http_1": (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), OTHER),
    "ssh": (says(b"SSH-2.0-OpenSSH_9.2\r\n"), OTHER),
    "hangs_up": (says(b""), GONE),
    "hangs_up_early": (says(b"\0"), GONE),
    "tls": (expects_tls, GONE),
    "says_nothing": (says_and_listens(b""), SILENT),
    "trickles": (trickles(SETTINGS), f"{SILENT}|{OTHER}"),
    "settings_alone": (says_and_listens(SETTINGS), SILENT),
    "settings_and_end": (says(SETTINGS), GONE),
    "settings_and_pings": (answers_pings_alone, SILENT),
    "settings_and_noise": (says_and_listens(SETTINGS + b"\xff" * 5000), GONE),
    "settings_and_half": (says_and_listens(SETTINGS + PING_ANSWER), SILENT),
    "settings_and_http_1": (says(SETTINGS + b"HTTP/1.1 200 OK\r\n"), GONE),
}


class OtherServersTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, address, reason):
        timeout = TIMEOUT.get(reason, 1.0)
        start = time.monotonic()
        with self.assertRaisesRegex(
            tf.errors.UnavailableError,
            rf"No worker answers at {address} within .*\({address}: ({reason})",
        ):
            cluster.connect([address], timeout=timeout)
        # A limit of the contract, far above what it takes: it would hang.
        self.assertLess(time.monotonic() - start, timeout + 10)

    @parameterized.parameters(*SERVERS)
    def test_server(self, name):
        behave, reason = SERVERS[name]
        with server(behave) as address:
            self.check(address, reason)

    def test_nobody_accepts(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.check(f"127.0.0.1:{listener.getsockname()[1]}", SILENT)

    def test_another_service(self):
        dispatcher = tf.data.experimental.service.DispatchServer()
        self.check(dispatcher.target.removeprefix("grpc://"), OTHER)

    def test_beside_a_worker_that_is_missed(self):
        with server(says_and_listens(SETTINGS)) as silent:
            with server(says(b"220 mail\r\n")) as other:
                with self.assertRaisesRegex(
                    tf.errors.UnavailableError,
                    f"{silent}: {SILENT}; {other}: {OTHER}.* stage 0, 1 would",
                ):
                    cluster.connect([silent, other], timeout=TIMEOUT[OTHER])

    @parameterized.parameters({}, {"insecure_channel": None})
    def test_another_module_named_grpc(self, **attributes):
        """Such as a file `grpc.py` beside the program."""
        module = types.ModuleType("grpc")
        vars(module).update(attributes)
        with (
            server(says(SETTINGS)) as address,
            mock.patch.dict(sys.modules, grpc=module),
            self.assertRaisesRegex((ImportError, TypeError), "grpc|callable"),
        ):
            cluster.connect([address], timeout=4.0)

    def test_any_number_of_seconds(self):
        # The server begins as a worker does.
        with server(says(SETTINGS)) as address:
            host, _, port = address.rpartition(":")
            watched = watcher.Watcher({address: (host, int(port))}, 1e300)
            self.addCleanup(ended, watched)
            with socket.create_connection((host, int(port))):
                watched.look()
        watched.wait(60.0)
        self.assertIn(watched.lost[address], ("dead", "other"))


class HeartbeatTest(tf.test.TestCase):
    def watched(self, name, host, port):
        found = watcher.Watcher({name: (host, port)}, None)
        self.addCleanup(ended, found)
        return found

    def test_who_cannot_ask_hears_of_no_death(self):
        # No TCP connection leads to this address, and Linux says so at once.
        state = heartbeat.ask("255.255.255.255", 9, 1.0)
        self.assertEqual(state, heartbeat.SILENT)

    def test_ctrl_c_lowers_the_limit_until_the_worker_answers(self):
        worker = heartbeat._Worker("a", "127.0.0.1", 1, os.getpid())
        for seconds in (None, 60.0):
            worker.allow(seconds)
            worker.hurry()
            self.assertLess(worker.limit(0.0), 60.0)
            self.assertEqual(worker.limit(time.monotonic()), seconds)

    def test_a_pause_of_its_own_is_no_silence(self):
        """As of a container that is paused, with all of its processes."""
        late, asked = threading.Event(), threading.Event()

        def behave(connection):
            asked.set()
            late.wait(20.0)
            says_and_listens(SETTINGS)(connection)

        with server(behave) as address:
            host, _, port = address.rpartition(":")
            watched = watcher.Watcher({address: (host, int(port))}, 4.0)
            self.addCleanup(ended, watched)
            asked.wait(20.0)
            os.kill(watched.pid, signal.SIGSTOP)
            time.sleep(4.0)
            os.kill(watched.pid, signal.SIGCONT)
            # Until it has taken its first answer for late.
            time.sleep(0.5)
            late.set()
            watched.wait(4.0)
            self.assertEmpty(watched.lost)

    def test_whether_a_process_is_stopped(self):
        child = os.fork()
        if not child:
            signal.pause()
        self.assertFalse(heartbeat.is_stopped(child))
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        self.assertTrue(heartbeat.is_stopped(child))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.assertFalse(heartbeat.is_stopped(child))

    def test_every_socket_to_a_lost_worker_is_shut(self):
        """However many there are, and to whichever address of its host."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(heartbeat, "MOST_SOCKETS", 1))
            listener = socket.create_server(("127.0.0.1", 0))
            place = stack.enter_context(listener).getsockname()
            ends = [
                stack.enter_context(socket.create_connection(place, 20.0))
                for _ in range(3)
            ]
            # Nothing listens at the address that is asked.
            name = f"localhost:{place[1]}"
            watched = self.watched(name, "127.0.0.2", place[1])
            watched.look()
            for each in ends:
                self.assertEqual(each.recv(1), b"")

    def test_the_watcher_survives_a_failure_and_tells_of_its_end(self):
        looks = queue.Queue()

        def look():
            looks.put(None)
            raise OSError("Too many open files")

        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            watched = self.watched(f"{host}:{port}", host, port)
        watched.look = look
        for _ in range(2):
            looks.get(timeout=20.0)
        self.assertIn("lost workers has ended", ended(watched))

    def test_sockets_stay_blocking(self):
        first, second = socket.socketpair()
        socket.setdefaulttimeout(30.0)
        self.addCleanup(socket.setdefaulttimeout, None)
        with first, second:
            for each in sockets.borrowed():
                del each
            with sockets.copies():
                pass
            self.assertTrue(os.get_blocking(first.fileno()))


if __name__ == "__main__":
    tf.test.main()
