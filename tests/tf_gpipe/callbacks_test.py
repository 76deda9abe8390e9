"""The Timeline callback records what ran, and changes nothing."""

import json
import os
import pathlib
import statistics
import sys
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.tf_gpipe.comparison import assert_same
from tf_gpipe import upstream
from tf_gpipe.callbacks.step_times import stage_seconds
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.simulate import simulate


def make_model(**kwargs):
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((4,)),
        *(keras.layers.Dense(8, "tanh") for _ in range(4)),
    ]
    model = tf_gpipe.PipelinedSequential(
        layers,
        **{"num_stages": 2, "num_micro_batches": 4, **kwargs},
    )
    model.compile("adam", "mse")
    return model


def make_data(rows=24):
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    return x, np.repeat(x, 2, axis=1)


class TimelineTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        schedule=("1f1b", "gpipe"), remat=("always", "except_last", "never")
    )
    @pytest.mark.slow_after(1)
    def test_records_all_tasks_in_order(self, schedule, remat):
        model = make_model(schedule=schedule, remat=remat)
        recorder = tf_gpipe.callbacks.Timeline()
        history = model.fit(
            *make_data(), batch_size=8, verbose=0, callbacks=[recorder]
        )
        for device, row in enumerate(model._pipeline.schedule.tasks):
            spans = [s for s in recorder.spans if s.device == device]
            self.assertEqual(
                list(row), [s.task for s in spans if s.task.kind != "R"]
            )
            for a, b in zip(spans, spans[1:], strict=False):
                self.assertLessEqual(a.end, b.start)
        recomputed = sum(s.task.kind == "R" for s in recorder.spans)
        expected = {"always": 4, "except_last": 3, "never": 0}[remat]
        # Under 1F1B the last stage recomputes nothing.
        stages = {"gpipe": 2, "1f1b": 1}[schedule]
        self.assertEqual(recomputed, expected * stages)
        (bubble,) = history.history["bubble"]
        self.assertBetween(bubble, 0.0, 1.0)

    @pytest.mark.slow
    def test_logs_reach_other_callbacks_in_any_order(self):
        names = {"bubble", "idle_stage_0", "idle_stage_1"}
        seen = []
        reader = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(names & {*logs})
        )
        timeline = tf_gpipe.callbacks.Timeline()
        history = keras.callbacks.History()
        board = keras.callbacks.TensorBoard(self.get_temp_dir())
        orders = (
            [history, reader, board, timeline],
            (reader, [board, timeline]),
            keras.callbacks.CallbackList(
                [history, reader, timeline], add_progbar=True
            ),
        )
        model = make_model()
        for callbacks in orders:
            if isinstance(callbacks, keras.callbacks.CallbackList):
                callbacks.set_model(model)
            model.fit(
                *make_data(), batch_size=8, verbose=0, callbacks=callbacks
            )
            self.assertContainsSubset(names, model.history.history)
            idle = [model.history.history[x][-1] for x in sorted(names)]
            # One stage per device: the bubble is the mean idle share.
            self.assertAllClose(idle[0], np.mean(idle[1:]))
        self.assertEqual(seen, [names] * 3)
        self.assertContainsSubset(
            {f"epoch_{x}" for x in names}, self.tags("train")
        )

    def tags(self, run):
        """Returns the tags that a run has written for TensorBoard."""
        return {
            value.tag
            for path in pathlib.Path(self.get_temp_dir(), run).glob("events*")
            for event in tf.compat.v1.train.summary_iterator(str(path))
            for value in event.summary.value
        }

    def test_shows_the_step_of_median_length(self):
        timeline = tf_gpipe.callbacks.Timeline()
        lengths = []

        class Lengths(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                lengths.clear()

            def on_train_batch_end(self, batch, logs=None):
                if timeline.spans:
                    lengths.append(Execution(timeline.spans).makespan)

        # The last step has two rows, and as many micro-batches.
        make_model().fit(
            *make_data(42),
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=[timeline, Lengths()],
        )
        self.assertLen(lengths, 6)
        shown = Execution(timeline.spans).makespan
        self.assertEqual(shown, statistics.median_low(lengths))
        # The simulation is of the same step.
        self.assertLen(timeline.simulated().spans, len(timeline.spans))

    def test_images_for_tensorboard(self):
        recorder = tf_gpipe.callbacks.Timeline(log_dir=self.get_temp_dir())
        make_model().fit(
            *make_data(), batch_size=8, verbose=0, callbacks=[recorder]
        )
        self.assertEqual(self.tags("timeline"), {"timeline"})

    def test_page(self):
        path = pathlib.Path(self.get_temp_dir(), "run.html")
        recorder = tf_gpipe.callbacks.Timeline(html=path)
        model = make_model()
        model.fit(*make_data(), batch_size=8, verbose=0, callbacks=[recorder])
        text = path.read_text()
        for stage in model.stages:
            self.assertIn(f"from {stage.nodes[0].layer.name}", text)
        for title in ("simulated: makespan", "measured: makespan"):
            self.assertIn(title, text)

    @pytest.mark.slow
    def test_names_tasks_in_a_profile(self):
        log_dir = self.enterContext(tempfile.TemporaryDirectory())
        recorder = tf_gpipe.callbacks.Timeline()
        model = make_model(schedule="zero_bubble", remat="never")
        data = make_data(40)
        with self.assertRaisesRegex(ValueError, "There is no profile"):
            recorder.name_tasks(log_dir)
        model.fit(*data, batch_size=8, verbose=0, callbacks=[recorder])
        with tf.profiler.experimental.Profile(log_dir):
            model.predict(data[0], verbose=0)
        with self.assertRaisesRegex(ValueError, "None of the last recorded"):
            recorder.name_tasks(log_dir)
        with tf.profiler.experimental.Profile(log_dir):
            model.fit(*data, batch_size=8, verbose=0, callbacks=[recorder])
        newest = max(
            pathlib.Path(log_dir).rglob("*.xplane.pb"),
            key=lambda x: x.stat().st_mtime_ns,
        )
        # XProf shows what it has made of a profile before, if that is there.
        cached = newest.with_name("host.SSTABLE")
        cached.touch()
        # Steps 1 to 4, two stages, four micro-batches, three kinds of tasks.
        self.assertEqual(recorder.name_tasks(log_dir), 4 * 2 * 4 * 3)
        self.assertFalse(cached.exists())
        # A second call replaces what the first one has added.
        recorder.name_tasks(log_dir)
        space = upstream.read_profile(newest.read_bytes())
        (host,) = (x for x in space.planes if x.name == "/host:CPU")
        lines = [x for x in host.lines if x.name.startswith("pipeline ")]
        self.assertEqual(
            [x.name for x in lines], ["pipeline CPU:0", "pipeline CPU:1"]
        )
        until = max(
            event.offset_ps
            for line in host.lines
            for event in line.events
            if line not in lines
        )
        for stage, line in enumerate(lines):
            names = [
                host.event_metadata[x.metadata_id].name for x in line.events
            ]
            row = model._pipeline.schedule.tasks[stage]
            self.assertEqual(names, [str(task) for task in row] * 4)
            self.assertIn(f"W{stage}.1", names)
            starts = [event.offset_ps for event in line.events]
            self.assertEqual(starts, sorted(starts))
            # The tasks lie within the time of the profile's operations.
            self.assertBetween(starts[0], 0, until)

    def test_a_profile_of_something_else(self):
        path = pathlib.Path(self.get_temp_dir(), "host.xplane.pb")
        path.write_bytes(upstream.read_profile(b"").SerializeToString())
        with self.assertRaisesRegex(ValueError, "has 0 planes '/host:CPU'"):
            tf_gpipe.callbacks.Timeline().name_tasks(self.get_temp_dir())

    def test_means_where_some_are_split(self):
        """Whole backward passes count as if they were split, too."""
        pipeline = make_model(
            schedule="eager_zero_bubble", remat="never"
        )._pipeline
        spans = simulate(
            pipeline.schedule, 1.0, backward=5.0, weights=2.0, remat="never"
        ).spans
        found = stage_seconds(pipeline, spans)
        self.assertEqual(found["F"], [1.0, 1.0])
        # The first stage splits none.
        self.assertAllClose(found["B"], [5.0, 3.0])
        self.assertAllClose(found["W"], [0.0, 2.0])

    def test_same_numbers(self):
        x, y = make_data()
        models = [make_model(), make_model()]
        for model, callbacks in zip(
            models, ([], [tf_gpipe.callbacks.Timeline()]), strict=True
        ):
            model.fit(
                x,
                y,
                batch_size=8,
                epochs=2,
                shuffle=False,
                verbose=0,
                callbacks=callbacks,
            )
        assert_same(self, *((model, []) for model in models))

    def test_chosen_steps(self):
        model = make_model()
        recorder = tf_gpipe.callbacks.Timeline(steps=[4])
        history = model.fit(
            *make_data(),
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=[recorder],
        )
        # Step 4 is in the second epoch: the first one has no bubble.
        self.assertLen(history.history["bubble"], 1)

    @pytest.mark.slow
    def test_chosen_steps_of_executions(self):
        model = make_model()
        model.compile("sgd", "mse", steps_per_execution=3)
        recorded = []
        for steps in ([2], [3], [5], None):
            recorder = tf_gpipe.callbacks.Timeline(steps=steps)
            model.fit(
                *make_data(48), batch_size=8, verbose=0, callbacks=[recorder]
            )
            recorded.append(bool(recorder.spans))
        self.assertEqual(recorded, [True, False, True, True])

    @parameterized.parameters("eager", "call", "train_step")
    def test_step_without_times(self, what):
        class Doubled(tf_gpipe.PipelinedSequential):
            def call(self, inputs, training=None, mask=None):
                return 2.0 * super().call(inputs, training, mask)

        class Nothing(tf_gpipe.PipelinedSequential):
            def train_step(self, data):
                return {"loss": tf.zeros(())}

        cls = {"call": Doubled, "train_step": Nothing}.get(
            what, tf_gpipe.PipelinedSequential
        )
        model = cls(
            [keras.Input((4,)), keras.layers.Dense(8)],
            num_stages=1,
            num_micro_batches=2,
            schedule="gpipe",
        )
        model.compile("sgd", "mse", run_eagerly=what == "eager")
        with self.assertRaisesRegex(ValueError, "got no times of the step"):
            model.fit(
                *make_data(),
                batch_size=8,
                verbose=0,
                callbacks=[tf_gpipe.callbacks.Timeline()],
            )

    def test_files(self):
        folder = self.get_temp_dir()
        trace = os.path.join(folder, "trace.json")
        picture = os.path.join(folder, "picture.png")
        model = make_model()
        model.fit(
            *make_data(),
            batch_size=8,
            verbose=0,
            callbacks=[
                tf_gpipe.callbacks.Timeline(trace=trace, picture=picture)
            ],
        )
        with open(trace) as f:
            events = json.load(f)["traceEvents"]
        names = [event["name"] for event in events if event["ph"] == "X"]
        self.assertIn("B1.3", names)
        self.assertGreater(os.path.getsize(picture), 1000)
        self.assertIsNone(model._record_times)

    @parameterized.parameters(3, "3", 2.5)
    def test_steps_that_are_no_collection(self, steps):
        with self.assertRaisesRegex(TypeError, "`steps` must be a collection"):
            tf_gpipe.callbacks.Timeline(steps)

    @parameterized.parameters([[-1]], [[1.5]], [["a"]])
    def test_steps_that_are_no_numbers(self, steps):
        with self.assertRaisesRegex(ValueError, "`steps` must be a collection"):
            tf_gpipe.callbacks.Timeline(steps)

    @parameterized.product(
        name=("trace", "picture"), path=("missing/a.png", "", ".")
    )
    def test_paths_that_cannot_be_written(self, name, path):
        path = os.path.join(self.get_temp_dir(), path)
        with self.assertRaisesRegex(ValueError, f"`{name}` must be the path"):
            tf_gpipe.callbacks.Timeline(**{name: path})
        for nothing in (3, 2.5, b"a.png", ["a.png"]):
            with self.assertRaisesRegex(TypeError, f"`{name}` must be the pat"):
                tf_gpipe.callbacks.Timeline(**{name: nothing})

    def test_pictures_that_cannot_be_drawn(self):
        with self.assertRaisesRegex(ValueError, "png, .*Received: .*a.nope"):
            tf_gpipe.callbacks.Timeline(
                picture=os.path.join(self.get_temp_dir(), "a.nope")
            )
        with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
            with self.assertRaisesRegex(ImportError, "needs matplotlib"):
                tf_gpipe.callbacks.Timeline(
                    picture=os.path.join(self.get_temp_dir(), "a.png")
                )

    def test_evaluate_does_not_record(self):
        model = make_model()
        model.evaluate(
            *make_data(), verbose=0, callbacks=[tf_gpipe.callbacks.Timeline()]
        )
        self.assertIsNone(model._record_times)

    def test_a_run_that_fails_ends_recording(self):
        def interrupt(batch, logs):
            raise KeyboardInterrupt

        model = make_model()
        recorder = tf_gpipe.callbacks.Timeline()
        with self.assertRaises(KeyboardInterrupt):
            model.fit(
                *make_data(),
                batch_size=8,
                verbose=0,
                callbacks=[
                    recorder,
                    keras.callbacks.LambdaCallback(
                        on_train_batch_end=interrupt
                    ),
                ],
            )
        before = recorder._times.numpy()
        self.assertNotEmpty(before)
        model.fit(*make_data(), batch_size=8, verbose=0)
        self.assertAllEqual(recorder._times, before)

    def test_plain_model(self):
        model = keras.Sequential([keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "models of tf_gpipe"):
            model.fit(*make_data(), callbacks=[tf_gpipe.callbacks.Timeline()])


if __name__ == "__main__":
    tf.test.main()
