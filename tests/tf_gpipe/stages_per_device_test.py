"""Schedules with several stages a device, compared with plain Keras."""

import io
import json
from contextlib import redirect_stdout

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison
from tf_gpipe.commands import plan as plan_command
from tf_gpipe.commands import timeline as timeline_command

DEVICES = ["CPU:0", "CPU:1"]
SEVERAL = (
    "auto",
    "interleaved",
    "interleaved_zero_bubble",
    "v_half",
    "v_min",
    "zb_v",
)


def data(rows):
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((2, rows, 6), dtype="float32")
    return [(x, y)]


def dense():
    return [
        keras.Input((6,)),
        L.Dense(9, "tanh", kernel_regularizer="l2"),
        L.Dense(8, activity_regularizer="l2"),
        L.LayerNormalization(),
        L.Dense(12, "relu"),
        L.Dense(6),
    ]


def skips():
    """A model with skip connections between stages on different devices."""
    x = inputs = keras.Input((6,))
    x = first = L.Dense(6, "tanh")(x)
    x = second = L.Dense(6, "tanh")(x)
    x = L.Add()([L.Dense(6, "tanh")(x), first, inputs])
    x = L.Dense(6)(L.Add()([x, second]))
    return keras.Model(inputs, L.Dense(6)(L.Concatenate()([x, first])))


class StagesPerDeviceTest(tf.test.TestCase, parameterized.TestCase):
    def compare(self, make, rows, **kwargs):
        plain = comparison.train_plain(make, data(rows), loss="mse")
        pipelined = comparison.train(
            make,
            data(rows),
            loss="mse",
            num_stages=4,
            devices=DEVICES,
            **kwargs,
        )
        comparison.assert_same(self, plain, pipelined)
        return pipelined[0]

    @pairwise.each(
        schedule=SEVERAL,
        num_micro_batches=(1, 2, 3, 5),
        remat=("always", "except_last", "never"),
        rows=(8, 7),
    )
    @pytest.mark.slow_after(1)
    def test_numbers(self, rows, **kwargs):
        self.compare(dense, rows, **kwargs)

    @pairwise.each(
        schedule=SEVERAL,
        num_micro_batches=(1, 3, 4),
        remat=("always", "except_last", "never"),
        rows=(8, 5),
    )
    @pytest.mark.slow
    def test_skip_connections(self, rows, **kwargs):
        self.compare(skips, rows, **kwargs)

    def test_places(self):
        model = self.compare(dense, 8, schedule="zb_v", num_micro_batches=3)
        places = [int(stage.device[-1]) for stage in model.stages]
        self.assertEqual(places, [0, 1, 1, 0])
        self.assertEqual(model.devices, [x.device for x in model.stages[:2]])

    @parameterized.parameters(
        ("zb_v", 2, 4, 8), ("auto", 2, 4, 8), ("1f1b", 2, 2, 8)
    )
    def test_default_numbers(self, schedule, num_devices, num_stages, m):
        model = tf_gpipe.PipelinedSequential(
            dense(), schedule=schedule, devices=DEVICES[:num_devices]
        )
        self.assertEqual(model.num_stages, num_stages)
        self.assertEqual(model.num_micro_batches, m)

    def test_more_devices_than_layers_need(self):
        model = tf_gpipe.PipelinedSequential(
            dense(), schedule="zb_v", devices=["CPU:0"] * 3
        )
        self.assertEqual(model.num_stages, 4)

    @parameterized.parameters(
        ({"schedule": "zb_v", "num_stages": 3}, "must be even.*num_stages=3"),
        (
            {"schedule": "v_half", "num_stages": 4, "devices": DEVICES * 2},
            "two stages on each.*num_stages=4 need 2.*Received 4.*stages=8",
        ),
        (
            {"schedule": "v_min", "num_stages": 4, "devices": DEVICES[:1]},
            "num_stages=4 need 2 devices. Received 1",
        ),
        (
            {"schedule": "auto", "num_stages": 3, "devices": DEVICES},
            "'auto' needs `num_stages` to be a multiple.*3, 2 devices",
        ),
        ({"schedule": "zbv"}, "one of .*'auto'.*'zb_v'.*schedule='zbv'"),
    )
    def test_refuses(self, kwargs, message):
        with self.assertRaisesRegex(ValueError, message):
            tf_gpipe.PipelinedSequential(dense(), **kwargs)

    @pytest.mark.slow
    def test_saved(self):
        for schedule in ("auto", "v_half"):
            model = self.compare(
                dense, 8, schedule=schedule, num_micro_batches=2
            )
            path = f"{self.get_temp_dir()}/{schedule}.keras"
            model.save(path)
            loaded = keras.models.load_model(path)
            self.assertEqual(loaded.schedule, schedule)
            self.assertEqual(
                loaded._pipeline.schedule.tasks, model._pipeline.schedule.tasks
            )
            ((x, _),) = data(8)
            self.assertAllClose(loaded(x), model(x))

    @pytest.mark.slow
    def test_verify(self):
        model = self.compare(dense, 8, schedule="auto", num_micro_batches=2)
        (batch,) = data(8)
        report = tf_gpipe.verify(model, *batch)
        self.assertTrue(report.ok, str(report))


class AutoTest(tf.test.TestCase):
    def test_summary(self):
        model = tf_gpipe.PipelinedSequential(
            dense(),
            num_stages=4,
            num_micro_batches=4,
            schedule="auto",
            devices=DEVICES,
        )
        lines = []
        model.summary(120, print_fn=lambda text, **_: lines.append(text))
        text = " ".join("\n".join(lines).split())
        self.assertIn("Schedule auto of 4 micro-batches", text)
        self.assertIn("Order of tasks: ", text)
        self.assertEqual(model.schedule, "auto")
        # The summary is for micro-batches of 32 rows.
        plan = tf_gpipe.plan(
            dense(),
            (4 * 32, 6),
            num_stages=4,
            schedule=model._pipeline.schedule,
            balance=[len(x.nodes) for x in model.stages],
        )
        self.assertIn(f"bubble {plan.bubble:.1%} of the time", text)

    def test_the_order_of_a_plan(self):
        """The memory of micro-batches of 32 rows, not of one, is the limit."""

        kwargs = {
            "num_stages": 4,
            "num_micro_batches": 8,
            "balance": [2, 2, 2, 2],
            "schedule": "auto",
        }
        layers = [L.Dense(1024 if i == 5 else 64, "tanh") for i in range(8)]
        plan = tf_gpipe.plan(layers, (256, 16), num_devices=2, **kwargs)
        inputs = keras.Input((16,), batch_size=256)
        model = tf_gpipe.PipelinedSequential(
            [inputs, *layers], devices=DEVICES, **kwargs
        )
        self.assertEqual(model._pipeline.schedule.tasks, plan.tasks.tasks)

    def test_costs_that_cannot_be_found(self):
        class Odd(L.Layer):
            def call(self, x):
                # The number of iterations is not known.
                n = tf.cast(tf.reduce_sum(x), "int32")
                return tf.while_loop(
                    lambda i, _: i < n, lambda i, x: (i + 1, x), (0, x)
                )[1]

            def compute_output_shape(self, shape):
                return shape

        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), L.Dense(4), Odd(name="odd"), L.Dense(2)],
            num_stages=2,
            num_micro_batches=2,
            schedule="auto",
            devices=DEVICES[:1],
        )
        self.assertRegex(
            model._pipeline.schedule.description,
            "stages are taken for equal.*layer 'odd'",
        )

    @pytest.mark.slow
    def test_follows_the_costs(self):
        """The search takes slow connections into account."""
        layers = [L.Dense(32 * (1 + i % 3)) for i in range(8)]

        def planned(**kwargs):
            return tf_gpipe.plan(
                layers,
                (64, 32),
                num_stages=8,
                num_micro_batches=8,
                device_flops=1e9,
                **kwargs,
            )

        for speed in ({}, {"bandwidth": 1e8}):
            found = planned(schedule="auto", num_devices=4, **speed)
            self.assertIn("order of tasks: ", str(found))
            for name in ("zb_v", "v_half"):
                self.assertLessEqual(
                    found.step_seconds,
                    planned(schedule=name, **speed).step_seconds,
                )

    def test_plan_counts_a_device_once(self):
        layers = [L.Dense(64) for _ in range(8)]
        found = tf_gpipe.plan(
            layers,
            (64, 64),
            num_stages=8,
            num_micro_batches=16,
            schedule="v_half",
            remat="never",
        )
        self.assertEqual(found.devices, [0, 1, 2, 3, 3, 2, 1, 0])
        sums = [0] * 4
        for device, stage in zip(found.devices, found.stages, strict=True):
            sums[device] += stage.activation_bytes
        for together, apart in zip(
            found.device_activation_bytes, sums, strict=True
        ):
            self.assertLessEqual(together, apart)

    def test_commands(self):
        for command, *args in (
            (
                plan_command,
                "--batch_size=8",
                "--model_args=num_filters=8,num_blocks=1,input_shape=(8,8,3)",
            ),
            (timeline_command, "--forward=1,2,1,1"),
        ):
            out = io.StringIO()
            with redirect_stdout(out):
                command.main(
                    [
                        "--schedule=auto",
                        "--num_stages=4",
                        "--num_devices=2",
                        "--num_micro_batches=4",
                        "--json",
                        *args,
                    ]
                )
            text = out.getvalue()
            self.assertRegex(text, "searched for these stages|that of '")
            self.assertLess(json.loads(text.splitlines()[-1])["bubble"], 0.5)


if __name__ == "__main__":
    tf.test.main()
