"""Files of a step: all of one is written, or the one before stays."""

import json
import os
import pathlib
import subprocess
import tempfile
import textwrap

from absl.testing import absltest
from absl.testing import parameterized

from tests import quick_python
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.step_files import StepFiles


class StepFilesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("trace", "step.json", b'{"traceEvents"'),
        ("picture", "step.png", b"\x89PNG"),
        ("picture", "step.SVG", b"<?xml"),
        ("html", "step.html", b"<html>"),
    )
    def test_replaced_as_a_whole(self, kind, name, start):
        """Also where the disk is full in the midst of it."""
        directory = self.enterContext(tempfile.TemporaryDirectory())
        path = pathlib.Path(directory) / name
        steps = {"step": simulate(schedules.get("gpipe", 2, 2))}
        files = StepFiles(**{kind: path})
        files.write(steps)
        before = path.read_bytes()
        self.assertIn(start, before[:40])
        if kind == "trace":
            self.assertIn("traceEvents", json.loads(before))
        script = textwrap.dedent(
            f"""
            import resource, signal
            from tf_gpipe.schedule import schedules
            from tf_gpipe.schedule.simulate import simulate
            from tf_gpipe.schedule.step_files import StepFiles

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            files = StepFiles({kind}={str(path)!r})
            steps = {{"step": simulate(schedules.get("gpipe", 2, 2))}}
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            files.write(steps)
            """
        )
        command = [*quick_python.command(), "-c", script]
        result = subprocess.run(command, capture_output=True, text=True)
        self.assertIn("File too large", result.stderr)
        self.assertTrue(path.read_bytes() == before)
        self.assertEqual(os.listdir(directory), [name])

    def test_picture_without_an_ending(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        steps = {"step": simulate(schedules.get("gpipe", 2, 2))}
        StepFiles(picture=os.path.join(directory, "step")).write(steps)
        self.assertEqual(os.listdir(directory), ["step.png"])


if __name__ == "__main__":
    absltest.main()
