"""Files of a step: all of one is written, or the one before stays."""

import json
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.step_files import StepFiles


class StepFilesTest(absltest.TestCase):
    def test_trace_is_replaced_as_a_whole(self):
        """Also where the disk is full in the midst of it."""
        directory = self.enterContext(tempfile.TemporaryDirectory())
        path = pathlib.Path(directory) / "trace.json"
        steps = {"step": simulate(schedules.get("gpipe", 2, 2))}
        files = StepFiles(trace=path)
        files.write(steps)
        before = path.read_text()
        self.assertIn("traceEvents", json.loads(before))

        def full(*args, **kwargs):
            raise OSError("no space")

        with (
            mock.patch.object(json, "dump", full),
            mock.patch.object(json, "dumps", full),
            self.assertRaises(OSError),
        ):
            files.write(steps)
        self.assertEqual(path.read_text(), before)
        self.assertEqual(os.listdir(path.parent), ["trace.json"])


if __name__ == "__main__":
    absltest.main()
