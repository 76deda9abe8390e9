"""One process at a time trains in a directory; errors of others name it."""

import fcntl
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.checkpoints.lock import Lock
from tf_gpipe.checkpoints.lock import LockedError
from tools import child_process

ROOT = pathlib.Path(__file__).parents[2]
# Some processes ask for the lock at the same moment, round after round. The
# one that gets it dies with it, so that the file then names a dead process.
RACE = """
import json
import os
import sys

from tf_gpipe.checkpoints.lock import Lock
from tf_gpipe.checkpoints.lock import LockedError

for _ in range(20):
    begin, end, results = os.pipe(), os.pipe(), os.pipe()
    for _ in range(4):
        if os.fork():
            continue
        os.close(begin[1])
        os.close(end[1])
        os.read(begin[0], 1)
        try:
            lock = Lock(sys.argv[1])
            told = None
        except LockedError as error:
            told = str(error)
        os.write(results[1], json.dumps([os.getpid(), told]).encode() + b"\\n")
        os.read(end[0], 1)
        os._exit(0)
    os.close(begin[1])
    os.close(results[1])
    with os.fdopen(results[0]) as lines:
        print(json.dumps([json.loads(lines.readline()) for _ in range(4)]))
    os.close(end[1])
    for _ in range(4):
        os.wait()
"""


def who(pid):
    return f"Process {pid} on {socket.gethostname()}"


class LockTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)
        self.file = self.path / ".lock"

    @pytest.mark.slow
    def test_race(self):
        result = subprocess.run(
            [sys.executable, "-c", RACE, str(self.path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            preexec_fn=child_process.end_with_parent,
        )
        rounds = list(map(json.loads, result.stdout.splitlines()))
        self.assertLen(rounds, 20)
        for found in rounds:
            (winner,) = (pid for pid, told in found if told is None)
            told = [x for _, x in found if x is not None]
            self.assertLen(told, 3)
            for message in told:
                self.assertStartsWith(message, f"{who(winner)} trains in ")
                self.assertNotIn("\n", message)

    def held(self, text):
        """Writes a text to the lock file, and locks it by another open file."""
        self.file.write_bytes(text)
        file = self.enterContext(self.file.open("r+b", buffering=0))
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    @parameterized.parameters(
        (b"", "Another process"),
        (b"\0\xff\n\n", "\0\ufffd"),
        (b"Process 7 on another.host\n", "Process 7 on another.host"),
        (b"x" * 10**6, "x" * 300),
        # No such process runs, but the file is locked: by another container?
        (b"Process 99999999 on %s\n", f"Process 99999999 on {'%s'}"),
    )
    def test_held(self, text, told):
        host = socket.gethostname()
        text = text.replace(b"%s", host.encode())
        told = told.replace("%s", host)
        self.held(text)
        with self.assertRaisesRegex(LockedError, f"^{re.escape(told)} trains"):
            Lock(self.path)

    @parameterized.parameters(b"", b"Process 99999999 on %s\n")
    def test_who_says_so_late(self, text):
        """A process has the lock a moment before it writes its name."""
        file = self.held(text.replace(b"%s", socket.gethostname().encode()))
        told = []

        def ask():
            with self.assertRaises(LockedError) as caught:
                Lock(self.path)
            told.append(str(caught.exception))

        thread = threading.Thread(target=ask)
        thread.start()
        os.truncate(self.file, 0)
        file.write(who(os.getpid()).encode())
        thread.join()
        self.assertStartsWith(told[0], who(os.getpid()))

    def test_released(self):
        lock = Lock(self.path)
        self.assertEqual(self.file.read_text(), who(os.getpid()) + "\n")
        self.assertTrue(lock.holds())
        with self.assertRaisesRegex(LockedError, who(os.getpid())):
            Lock(self.path)
        lock.release()
        self.assertFalse(lock.holds())
        self.assertEmpty(os.listdir(self.path))
        # Another lock is left alone.
        other = Lock(self.path)
        lock.release()
        self.assertTrue(other.holds())
        other.release()

    def test_a_child_that_outlives_the_process(self):
        """Such as one that prepares data: it was forked, and trains nothing."""
        lock = Lock(self.path)
        ended, ends = os.pipe()
        child = os.fork()
        if not child:
            os.close(ends)
            os.read(ended, 1)
            lock.release()
            os._exit(int(lock.holds() or not self.file.exists()))
        os.close(ended)
        try:
            # As the kernel does when a process is killed.
            lock._file.close()
            other = Lock(self.path)
        finally:
            os.close(ends)
            _, status = os.waitpid(child, 0)
        self.assertEqual(status, 0)
        self.assertTrue(other.holds())
        other.release()

    def test_that_cannot_be_written(self):
        self.file.mkdir()
        with self.assertRaises(OSError):
            Lock(self.path)


if __name__ == "__main__":
    absltest.main()
