"""The page of a step is one file with all that it shows."""

import json
import os
import re
import sys
import tempfile
from unittest import mock

from absl.testing import absltest

from tf_gpipe.schedule import page
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.simulate import simulate


class PageTest(absltest.TestCase):
    def written(self, steps, **kwargs):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        path = os.path.join(folder, "a.html")
        page.write(steps, path, **kwargs)
        with open(path, encoding="utf-8") as f:
            return f.read()

    def parsed(self, text):
        """Returns the page's own script, and the traces in it."""
        own = text[text.rindex("Plotly.newPlot(") :]
        traces, _ = json.JSONDecoder().raw_decode(own, own.index("["))
        return own, traces

    def test_is_one_file_with_charts_and_the_table(self):
        spans = simulate(schedules.zero_bubble(3, 4), recompute=1.0).spans
        names = [f"/device:CPU:{i}" for i in range(3)]
        text = self.written(
            {
                "simulated": Execution(spans),
                "measured": Execution(spans, names, in_seconds=True),
            },
            about=[{"layers": f"of stage {k}"} for k in range(3)],
        )
        # Nothing is loaded from elsewhere.
        self.assertEmpty(
            re.findall(r"<(?:script|link)[^>]+(?:src|href)=", text)
        )
        own, traces = self.parsed(text)
        for word in ("simulated: makespan", "measured: makespan", "CPU:2"):
            self.assertIn(word, own)
        bars = [x for x in traces if x["type"] == "bar"]
        for kind in ("forward", "recompute", "backward", "weights"):
            # It has bars in both charts, and is once in the legend.
            both = [x for x in bars if x["name"] == kind]
            self.assertEqual([x["showlegend"] for x in both], [True, False])
            self.assertLen({x["legendgroup"] for x in both}, 1)
            self.assertIn(f'"{kind}"', own)
        self.assertIn("of stage 2", own)
        self.assertIn("share the cores", own)
        self.assertIn("W: weights of stage 1, micro-batch 3", own)

    def test_devices_of_one_name(self):
        """Each has a row of its own, also one that runs nothing."""
        spans = simulate(schedules.one_f_one_b(2, 2)).spans
        step = Execution(spans, ["CPU:0", "CPU:0", "CPU:1"])
        own, traces = self.parsed(self.written({"simulated": step}))
        rows = {y for x in traces if x["type"] == "bar" for y in x["y"]}
        self.assertEqual(rows, {0, 1})
        self.assertIn('["CPU:0","CPU:0","CPU:1"]', own)

    def test_refuses_nothing(self):
        with self.assertRaisesRegex(ValueError, "nothing to show.*steps={}"):
            page.write({}, "a.html")

    def test_without_plotly(self):
        with mock.patch.dict(sys.modules, {"plotly.graph_objects": None}):
            with self.assertRaisesRegex(ImportError, r"pip install plotly"):
                page.check("a.html")

    def test_refuses_another_ending(self):
        with self.assertRaisesRegex(ValueError, r"ends in \.html.*: a\.txt"):
            page.check("a.txt")


if __name__ == "__main__":
    absltest.main()
