"""One trainer in a working directory, and flags that stay the same there."""

import contextlib
import fcntl
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tools import child_process
from trainers.command_line import UserError
from trainers.workdir import Workdir

ROOT = pathlib.Path(__file__).parents[2]
TRAINS = """
import sys
from trainers.workdir import Workdir

workdir = Workdir(sys.argv[1])
workdir.lock()
print("locked", flush=True)
sys.stdin.read()
"""


class WorkdirTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)

    def other(self):
        """Starts a process that trains in the working directory."""
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINS, str(self.path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=child_process.end_with_parent,
        )

        def end():
            process.kill()
            process.communicate()

        self.addCleanup(end)
        return process

    def test_url(self):
        self.enterContext(contextlib.chdir(self.path))
        for url in ("gs://bucket/run", pathlib.Path("gs://bucket/run")):
            with self.assertRaisesRegex(UserError, "must be a local path"):
                Workdir(url)
        self.assertEmpty(os.listdir())

    @pytest.mark.slow
    def test_lock(self):
        process = self.other()
        self.assertEqual(process.stdout.readline(), "locked\n")
        who = f"Process {process.pid} on {socket.gethostname()} trains in"
        with self.assertRaisesRegex(UserError, f"{who} {self.path} already"):
            Workdir(self.path).lock()
        # A dead process locks nothing, whatever the file says of it.
        process.kill()
        process.wait()
        workdir = Workdir(self.path)
        workdir.lock()
        text = (self.path / ".lock").read_text()
        self.assertIn(f"Process {os.getpid()} on", text)
        # The same process may, again; another one once it is done.
        Workdir(self.path).lock()
        process = self.other()
        self.assertEqual(process.stdout.readline(), "")
        self.assertIn(f"Process {os.getpid()} on", process.stderr.read())
        workdir.unlock()
        process = self.other()
        self.assertEqual(process.stdout.readline(), "locked\n")

    @parameterized.parameters(
        "", "Process 1 on this host", "Process 1 on another.host", "\0\xff"
    )
    def test_lock_of_a_dead_process(self, text):
        (self.path / ".lock").write_text(text)
        Workdir(self.path).lock()
        self.assertIn(f"{os.getpid()}", (self.path / ".lock").read_text())

    def test_deleted_while_locked(self):
        before = Workdir(self.path)
        before.lock()
        (self.path / ".lock").unlink()
        after = Workdir(self.path)
        after.lock()
        self.assertIn(f"{os.getpid()}", (self.path / ".lock").read_text())

    def test_changed(self):
        workdir = Workdir(self.path)
        self.assertEmpty(workdir.changed({"seed": 1}))
        workdir.keep({"seed": 0, "sizes": (1, 2), "crop": None})
        same = {"seed": 0, "sizes": (1, 2), "crop": None, "new": 3}
        self.assertEmpty(workdir.changed(same))
        self.assertEqual(
            workdir.changed({"seed": 1, "crop": "pad"}),
            ["--seed was 0, is 1", "--crop was None, is 'pad'"],
        )

    @parameterized.parameters("", "[", "3", "\0", "[" * 100_000)
    def test_changed_of_a_damaged_file(self, text):
        (self.path / "run.json").write_text(text)
        with self.assertRaisesRegex(UserError, "run.json is damaged"):
            Workdir(self.path).changed({"seed": 0})

    @parameterized.parameters("losses.csv", "flags.txt", "run.json", ".lock")
    def test_directory_in_place_of_a_file(self, name):
        (self.path / name).mkdir()
        with self.assertRaisesRegex(UserError, f"{name} must be a file"):
            Workdir(self.path)

    @parameterized.parameters("checkpoints", "export", "logs", "logs/train")
    def test_file_in_place_of_a_directory(self, name):
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_text("")
        with self.assertRaisesRegex(UserError, f"{name} must be a directory"):
            Workdir(self.path)

    @parameterized.parameters(
        ("losses.csv", "nonsuch/x"),
        ("run.json", "run.json"),
        ("checkpoints", "nonsuch/x"),
        ("logs", "nonsuch"),
    )
    def test_link_that_leads_nowhere(self, name, target):
        (self.path / name).symlink_to(target)
        with self.assertRaisesRegex(UserError, f"{name} must be a"):
            Workdir(self.path)

    def test_link_to_another_place(self):
        place = self.path / "elsewhere"
        place.mkdir()
        (self.path / "checkpoints").symlink_to(place)
        # Replacing a file writes through the link.
        (self.path / "losses.csv").symlink_to(place / "losses.csv")
        Workdir(self.path)

    def test_of_a_place_that_cannot_be(self):
        (self.path / "file").write_text("")
        with self.assertRaisesRegex(UserError, "Cannot write to --workdir"):
            Workdir(self.path / "file" / "x").lock()
        with self.assertRaisesRegex(UserError, "Cannot read --workdir"):
            Workdir(self.path / ("x" * 300))

    def test_lock_that_says_anything(self):
        path = self.path / ".lock"
        path.write_bytes(bytes(range(256)))
        with path.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with self.assertRaisesRegex(UserError, "trains in .* already"):
                Workdir(self.path).lock()
        Workdir(self.path).lock()


if __name__ == "__main__":
    absltest.main()
