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
                "F forward, B backward, with the micro-batch;",
                ". idle",
            ],
        ),
        (
            "1f1b",
            [
                "device 0  F0-F1-F2-......B0-F3-B1-...B2-...B3-",
                "device 1  ...F0-F1-...B0-F2-B1-F3-B2-...B3-...",
                "device 2  ......F0-B0-F1-B1-F2-B2-F3-B3-......",
                "makespan 12, bubble 33.3%",
                "F forward, B backward, with the micro-batch;",
                ". idle",
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
            "makespan 11, bubble 27.3%\n"
            "F forward, R recompute, B backward,\n"
            "with the micro-batch; . idle",
        )

    def test_several_stages_a_device(self):
        step = simulate(schedules.interleaved(4, 2, 2), backward=1.0)
        self.assertEqual(
            timeline.text_chart(step, width=50),
            "device 0  F0.0F0.1F2.0F2.1....B2.0....B2.1B0.0B0.1\n"
            "device 1  ....F1.0F1.1F3.0B3.0F3.1B3.1B1.0B1.1....\n"
            "makespan 10, bubble 20.0%\n"
            "F forward, B backward, with stage.micro-batch;\n. idle",
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
            "a  F-F..B10------------\nmakespan 20,\nbubble 9.5%\n"
            "F forward, B backward,\nwith the micro-batch\nwhere it fits;\n"
            ". idle",
        )

    def test_no_time(self):
        spans = [Span(0, Task("F", 0, 0), 1.0, 1.0)]
        self.assertEqual(
            timeline.text_chart(Execution(spans), width=30),
            "device 0  ....................\nmakespan 0, bubble 0.0%\n"
            "F forward; . idle",
        )

    def test_seconds_on_cores_that_are_shared(self):
        spans = [
            Span(0, Task("F", 0, 0), 7.0, 7.02),
            Span(1, Task("F", 1, 0), 7.02, 7.04),
        ]
        names = [f"/job:worker/replica:0/task:3/device:CPU:{i}" for i in (0, 1)]
        chart = timeline.text_chart(
            Execution(spans, names, in_seconds=True), width=27
        )
        self.assertStartsWith(
            chart,
            "CPU:0  F0--------..........\nCPU:1  ..........F0--------\n"
            "makespan 40 ms,\nbubble 50.0%;\na column is 2 ms\n",
        )
        self.assertEndsWith(
            chart.replace("\n", " "), f" {timeline.SHARED_CORES}"
        )

    @parameterized.product(
        width=(40, 60, 80), num_devices=(2, 4, 8, 16), name=("1f1b", "zb_v")
    )
    def test_width_and_what_letters_mean(self, width, num_devices, name):
        stages = num_devices * (2 if name == "zb_v" else 1)
        step = simulate(schedules.get(name, stages, 2 * stages), remat="never")
        names = [f"/job:w/task:{i}/device:CPU:0" for i in range(num_devices)]
        step = Execution(step.spans, names, in_seconds=True)
        rows = timeline.text_chart(step, width).splitlines()
        self.assertLessEqual(max(map(len, rows)), width)
        self.assertEqual({len(x) for x in rows[:num_devices]}, {width})
        below = " ".join(rows[num_devices:])
        self.assertEndsWith(below, ". idle")
        # The line below explains numbers if there are any.
        times = "".join(x.split()[1] for x in rows[:num_devices])
        self.assertEqual("with " in below, any(map(str.isdigit, times)))

    @parameterized.parameters(
        (["/device:CPU:0", "/device:CPU:1"], True),
        (["CPU:0", "/device:CPU:0"], False),
        (
            [
                "/job:worker/task:0/device:CPU:0",
                "/job:worker/task:1/device:CPU:0",
            ],
            False,
        ),
        (["GPU:0", "GPU:1"], False),
        (["device 0", "device 1"], False),
    )
    def test_shared_cores(self, names, expected):
        self.assertEqual(timeline.shares_cores(names), expected)

    @parameterized.parameters(
        (["/device:GPU:0", "device 1"], ["GPU:0", "device 1"]),
        (
            [f"/job:worker/replica:0/task:{i}/device:TPU:0" for i in (0, 1)],
            ["worker:0/TPU:0", "worker:1/TPU:0"],
        ),
        (
            ["CPU:0", "/job:worker/task:1/device:CPU:0"],
            ["CPU:0", "worker:1/CPU:0"],
        ),
    )
    def test_short_names(self, names, expected):
        self.assertEqual(timeline.short_names(names), expected)


class ChromeTraceTest(parameterized.TestCase):
    def test_events(self):
        spans = [
            Span(0, Task("F", 0, 1), 5.0, 5.5),
            Span(1, Task("R", 1, 1), 5.5, 6.0),
            Span(1, Task("B", 1, 1), 6.0, 7.5),
        ]
        trace = timeline.chrome_trace(Execution(spans, ["a", "b"]))

        def metadata(what, tid, **args):
            return dict(name=what, ph="M", pid=0, tid=tid, args=args)

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
                    metadata(
                        "process_name",
                        0,
                        name="pipeline, makespan 2.5, bubble 50.0%",
                    ),
                    metadata("thread_name", 0, name="a"),
                    metadata("thread_sort_index", 0, sort_index=0),
                    metadata("thread_name", 1, name="b"),
                    metadata("thread_sort_index", 1, sort_index=1),
                    event("F0.1", "forward", 0.0, 5e5, 0),
                    event("R1.1", "recompute", 5e5, 5e5, 1),
                    event("B1.1", "backward", 1e6, 1.5e6, 1),
                ],
                "displayTimeUnit": "ms",
            },
        )
        self.assertEqual(json.loads(json.dumps(trace)), trace)

    @parameterized.parameters("gpipe", "1f1b", "zero_bubble", "zb_v")
    def test_is_in_the_trace_event_format(self, name):
        """As "Trace Event Format" specifies events of the phases M and X."""
        schedule = schedules.get(name, 4, 6)
        step = simulate(schedule, recompute=1.0)
        trace = json.loads(json.dumps(timeline.chrome_trace(step)))
        self.assertIn(trace["displayTimeUnit"], ("ms", "ns"))
        until, named = {}, set()
        for event in trace["traceEvents"]:
            place = event["pid"], event["tid"]
            self.assertIsInstance(event["name"], str)
            self.assertTrue(all(isinstance(x, int) for x in place))
            self.assertIsInstance(event["args"], dict)
            if event["ph"] == "M":
                kinds = {
                    "process_name": ("name", str),
                    "thread_name": ("name", str),
                    "thread_sort_index": ("sort_index", int),
                }
                key, kind = kinds[event["name"]]
                self.assertIsInstance(event["args"][key], kind)
                named.add((event["name"], place))
                continue
            self.assertEqual(event["ph"], "X")
            self.assertIsInstance(event["cat"], str)
            self.assertGreaterEqual(event["ts"], 0)
            self.assertGreaterEqual(event["dur"], 0)
            # Complete events of a thread are nested, or one after another.
            self.assertGreaterEqual(event["ts"], until.get(place, 0))
            until[place] = event["ts"] + event["dur"]
            self.assertIn(("thread_name", place), named)
        self.assertLen(until, len(step.devices))
        self.assertIn(("process_name", (0, 0)), named)

    def test_default_names(self):
        step = simulate(schedules.gpipe(2, 1))
        events = timeline.chrome_trace(step)["traceEvents"]
        names = [
            e["args"]["name"] for e in events if e["name"] == "thread_name"
        ]
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
        for colour in timeline.COLOURS.values():
            same = abs(pixels - colors.to_rgb(colour)).max(axis=-1) < 0.01
            # Bars cover much more than the legend's patches.
            self.assertGreater(same.mean(), 0.02, colour)

    def test_svg(self):
        spans = simulate(schedules.interleaved(4, 2, 2)).spans
        path = self.path("a.svg")
        # Writes labels as text, not as outlines, so that they can be found.
        from matplotlib import rc_context

        with rc_context({"svg.fonttype": "none"}):
            timeline.picture({"On paper": Execution(spans, ["x", "y"])}, path)
        with open(path) as f:
            text = f.read()
        words = [
            "On paper: makespan 15, bubble 20.0%",
            "x",
            "y",
            "forward",
            "backward",
        ]
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
            with self.assertRaisesRegex(ImportError, r"pip install matplotlib"):
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
        # An empty package replaces tf_gpipe's own, which imports TensorFlow.
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
