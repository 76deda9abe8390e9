"""Tables and pictures of benchmark results."""

import contextlib
import io
import json
import os
import tempfile
from unittest import mock

from absl.testing import absltest

from tools.benchmark.report import Report
from tools.benchmark.report import _label

ROWS = [
    {"": "tf_gpipe", "K": 2, "mode": "", "samples/s": 3.0},
    {"": "Keras", "K": 1, "mode": "", "samples/s": 2.0},
]


class ReportTest(absltest.TestCase):
    def test_print(self):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            Report("Title", ROWS, {"rows": ROWS}, notes=["Note"]).print(True)
        *lines, last = output.getvalue().splitlines()
        text = "\n".join(lines)
        for expected in ("Title", "tf_gpipe", "3.000", "Note", "tensorflow"):
            self.assertIn(expected, text)
        found = json.loads(last)
        self.assertEqual(found["rows"], ROWS)
        self.assertIn("processor", found["machine"])

    def test_whole_words_at_80_columns(self):
        labels = {"K": 2, "schedule": "interleaved_zero_bubble", "remat": "x"}
        names = ["samples/s", "speed-up", "ideal", "fraction", "simulated"]
        figures = {f"{name} {i}": 1.25 + i for i in range(3) for name in names}
        output = io.StringIO()
        self.enterContext(mock.patch.dict(os.environ, {"COLUMNS": "80"}))
        with contextlib.redirect_stdout(output):
            Report(
                "[K]",
                [{**labels, **figures}, {**labels, **figures, "remat": "y"}],
                {},
            ).print()
        lines = output.getvalue().splitlines()
        self.assertLessEqual(max(map(len, lines)), 80)
        text = output.getvalue()
        self.assertNotIn("…", text)
        self.assertIn("[K]", text)
        # Both rows have each figure, and their labels in each part of the
        # table.
        for i in range(3):
            self.assertEqual(text.count(f"{1.25 + i:.3f}"), 2 * len(names))
        parts = text.count("remat")
        self.assertGreater(parts, 1)
        # Said once, since all rows have it.
        self.assertEqual(text.count("K 2, schedule interleaved_zero_bubble"), 1)
        self.assertEqual(text.count("interleaved_zero_bubble"), 1)

    def test_plot(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        path = os.path.join(folder, "a.png")
        Report("Title", ROWS, {}, "samples/s").plot(path)
        with open(path, "rb") as f:
            self.assertEqual(f.read(4), b"\x89PNG")

    def test_label(self):
        self.assertEqual(_label(ROWS[0]), "tf_gpipe, K=2")


if __name__ == "__main__":
    absltest.main()
