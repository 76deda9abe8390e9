"""Charts, compared with what they should look like."""

import json
import os
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.simulate import Span
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.tasks import Task


class TextChartTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            "gpipe",
            [
                "device 0  F0-F1-F2-F3-............B3-B2-B1-B0-",
                "device 1  ...F0-F1-F2-F3-......B3-B2-B1-B0-...",
                "device 2  ......F0-F1-F2-F3-B3-B2-B1-B0-......",
                "makespan 12, bubble 33.3%",
            ],
        ),
        (
            "1f1b",
            [
                "device 0  F0-F1-F2-......B0-F3-B1-...B2-...B3-",
                "device 1  ...F0-F1-...B0-F2-B1-F3-B2-...B3-...",
                "device 2  ......F0-B0-F1-B1-F2-B2-F3-B3-......",
                "makespan 12, bubble 33.3%",
            ],
        ),
    )
    def test_schedules(self, name, lines):
        step = simulate(schedules.get(name, 3, 4), backward=1.0)
        chart = timeline.text_chart(step, width=46)
        self.assertEqual(chart.splitlines(), lines)

    def test_to_scale_with_recomputation(self):
        spans = simulate(schedules.gpipe(2, 2), recompute=1.0).spans
        self.assertEqual(
            timeline.text_chart(Execution(spans, ["a", "b"]), width=39),
            "a  F0-F1--R1-..........B1----R0-B0-----\n"
            "b  ...F0--F1-R1-B1-----R0-B0----.......\n"
            "makespan 11, bubble 27.3%",
        )

    def test_several_stages_a_device(self):
        step = simulate(schedules.interleaved(4, 2, 2), backward=1.0)
        self.assertEqual(
            timeline.text_chart(step, width=50),
            "device 0  F0.0F0.1F2.0F2.1....B2.0....B2.1B0.0B0.1\n"
            "device 1  ....F1.0F1.1F3.0B3.0F3.1B3.1B1.0B1.1....\n"
            "makespan 10, bubble 20.0%",
        )

    def test_label_without_room(self):
        # From 100 on, and out of order, as spans of a real clock are.
        spans = [
            Span(0, Task("B", 0, 10), 105.0, 120.0),
            Span(0, Task("F", 0, 10), 100.0, 102.0),
            Span(0, Task("F", 0, 1), 102.0, 103.0),
            Span(0, Task("F", 0, 2), 103.0, 103.1),
        ]
        # Names leave 20 columns to the time, whatever the width.
        self.assertEqual(
            timeline.text_chart(Execution(spans, ["a"]), width=1),
            "a  F-F..B10------------\nmakespan 20, bubble 9.5%",
        )

    def test_no_time(self):
        spans = [Span(0, Task("F", 0, 0), 1.0, 1.0)]
        self.assertEqual(
            timeline.text_chart(Execution(spans), width=30),
            "device 0  ....................\nmakespan 0, bubble 0.0%",
        )


class ChromeTraceTest(absltest.TestCase):
    def test_events(self):
        spans = [
            Span(0, Task("F", 0, 1), 5.0, 5.5),
            Span(1, Task("R", 1, 1), 5.5, 6.0),
            Span(1, Task("B", 1, 1), 6.0, 7.5),
        ]
        trace = timeline.chrome_trace(Execution(spans, ["a", "b"]))

        def thread(tid, name):
            args = {"name": name}
            return dict(name="thread_name", ph="M", pid=0, tid=tid, args=args)

        def event(name, cat, ts, dur, tid):
            return dict(
                name=name,
                cat=cat,
                ph="X",
                ts=ts,
                dur=dur,
                pid=0,
                tid=tid,
                args={"stage": tid, "micro_batch": 1},
            )

        self.assertEqual(
            trace,
            {
                "traceEvents": [
                    thread(0, "a"),
                    thread(1, "b"),
                    event("F0.1", "forward", 0.0, 5e5, 0),
                    event("R1.1", "recompute", 5e5, 5e5, 1),
                    event("B1.1", "backward", 1e6, 1.5e6, 1),
                ]
            },
        )
        self.assertEqual(json.loads(json.dumps(trace)), trace)

    def test_default_names(self):
        step = simulate(schedules.gpipe(2, 1))
        events = timeline.chrome_trace(step)["traceEvents"]
        names = [e["args"]["name"] for e in events if e["ph"] == "M"]
        self.assertEqual(names, ["device 0", "device 1"])
        # A unit is a second.
        self.assertEqual(events[-1]["ts"], 4e6)


class PictureTest(absltest.TestCase):
    def path(self, name):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        return os.path.join(folder, name)

    def test_png(self):
        from matplotlib import colors
        from matplotlib import image

        spans = simulate(schedules.zero_bubble(3, 4), recompute=1.0).spans
        without = [x for x in spans if x.task.kind != "R"]
        path = self.path("a.png")
        timeline.picture(
            {
                "simulated": Execution(spans),
                "measured": Execution(without, list("abc")),
            },
            path,
        )
        pixels = image.imread(path)[..., :3]
        self.assertGreater(pixels.shape[1], pixels.shape[0])
        for colour in timeline._COLOURS.values():
            same = abs(pixels - colors.to_rgb(colour)).max(axis=-1) < 0.01
            # Much more than the legend's.
            self.assertGreater(same.mean(), 0.02, colour)

    def test_svg(self):
        spans = simulate(schedules.interleaved(4, 2, 2)).spans
        path = self.path("a.svg")
        # As text and not as outlines, to be found.
        from matplotlib import rc_context

        with rc_context({"svg.fonttype": "none"}):
            timeline.picture({"On paper": Execution(spans, ["x", "y"])}, path)
        with open(path) as f:
            text = f.read()
        words = ["On paper: bubble 20.0%", "x", "y", "forward", "backward"]
        for word in [*words, "0.0", "3.1"]:
            self.assertIn(f">{word}</text>", text)
        self.assertNotIn("recompute", text)

    def test_number_only_where_it_fits(self):
        from matplotlib import rc_context

        spans = [
            Span(0, Task("F", 0, 77), 0.0, 1.0),
            Span(0, Task("B", 0, 88), 1.0, 1000.0),
        ]
        path = self.path("a.svg")
        with rc_context({"svg.fonttype": "none"}):
            timeline.picture({"": Execution(spans)}, path)
        with open(path) as f:
            text = f.read()
        self.assertIn(">88</text>", text)
        self.assertNotIn(">77</text>", text)

    def test_no_time(self):
        path = self.path("a.png")
        spans = [Span(0, Task("F", 0, 0), 1.0, 1.0)]
        timeline.picture({"a": Execution(spans)}, path)
        self.assertGreater(os.path.getsize(path), 0)

    def test_without_matplotlib(self):
        step = simulate(schedules.gpipe(1, 1))
        path = self.path("a.png")
        with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
            with self.assertRaisesRegex(
                ImportError, r"pip install tf_gpipe\[plot\]"
            ):
                timeline.picture({"a": step}, path)
        self.assertFalse(os.path.exists(path))

    def test_refuses_nothing(self):
        with self.assertRaisesRegex(ValueError, "nothing to draw.*steps={}"):
            timeline.picture({}, self.path("a.png"))


class ErrorsTest(absltest.TestCase):
    def test_refuses(self):
        with self.assertRaisesRegex(ValueError, r"has tasks.*spans=\[\]"):
            Execution([], devices=None)
        spans = simulate(schedules.gpipe(3, 1)).spans
        with self.assertRaisesRegex(ValueError, r"3 devices.*\['a', 'b'\]"):
            Execution(spans, devices=["a", "b"])

    def test_imports_neither_tensorflow_nor_matplotlib(self):
        # The package imports TensorFlow, so its modules are loaded without it.
        code = (
            "import sys, types\n"
            "package = types.ModuleType('tf_gpipe')\n"
            f"package.__path__ = [{os.path.dirname(tf_gpipe.__file__)!r}]\n"
            "sys.modules['tf_gpipe'] = package\n"
            "import tf_gpipe.schedule.timeline\n"
            "assert 'tensorflow' not in sys.modules\n"
            "assert 'matplotlib' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    absltest.main()
