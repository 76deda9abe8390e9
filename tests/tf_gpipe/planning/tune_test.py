"""The pipeline that `tune` chooses, compared with all simulated candidates."""

import dataclasses
import functools
import gc
import json
import os
import random
import tempfile
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.devices import KIND
from tf_gpipe.models import planned
from tf_gpipe.planning import candidates
from tf_gpipe.planning import choice
from tf_gpipe.planning import cuts
from tf_gpipe.planning import drafts
from tf_gpipe.planning.choice import Chooser
from tf_gpipe.planning.drafts import FITTING
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.layer_times import LayerTimes
from tf_gpipe.planning.layer_times import Line
from tf_gpipe.planning.speeds import Device
from tf_gpipe.planning.speeds import Machine
from tf_gpipe.planning.speeds import Speed
from tf_gpipe.schedule import schedules
from tf_gpipe.tuning import measured_speeds
from tf_gpipe.tuning import trials
from tf_gpipe.tuning.tried_choices import TriedChoices

SLOW = 1e9


def make_layers(count=8, units=64):
    return [keras.layers.Dense(units, "relu") for _ in range(count)]


def tuned(layers=None, spec=(32, 64), devices=4, **kwargs):
    options = dict(budget_seconds=0, device_flops=SLOW, bandwidth=1e9)
    return tf_gpipe.tune(
        make_layers() if layers is None else layers,
        spec,
        devices,
        **{**options, **kwargs},
    )


def machine(speeds, memory=None, **kwargs):
    return Machine(
        [Device(memory=memory, speed=Speed.of_flops(x)) for x in speeds],
        bandwidth=1e9,
        **kwargs,
    )


class Endless(keras.layers.Layer):
    """Never ends where nothing is known of its input but the shape."""

    def call(self, x):
        while tf.reduce_sum(x) > 0:
            x = x - 1
        return x

    def compute_output_shape(self, input_shape):
        return input_shape


class ChoiceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ([SLOW] * 3, None),
        ([SLOW] * 3, 240_000),
        ([SLOW, SLOW / 3, SLOW / 2], None),
    )
    @pytest.mark.slow_after(1)
    def test_it_is_the_best_of_all(self, speeds, memory):
        layers = KnownLayers(make_layers(5), (12, 64), "adam")
        layers.sampled = [1, 12]
        where = machine(speeds, memory)
        chooser = Chooser(layers, LayerTimes(layers), where)
        every = list(candidates.candidates(len(speeds), 5, 12))
        # One by one, so that nothing is left out as hopeless.
        found = [
            choice
            for x in every
            for choice in chooser.ranked(
                candidates.Fixed(schedule=x.schedule, remat=x.remat), 1, [x]
            )
        ]
        self.assertNotEmpty(found)
        self.assertLess(len(found), len(every) + (memory is None))
        best = chooser.ranked(candidates.Fixed(remat=None), 1, every)[0]
        least = min(x.seconds for x in found)
        self.assertLessEqual(best.seconds, least * (1 + 1e-9))
        if "auto" not in (best.candidate.schedule, best.candidate.remat):
            self.assertAllClose(best.seconds, least)
        for x in found if memory else ():
            self.assertLessEqual(max(x.plan.device_bytes), FITTING * memory)

    @pytest.mark.slow
    def test_memory_excludes_the_fastest(self):
        free = tuned()
        most = max(free.device_bytes)
        bound = tuned(device_memory=most)  # of which 10 % are to spare
        self.assertLessEqual(max(bound.device_bytes), 0.9 * most)
        self.assertGreaterEqual(bound.step_seconds, free.step_seconds)
        self.assertNotEqual(
            (bound.arguments, bound.num_replicas),
            (free.arguments, free.num_replicas),
        )
        self.assertTrue(bound.fits)

    @pytest.mark.slow
    def test_nothing_fits(self):
        with self.assertRaisesRegex(ValueError, "10 % to spare"):
            tuned(device_memory=1000)

    def test_one_device_is_enough(self):
        # Starting a task takes longer than all arithmetic.
        found = tuned(spec=(np.int64(2), 64), device_flops=1e13)
        self.assertLen(found.stages, 1)
        self.assertEqual(found.num_replicas, 1)
        self.assertIn("One device is enough", str(found))
        self.assertIn("next best", str(found))

    @parameterized.parameters(
        # Nothing is said of pipelines that were not compared.
        ({"num_stages": 1, "replicas": False}, "Plain Keras does the same."),
        ({"num_stages": 1, "devices": 1}, ""),
        (
            {"num_stages": 1, "replicas": False, "num_micro_batches": 4},
            "",
        ),
        (
            # With a single micro-batch nothing is recomputed.
            {"num_stages": 1, "replicas": False, "remat": "always"},
            "Plain Keras does the same.",
        ),
        (
            {"replicas": False, "device_flops": 1e13, "num_micro_batches": 2},
            "One device is enough: a pipeline over more would not be faster.",
        ),
        (
            {"replicas": False, "device_flops": 1e13},
            "One device is enough: a pipeline over more would not be faster. "
            "Plain Keras does the same.",
        ),
    )
    def test_reason_for_one_device(self, options, reason):
        found = tuned(**{"spec": (8, 64), "devices": 2, **options})
        self.assertLen(found.stages, 1)
        self.assertEqual(found.reason, reason)

    @parameterized.parameters(
        ({"device_flops": [SLOW, SLOW / 2]},),
        ({"device_memory": ["1GB", "2GB"]},),
    )
    def test_an_order_is_searched_for_devices_that_are_alike(self, options):
        with self.assertRaisesRegex(ValueError, "devices that are alike"):
            tuned(devices=2, schedule="auto", **options)
        self.assertNotEqual(tuned(devices=2, **options).schedule, "auto")

    def test_equal_devices_that_measure_unequal(self):
        """Another program may use one while speeds are measured."""
        found = machine([SLOW, 1.5 * SLOW]).with_equal_speeds()
        self.assertTrue(found.alike)
        self.assertEqual(found.devices[0].speed.flops, SLOW)
        self.assertFalse(machine([SLOW, 3 * SLOW]).with_equal_speeds().alike)

    def test_a_searched_order_counts_updates(self):
        with mock.patch.object(drafts, "search", wraps=drafts.search) as search:
            tuned(devices=2, schedule="auto", num_stages=2)
        self.assertNotEmpty(search.call_args_list)
        for call in search.call_args_list:
            self.assertLen(call.args[0].update, 2)
            self.assertTrue(all(call.args[0].update))

    def test_a_searched_order_or_none(self):
        found = tuned(devices=2, schedule="auto", num_stages=4)
        self.assertEqual(found.schedule, "auto")
        # The only order that there is.
        self.assertEqual(tuned(devices=1, schedule="auto").num_devices, 1)
        with self.assertRaisesRegex(ValueError, "has num_stages=3, schedule="):
            tuned(devices=2, schedule="auto", num_stages=3)

    @parameterized.parameters("interleaved", "auto")
    def test_four_stages_a_device(self, schedule):
        found = tuned(devices=2, schedule=schedule, num_stages=8)
        self.assertEqual((len(found.stages), found.num_devices), (8, 2))
        self.assertEqual(found.schedule, schedule)

    def test_a_layer_without_costs(self):
        inputs = keras.Input((4,), batch_size=8)
        layers = [inputs, keras.layers.Dense(4), Endless()]
        advice = r"(?s)cannot be found.*\. Choose the arguments of the"
        with self.assertRaisesRegex(ValueError, advice):
            tuned(layers, (8, 4))
        with self.assertRaisesRegex(ValueError, advice):
            tf_gpipe.PipelinedSequential(layers, num_stages="auto")

    def test_within_a_strategy(self):
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            tuned()
            with self.assertRaisesRegex(ValueError, "Call `tune` outside"):
                tuned(devices=[f"{KIND}:0"], budget_seconds=1)

    def test_a_device_that_is_named_twice(self):
        options = {"spec": (64, 64), "num_micro_batches": 8, "num_stages": 2}
        one, two = f"{KIND}:0", f"{KIND}:1"
        free = tuned(devices=[one, two], **options)
        memory = int(max(free.device_bytes) / FITTING) + 1
        names = [one, one]
        self.assertTrue(
            tuned(devices=[one, two], device_memory=memory, **options).fits
        )
        # It has not twice as much.
        found = tuned(devices=names, device_memory=2 * memory, **options)
        self.assertLessEqual(sum(found.device_bytes), FITTING * 2 * memory)
        self.assertLen(set(found.device_names), 1)
        with self.assertRaisesRegex(ValueError, "10 % to spare"):
            tuned(devices=names, device_memory=memory, **options)
        # Once, it has all of its memory.
        alone = tuned(
            devices=names,
            device_memory=2 * memory,
            **options | {"num_stages": 1},
        )
        self.assertEqual(
            (alone.num_replicas, alone.memories), (1, [2 * memory])
        )
        with self.assertRaisesRegex(ValueError, "alike and named once"):
            tuned(devices=names, device_memory=memory, remat="auto")

    def test_share_of_transfers(self):
        slow, fast = (
            tuned(
                devices=2,
                num_stages=2,
                num_micro_batches=4,
                schedule="1f1b",
                remat="never",
                bandwidth=x,
            )
            for x in (1e6, 1e15)
        )
        self.assertGreater(slow.transfer_share, 0.1)
        self.assertAllClose(
            slow.step_seconds * (1 - slow.transfer_share), fast.step_seconds
        )

    @pytest.mark.slow
    def test_data_parallelism(self):
        # Much work, and few weights, whose gradients are summed quickly.
        layers = [keras.layers.Conv2D(8, 3, padding="same") for _ in range(4)]
        found = tuned(layers, (32, 16, 16, 8))
        self.assertEqual((len(found.stages), found.num_replicas), (1, 4))
        self.assertIn("Use data parallelism", str(found))

    def test_lopsided_speeds(self):
        speeds = [SLOW, 4 * SLOW, SLOW / 1000]
        found = tuned(
            make_layers(10), devices=3, device_flops=speeds, num_stages=2
        )
        # The third one is left out, and the fast one has most of the layers.
        self.assertEqual(found.num_devices, 2)
        self.assertIn("1 of 3 devices are left out", str(found))
        few, many = sorted(found.arguments["balance"])
        self.assertGreaterEqual(many, 3 * few)

    def test_lopsided_memory(self):
        layers = make_layers(10)
        whole = tf_gpipe.plan(
            layers, (32, 64), num_stages=1, num_micro_batches=8
        ).device_bytes[0]
        memory = [whole // 3, whole]
        found = tuned(
            layers, devices=2, device_memory=memory, num_stages=2, remat="never"
        )
        self.assertEqual(sorted(found.memories), memory)
        for size, room in zip(found.device_bytes, found.memories, strict=True):
            self.assertLessEqual(size, 0.9 * room)

    def test_what_is_fixed_is_kept(self):
        found = tuned(
            num_stages=4, num_micro_batches=4, schedule="gpipe", remat="always"
        )
        self.assertEqual(
            {
                **found.arguments,
                "balance": sum(found.arguments["balance"]),
            },
            {
                "num_stages": 4,
                "num_micro_batches": 4,
                "balance": 8,
                "schedule": "gpipe",
                "remat": "always",
                "devices": None,
            },
        )

    def test_some_layers_are_recomputed(self):
        layers = [keras.layers.Conv2D(8, 3, padding="same") for _ in range(8)]
        options = dict(
            spec=(16, 16, 16, 8),
            devices=2,
            num_stages=2,
            num_micro_batches=4,
            schedule="1f1b",
            replicas=False,
        )
        whole, least = (
            tuned(layers, **options, remat=remat)
            for remat in ("never", "always")
        )
        memory = int(0.9 * max(whole.device_bytes) / FITTING)
        found = tuned(layers, **options, device_memory=memory)
        self.assertEqual(found.remat, "auto")
        self.assertLess(found.step_seconds, least.step_seconds)
        self.assertGreater(found.step_seconds, whole.step_seconds)
        self.assertLessEqual(max(found.device_bytes), FITTING * memory)
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((16, 16, 8)), *layers],
            plan=found,
            devices=[f"{KIND}:0", f"{KIND}:1"],
        )
        model.compile("adam", "mse")
        x = tf.ones((16, 16, 16, 8))
        model.train_on_batch(x, x)
        self.assertEqual(
            [x.layers for x in found.stages],
            [[y.name for y in x.layers] for x in model.stages],
        )
        self.assertEqual((model.remat, model.batch_size), ("auto", 16))

    def test_recomputation_needs_a_memory(self):
        for memory in (None, ["1GB", "2GB"]):
            with self.assertRaisesRegex(ValueError, "needs the `device_memory"):
                tuned(devices=2, remat="auto", device_memory=memory)

    def test_more_rows_than_micro_batches(self):
        found = tuned(make_layers(2, 4), (8192, 4), 1)
        self.assertLessEqual(found.num_micro_batches, 4096)

    @pytest.mark.slow
    def test_same_arguments_same_plan(self):
        self.assertEqual(str(tuned()), str(tuned()))

    def test_cut_within_memory(self):
        # With two layers, the first stage would hold 2 * 2 + 1 bytes.
        rooms = [cuts.Room(4, 1, 1), cuts.Room(100, 1, 1)]
        found = cuts.within([[1] * 4] * 2, [2] * 4, [0] * 4, [1] * 4, rooms)
        self.assertEqual(found, [1, 3])
        tight = [cuts.Room(2, 1, 1)] * 2
        self.assertIsNone(
            cuts.within([[1] * 4] * 2, [2] * 4, [0] * 4, [1] * 4, tight)
        )


class TrialTest(tf.test.TestCase, parameterized.TestCase):
    ONE_PIPELINE = {
        "devices": [f"{KIND}:0", f"{KIND}:1"],
        "num_stages": 2,
        "num_micro_batches": 2,
        "schedule": "1f1b",
        "remat": "never",
    }

    def test_it_leaves_no_trace(self):
        layers = [keras.Input((8,)), *make_layers(3, 8)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.Adam()
        before = model.get_weights()

        def draws():
            return float(keras.random.uniform(()))

        keras.utils.set_random_seed(1)
        expected = draws(), draws()
        keras.utils.set_random_seed(1)
        first = draws()
        found = tf_gpipe.tune(
            model,
            (8, 8),
            optimizer=optimizer,
            budget_seconds=120,
            **self.ONE_PIPELINE,
        )
        self.assertEqual((first, draws()), expected)
        self.assertAllEqual(before[0], model.get_weights()[0])
        self.assertFalse(optimizer.built)
        self.assertIsNotNone(found.measured_seconds)
        self.assertIn("tried", str(found))
        # Nor are copies kept in memory.
        copies = [
            x
            for x in gc.get_objects()
            if type(x) is tf_gpipe.PipelinedSequential and x.name == "tried"
        ]
        self.assertEmpty(copies)

    @parameterized.parameters("tune", "plan", "auto")
    def test_it_makes_no_seeds(self, how):
        """What a program draws first afterwards, it draws as without."""
        found = []
        for plans in (False, True):
            keras.utils.clear_session()
            keras.utils.set_random_seed(1)
            layers = make_layers(2, 8)
            layers.append(keras.layers.Lambda(noisy))
            drawn = random.getstate()
            if plans and how == "tune":
                tf_gpipe.tune(
                    layers, (8, 8), budget_seconds=60, **self.ONE_PIPELINE
                )
            elif plans and how == "plan":
                tf_gpipe.plan(layers, (8, 8), num_stages=2)
            elif plans:
                planned._chosen(layers, keras.Input((8,), 8), None, 1)
            self.assertEqual(random.getstate(), drawn)
            model = keras.Sequential([keras.Input((8,)), *layers])
            found.append(
                [*model.get_weights(), keras.random.uniform((3,)).numpy()]
            )
        for a, b in zip(*found, strict=True):
            self.assertAllEqual(a, b)

    @parameterized.parameters(True, False)
    def test_one_that_fails_leaves_no_copy(self, out_of_memory):
        layers = make_layers(2, 8)
        known = KnownLayers(layers, (8, 8), "sgd")
        plan = tf_gpipe.plan(layers, (8, 8), num_stages=2)
        copies = []

        def before(copy):
            raise KeyError

        def fitted(copy, known, optimizer):
            copies.append(weakref.ref(copy))
            try:
                before(copy)
            except KeyError:
                if out_of_memory:
                    raise tf.errors.ResourceExhaustedError(
                        None, None, ""
                    ) from None
                raise ValueError from None

        raised = None
        with mock.patch.object(trials, "_fitted", fitted):
            try:
                trials.step_seconds(layers, known, "sgd", plan)
            except ValueError as error:
                raised = error  # It is kept, as `tune` may.
        self.assertEqual(raised is None, out_of_memory)
        self.assertEqual([x() for x in copies], [None])

    def test_slots_of_a_trained_model_stay(self):
        optimizer = keras.optimizers.Adam()
        model = keras.Sequential([keras.Input((8,)), *make_layers(2, 8)])
        model.compile(optimizer, "mse")
        model.train_on_batch(tf.ones((8, 8)), tf.ones((8, 8)))
        variables = [*optimizer.variables, *model.variables]
        before = [x.numpy() for x in variables]
        tf_gpipe.tune(
            model,
            (8, 8),
            optimizer=optimizer,
            budget_seconds=60,
            **self.ONE_PIPELINE,
        )
        self.assertIs(model.optimizer, optimizer)
        after = [*optimizer.variables, *model.variables]
        self.assertEqual([id(x) for x in after], [id(x) for x in variables])
        for x, y in zip(after, before, strict=True):
            self.assertAllEqual(x, y)


def noisy(x):
    return x + keras.random.normal(keras.ops.shape(x))


def adapted(layer):
    """Returns layers that begin with one that has learnt a vocabulary."""
    layer.adapt(np.array([["a b c"], ["b c"], ["c"]]))
    return [
        keras.Input((1,), dtype="string"),
        layer,
        keras.layers.Embedding(9, 8),
        keras.layers.Flatten(),
        *make_layers(2, 8),
    ]


def embedded(*layers):
    return [
        keras.Input((3,), dtype="int32"),
        *layers,
        keras.layers.Flatten(),
        keras.layers.Dense(8),
    ]


def two_outputs():
    inputs = keras.Input((8,))
    return keras.Model(inputs, [keras.layers.Dense(n)(inputs) for n in (1, 2)])


def two_inputs():
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    return keras.Model(
        [a, b], keras.layers.Dense(2)(keras.layers.Dense(2)(a) + b[:, :2])
    )


def compiled():
    inputs = keras.Input((8,))
    first, second = make_layers(2, 8)
    model = keras.Model(inputs, second(first(inputs)))
    model.compile("adam", lambda y, x: tf.reduce_mean(tf.square(x - y)))
    return model


def around_compiled():
    inputs = keras.Input((3, 8))
    inner = keras.layers.TimeDistributed(compiled())
    return keras.Model(inputs, keras.layers.Dense(2)(inner(inputs)))


class NoCopy(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


class NoConfig(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


class TriedModelsTest(tf.test.TestCase, parameterized.TestCase):
    """Models and optimizers that plain Keras trains are tried."""

    def tried(self, model, spec, optimizer="adam", measured=None, **kwargs):
        options = {**TrialTest.ONE_PIPELINE, **kwargs}
        where = measured or machine([SLOW] * 2, replicates=False)
        where = dataclasses.replace(
            where,
            devices=[
                dataclasses.replace(x, name=name)
                for x, name in zip(
                    where.devices, options["devices"], strict=True
                )
            ],
        )
        with mock.patch.object(measured_speeds, "measured", return_value=where):
            return tf_gpipe.tune(
                model, spec, optimizer=optimizer, budget_seconds=120, **options
            )

    @parameterized.named_parameters(
        ("compiled", compiled, (8, 8)),
        ("around compiled", around_compiled, (8, 3, 8)),
        ("two outputs", two_outputs, (8, 8)),
        ("two inputs", two_inputs, [(8, 8), (8, 8)]),
        ("inputs by name", two_inputs, {"b": (8, 8), "a": (8, 8)}),
        (
            "embedding of one row",
            lambda: embedded(keras.layers.Embedding(1, 8)),
            (8, 3),
        ),
        (
            "embedding that masks",
            lambda: embedded(
                keras.layers.Embedding(2, 8, mask_zero=True),
                keras.layers.LSTM(8, return_sequences=True),
            ),
            (8, 3),
        ),
        (
            "lookup",
            lambda: adapted(keras.layers.StringLookup()),
            keras.KerasTensor((8, 1), "string"),
        ),
        (
            "words",
            lambda: keras.Sequential(
                adapted(
                    keras.layers.TextVectorization(output_sequence_length=3)
                )
            ),
            keras.KerasTensor((8, 1), "string"),
        ),
        (
            "list into layers",
            lambda: [keras.layers.Add(), *make_layers(2, 8)],
            [(8, 8), (8, 8)],
        ),
        (
            "lambda",
            lambda: [
                *make_layers(2, 8),
                keras.layers.Lambda(lambda x: x * SLOW),
            ],
            (8, 8),
        ),
        (
            "strings, and rows without features",
            lambda: [
                keras.Input((3,), dtype="string"),
                keras.layers.StringLookup(vocabulary=["a", "b"]),
                keras.layers.Embedding(3, 1),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
                keras.layers.Reshape(()),
            ],
            (8, 3),
        ),
    )
    @pytest.mark.slow_after(5)
    def test_model(self, make, spec):
        model = make()
        found = self.tried(model, spec)
        self.assertIsNotNone(found.measured_seconds)
        self.assertNotIn("tried.", found.reason)

    def test_optimizer(self):
        optimizer = keras.optimizers.Adam(NoConfig())
        found = self.tried(make_layers(2, 8), (8, 8), optimizer)
        self.assertIsNotNone(found.measured_seconds)
        self.assertFalse(optimizer.built)

    @parameterized.parameters(
        # Each is slow alone: the one that is given, or the measured one.
        ({"latency": 1e-9}, 1e3, 0.0, True),
        ({"bandwidth": 1e12}, 1e12, 10.0, True),
        ({"bandwidth": 1e12}, 1e3, 0.0, False),
        ({"latency": 0.0}, 1e12, 10.0, False),
        ({"bandwidth": np.float32(1e12), "latency": 0}, 1e3, 10.0, False),
    )
    def test_given_speeds(self, given, bandwidth, latency, slow):
        where = dataclasses.replace(
            machine([SLOW] * 2, replicates=False),
            bandwidth=bandwidth,
            latency=latency,
        )
        with mock.patch.object(trials, "step_seconds", return_value=1.0):
            found = self.tried(make_layers(2), (8, 64), measured=where, **given)
        if slow:
            self.assertGreater(found.transfer_share, 0.8)
        else:
            self.assertLess(found.transfer_share, 0.2)

    def test_out_of_memory(self):
        layers = [keras.layers.Conv2D(8, 3, padding="same") for _ in range(8)]
        spec = (16, 16, 16, 8)
        options = {"num_micro_batches": 8, "schedule": "gpipe", "remat": None}
        memory = []

        def seconds(layers, known, optimizer, plan):
            memory.append(max(plan.device_bytes))
            # The first one is too large, and its like.
            return 1.0 if memory[-1] < 0.6 * memory[0] else None

        with mock.patch.object(trials, "step_seconds", seconds):
            found = self.tried(layers, spec, **options)
        self.assertLess(max(found.device_bytes), 0.6 * memory[0])
        self.assertNotEqual(found.remat, "never")
        self.assertEqual(found.measured_seconds, 1.0)
        with (
            mock.patch.object(trials, "step_seconds", return_value=None),
            self.assertRaisesRegex(ValueError, "None of the pipelines"),
        ):
            self.tried(layers, spec, **options)

    @parameterized.parameters(([10**9, 10**9],), ([2 * 10**9, 10**9],))
    def test_memory_after_out_of_memory(self, memories):
        """A plan has the user's memories, in whatever order its devices are."""
        where = machine([SLOW] * 2, replicates=False)
        where = dataclasses.replace(
            where,
            devices=[
                dataclasses.replace(x, memory=memory)
                for x, memory in zip(where.devices, memories, strict=True)
            ],
        )
        names = TrialTest.ONE_PIPELINE["devices"]
        seconds = mock.Mock(side_effect=[None, *[1.0] * 20])
        with mock.patch.object(trials, "step_seconds", seconds):
            found = self.tried(
                [keras.layers.Conv2D(8, 3, padding="same") for _ in range(8)],
                (16, 16, 16, 8),
                measured=where,
                device_memory=memories,
                num_micro_batches=None,
                remat=None,
            )
        self.assertGreater(seconds.call_count, 1)
        self.assertEqual(
            dict(zip(found.device_names, found.memories, strict=True)),
            dict(zip(names, memories, strict=True)),
        )
        self.assertTrue(found.fits)

    def test_no_copy(self):
        layer = NoCopy(tf.nn.relu)
        layer(tf.ones((8, 8)))
        found = self.tried([layer, *make_layers(2, 8)], (8, 8))
        self.assertIsNone(found.measured_seconds)
        self.assertRegex(
            found.reason,
            r"Nothing was tried. Layer 'no_copy.*' .*cannot be copied\.$",
        )
        with self.assertRaisesRegex(
            ValueError, "Or give layers that are built"
        ):
            self.tried([NoCopy(tf.nn.relu), *make_layers(2, 8)], (8, 8))

    def test_refused_choices_are_dropped(self):
        def layers():
            norm = keras.layers.BatchNormalization(renorm=True)
            return [*make_layers(1), norm, *make_layers(1)]

        # The fastest have several micro-batches, whose statistics are refused.
        found = self.tried(layers(), (512, 64), num_micro_batches=None)
        self.assertIsNotNone(found.measured_seconds)
        self.assertEqual(found.num_micro_batches, 1)
        with self.assertRaisesRegex(ValueError, "with renorm=True"):
            self.tried(layers(), (512, 64))


class TriedChoicesTest(tf.test.TestCase, parameterized.TestCase):
    """In which order choices are tried, and how trials correct the others."""

    def setUp(self):
        super().setUp()
        layers = KnownLayers(make_layers(), (32, 64), "sgd")
        where = machine([SLOW] * 2)
        self.chooser = Chooser(layers, LayerTimes(layers), where)
        fixed = candidates.Fixed(remat="never")
        self.all = choice.allowed(layers, where, fixed)

    def choices(self, wanted, count=3):
        return self.chooser.ranked(
            candidates.Fixed(remat="never", schedule="1f1b"),
            count,
            [x for x in self.all if wanted(x)],
        )

    def test_the_other_kind_is_tried_and_corrects_its_kind(self):
        several = self.choices(lambda x: x.num_devices == 2)
        alone = self.choices(lambda x: x.alone)
        self.assertLess(several[0].seconds, alone[0].seconds)
        tried = TriedChoices([*several, *alone])
        first = tried.next()
        self.assertIs(first, several[0])
        # Two devices turn out to share a core.
        tried.add(first, 3 * first.seconds)
        other = tried.next()
        self.assertIs(other, alone[0])
        tried.add(other, other.seconds)
        self.assertIs(tried.next(), alone[1])
        tried.add(alone[1], 1.5 * other.seconds)
        best, *rest = tried.ranked()
        self.assertIs(best, other)
        self.assertEqual(tried.measured(first), 3 * first.seconds)
        self.assertIsNone(tried.measured(several[1]))
        corrected = {str(x.candidate): x.seconds for x in rest}
        self.assertAllClose(
            corrected[str(several[1].candidate)], 3 * several[1].seconds
        )
        # By the trial with the number of micro-batches that is nearest.
        self.assertEqual(
            [x.candidate.num_micro_batches for x in alone], [1, 2, 4]
        )
        factor = 1.5 * other.seconds / alone[1].seconds
        self.assertAllClose(
            corrected[str(alone[2].candidate)], factor * alone[2].seconds
        )

    def test_orders_are_searched_for_the_fastest(self):
        known = []

        def searched(choice, fixed):
            known.append(choice)
            return []

        layers = KnownLayers(make_layers(), (32, 64), "sgd")
        chooser = Chooser(layers, LayerTimes(layers), machine([SLOW] * 4))
        fixed = candidates.Fixed(remat="never")
        with mock.patch.object(chooser, "_searched", searched):
            ranked = chooser.ranked(fixed, 99)
        kinds = {}
        for x in ranked:
            of = x.candidate
            if of.num_devices > 1:
                key = of.num_devices, of.num_replicas, of.num_micro_batches
                kinds.setdefault(key, of)
        self.assertEqual([x.candidate for x in known], list(kinds.values())[:3])

    def test_trials_end_when_none_may_be_faster(self):
        found = self.choices(lambda x: x.num_devices == 2, 20)
        numbers = {x.candidate.num_micro_batches for x in found}
        self.assertGreater(len(numbers), 2)
        tried, count = TriedChoices(found), 0
        while (choice := tried.next()) is not None:
            # One is twice as fast as was simulated, the others are not.
            factor = 1 if choice is not found[2] else 0.5
            tried.add(choice, factor * choice.seconds)
            count += 1
        best, *_ = tried.ranked()
        self.assertIs(best, found[2])
        self.assertBetween(count, 3, len(found) - 1)

    def test_the_first_trials_tell_how_devices_slow_each_other_down(self):
        (several, *_), (one, *_) = (
            self.choices(lambda x: x.num_devices == 2),
            self.choices(lambda x: x.alone),
        )
        # As if the devices had been taken to share what they do not.
        where = machine([SLOW] * 2, sharing=4.0)
        for factor, slowdown in ((1.0, 4.0), (0.5, 2.0), (0.1, 1.0)):
            tried = TriedChoices([several, one])
            self.assertIsNone(tried.corrected_machine(where))
            # All layers are also twice as slow as was estimated.
            tried.add(several, 2 * factor * several.seconds)
            self.assertIsNone(tried.corrected_machine(where))
            tried.add(one, 2 * one.seconds)
            found = tried.corrected_machine(where)
            if slowdown == 4.0:
                self.assertIsNone(found)
            else:
                self.assertAllClose(found.slowdown(2), slowdown)

    def test_a_device_that_was_held_up_is_measured_again(self):
        found = iter((4.0, 1.0, 4.0, 1.5, 3.9, 1.4))
        with mock.patch.object(
            measured_speeds,
            "_speed",
            lambda name: (Speed.of_flops(next(found)), name),
        ):
            speeds = measured_speeds._speeds(["a", "b", "c", "d"])
        self.assertEqual([x.flops for x, _ in speeds], [4.0, 3.9, 4.0, 1.5])
        self.assertEqual([name for _, name in speeds], ["a", "b", "c", "d"])

    def test_choices_that_are_estimated_anew(self):
        several = self.choices(lambda x: x.num_devices == 2)
        tried = TriedChoices(several)
        tried.add(tried.next(), 3 * several[0].seconds)
        halves = [
            dataclasses.replace(
                x,
                plan=dataclasses.replace(x.plan, step_seconds=x.seconds / 2),
            )
            for x in several
        ]
        tried.estimate_anew(halves)
        best, *rest = tried.ranked()
        self.assertIs(best, several[0])
        self.assertEqual(
            [x.candidate for x in rest], [x.candidate for x in several[1:]]
        )
        # Three times as long as the old estimate is six times the new one.
        for x, half in zip(rest, halves[1:], strict=True):
            self.assertAllClose(x.seconds, 6 * half.seconds)

    @parameterized.parameters(
        # The small one is the fuller one.
        ([16, 80], {"0": 14, "1": 60}, [14, 70]),
        ([16, 80], {"0": 4, "1": 60}, [12, 60]),
        ([16, 80], {"1": 60}, [12, 60]),
        ([16, 16], {"0": 14, "1": 3}, [14, 14]),
        ([None, None], {"0": 14, "1": 3}, [14, 14]),
    )
    def test_machine_with_less_memory(self, memories, used, left):
        devices = [Device(str(i), x) for i, x in enumerate(memories)]
        found = Machine(devices).with_less_memory(used)
        self.assertEqual([x.memory for x in found.devices], left)

    def test_machine_with_slowdown(self):
        for count in (2, 3, 4):
            found = machine([SLOW] * 4).with_slowdown(count, 2.5)
            self.assertAllClose(found.slowdown(count), 2.5)
            self.assertEqual(found.slowdown(1), 1.0)
        self.assertEqual(found.with_slowdown(4, 0.5).sharing, 1.0)

    @parameterized.parameters((1, 1.0), (4, 3.0))
    def test_devices_slow_each_other_down_while_they_work(self, blocks, slow):
        """Where one does nearly all, the other does not hold it up."""
        layers = [keras.layers.Dense(2048) for _ in range(blocks)]
        layers += [keras.layers.Dense(1)] if blocks == 1 else []
        known = KnownLayers(layers, (512, 2048), "sgd")
        fixed = candidates.Fixed(2, 4, "gpipe", "never")
        alone, sharing = (
            Chooser(known, LayerTimes(known), machine([SLOW] * 2, sharing=x))
            .ranked(fixed, 1)[0]
            .seconds
            for x in (1.0, 3.0)
        )
        self.assertAllClose(sharing / alone, slow, rtol=0.05)

    @parameterized.parameters(
        ("gpipe", 2, [(0, 1)]),
        # Stages 1 and 2 are on one device.
        ("zb_v", 4, [(0, 1), (2, 3)]),
    )
    def test_sending_keeps_devices_from_other_work(self, name, stages, sent):
        known = KnownLayers(make_layers(), (32, 64), "sgd")
        fixed = candidates.Fixed(stages, 1, name, "never")

        def planned(handling, names):
            devices = [Device(x, speed=Speed.of_flops(SLOW)) for x in names]
            where = Machine(devices, bandwidth=1e9, handling=handling)
            return (
                Chooser(known, LayerTimes(known), where)
                .ranked(fixed, 1)[0]
                .plan
            )

        one = [f"/job:worker/task:0/GPU:{i}" for i in range(2)]
        two = [f"/job:worker/task:{i}/GPU:0" for i in range(2)]
        free, busy = (planned(x, two) for x in (0.0, 1e-6))
        self.assertEqual(
            planned(1e-6, one).step_seconds, planned(0.0, one).step_seconds
        )
        # With one micro-batch, one device works at a time: at both ends, in the
        # forward and in the backward pass.
        size = sum(free.stages[k].sends[to] for k, to in sent)
        self.assertAllClose(
            busy.step_seconds - free.step_seconds, 4 * 1e-6 * size
        )
        # It is a share of transfers, not of the work.
        work = [x.step_seconds / x.relative_step_time for x in (free, busy)]
        self.assertAllClose(*work, rtol=0.2)
        self.assertGreater(busy.transfer_share, 0.3)

    @parameterized.parameters("gpipe", "1f1b", "zero_bubble")
    def test_sending_takes_longer_than_layers(self, name):
        """Sums of times that differ much in size leave no negative rest."""
        known = KnownLayers(make_layers(), (32, 64), "sgd")
        fixed = candidates.Fixed(2, 4, name, "never")
        # Too short to be measured: no time is left for gradients of inputs.
        times = {i: [Line(0.0, 0.0)] * 2 for i in range(len(known.names))}
        for task in np.geomspace(1e-7, 1e-4, 20):
            speed = dataclasses.replace(Speed.of_flops(SLOW), task=task)
            devices = [
                Device(f"/job:worker/task:{i}/CPU:0", speed=speed)
                for i in range(2)
            ]
            where = Machine(devices, bandwidth=1e9, handling=1e-6 / 3)
            chooser = Chooser(known, LayerTimes(known, times, speed), where)
            self.assertGreater(chooser.ranked(fixed, 1)[0].seconds, 0)

    def test_of_a_kind_that_is_too_large_one_is_tried(self):
        several = self.choices(lambda x: x.num_devices == 2)
        alone = self.choices(lambda x: x.alone)
        tried = TriedChoices([*several, *alone])
        tried.add(tried.next(), several[0].seconds)
        self.assertIs(tried.next(), alone[0])
        # Also not once it is estimated anew.
        tried.estimate_anew([*several, *alone])
        self.assertIs(tried.next(), several[1])
        left = {x.candidate for x in tried.ranked()}
        self.assertNotIn(alone[0].candidate, left)

    def test_one_that_is_too_large_is_gone(self):
        found = self.choices(lambda x: x.num_devices == 2)
        tried = TriedChoices(found)
        self.assertIs(tried.next(), found[0])
        self.assertIs(tried.next(), found[1])
        tried.add(found[1], 1.0)
        self.assertIs(tried.ranked()[0], found[1])
        self.assertLen(tried.ranked(), 2)

    def test_replicas_are_not_tried(self):
        found = self.choices(lambda x: x.num_replicas == 2)
        self.assertNotEmpty(found)
        tried = TriedChoices(found)
        self.assertIsNone(tried.next())
        self.assertEqual(tried.ranked(), found)

    def test_devices_that_seem_slow_together_are_tried(self):
        """The simulation alone would take one device."""
        layers = make_layers()
        kwargs = {"devices": [f"{KIND}:0", f"{KIND}:1"], "budget_seconds": 200}
        where = machine([SLOW] * 2, sharing=50.0, replicates=False)
        where = dataclasses.replace(
            where,
            devices=[
                dataclasses.replace(x, name=name)
                for x, name in zip(
                    where.devices, kwargs["devices"], strict=True
                )
            ],
        )
        seconds = {1: 2.0, 2: 1.0}
        with (
            mock.patch.object(measured_speeds, "measured", return_value=where),
            mock.patch.object(
                trials,
                "step_seconds",
                lambda layers, spec, optimizer, plan: seconds[plan.num_devices],
            ),
        ):
            plan = tf_gpipe.tune(layers, (32, 64), **kwargs)
        self.assertEqual(plan.num_devices, 2)
        self.assertEqual(plan.measured_seconds, 1.0)


class PlanArgumentTest(tf.test.TestCase, parameterized.TestCase):
    devices = [f"{KIND}:0", f"{KIND}:1"]

    def make(self, **kwargs):
        return tuned(spec=(8, 64), devices=self.devices, num_stages=4, **kwargs)

    @parameterized.parameters("zb_v", "auto")
    def test_a_model_of_a_plan_keeps_its_cut(self, schedule):
        plan = self.make(schedule=schedule)
        inputs = keras.Input((64,))
        layers = make_layers()
        model = tf_gpipe.PipelinedSequential([inputs, *layers], plan=plan)
        self.assertEqual(model.balance, plan.arguments["balance"])
        self.assertEqual(model._pipeline.schedule.tasks, plan.tasks.tasks)
        model.compile("sgd", "mse")
        x = tf.ones((8, 64))
        plain = keras.Sequential([inputs, *make_layers()])
        plain.set_weights(model.get_weights())
        plain.compile("sgd", "mse")
        self.assertAllClose(
            model.train_on_batch(x, x), plain.train_on_batch(x, x)
        )
        self.assertAllClose(model.get_weights(), plain.get_weights())
        path = os.path.join(self.get_temp_dir(), "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        self.assertEqual(loaded.balance, plan.arguments["balance"])
        self.assertEqual(loaded._pipeline.schedule.tasks, plan.tasks.tasks)

    @parameterized.parameters(
        # Of 2 devices, however many there are.
        ({"schedule": "interleaved", "num_stages": 4, "num_devices": 2},),
        ({"schedule": "interleaved_zero_bubble", "num_devices": 1},),
        ({"schedule": "auto", "num_stages": 4, "num_devices": 2},),
        # Not the library's, in spite of its name.
        ({"schedule": "1f1b"}, "1f1b"),
        ({"schedule": "1f1b"}, "zb_v"),
        ({"schedule": "1f1b"}, "interleaved"),
    )
    def test_a_model_of_a_plan_keeps_its_schedule(self, options, name=None):
        options = {"num_stages": 2, "num_micro_batches": 4, **options}
        if name is not None:
            options["schedule"] = tf_gpipe.Schedule(
                schedules.gpipe(2, 4).tasks, name=name
            )
        layers = make_layers()
        plan = tf_gpipe.plan(layers, (8, 64), **options)
        path = os.path.join(self.get_temp_dir(), "plan.json")
        plan.save(path)
        for each in (plan, tf_gpipe.Plan.load(path)):
            model = tf_gpipe.PipelinedSequential(
                [keras.Input((64,)), *layers], plan=each
            )
            found = model._pipeline.schedule
            self.assertEqual(found.tasks, plan.tasks.tasks)
            self.assertEqual(found.name, plan.schedule)

    def test_a_schedule_that_its_name_tells(self):
        for name in ("gpipe", "1f1b", "zero_bubble", "zb_v"):
            plan = tf_gpipe.plan(
                make_layers(), (8, 64), num_stages=2, schedule=name
            )
            self.assertEqual(plan.arguments["schedule"], name)

    def test_functional(self):
        x = inputs = keras.Input((64,))
        for layer in make_layers():
            x = layer(x)
        plain = keras.Model(inputs, x)
        plan = tuned(plain, (8, 64), self.devices, num_stages=2)
        model = tf_gpipe.PipelinedModel.from_model(plain, plan=plan)
        self.assertEqual(model.balance, plan.arguments["balance"])

    def test_num_stages_auto(self):
        layers = [keras.Input((64,), batch_size=8), *make_layers()]
        model = tf_gpipe.PipelinedSequential(
            layers, num_stages="auto", devices=self.devices
        )
        self.assertIsInstance(model.num_stages, int)
        with self.assertRaisesRegex(ValueError, "batch_size=64"):
            tf_gpipe.PipelinedSequential(
                [keras.Input((64,)), *make_layers()], num_stages="auto"
            )
        # Sizes that are left open count as elsewhere.
        counts = []
        for length in (16, 4096):
            inputs = keras.Input((None, 64), batch_size=8)
            outputs = inputs
            for layer in make_layers():
                outputs = layer(outputs)
            model = tf_gpipe.PipelinedModel(
                inputs,
                outputs,
                num_stages="auto",
                nominal_length=length,
                devices=self.devices,
            )
            counts.append(model.num_stages)
            self.assertEqual(model.nominal_length, length)
        self.assertEqual(counts[0], 1)
        self.assertGreater(counts[1], 1)
        # Its output is not the model's input.
        called = make_layers(2)
        called[0](keras.Input((64,), batch_size=8))
        with self.assertRaisesRegex(ValueError, "begin with a `keras.Input`"):
            tf_gpipe.PipelinedSequential(called, num_stages="auto")

    @parameterized.parameters(2, 4)
    def test_a_device_is_no_faster_for_being_named_twice(self, count):
        layers = [keras.layers.Dense(2048) for _ in range(8)]
        find = functools.partial(
            tf_gpipe.tune,
            layers,
            (4096, 2048),
            budget_seconds=0,
            replicas=False,
        )
        alone = find(devices=["CPU:0"])
        chosen = find(devices=["CPU:0"] * count)
        self.assertEqual(chosen.step_seconds, alone.step_seconds)
        self.assertLen(chosen.stages, 1)
        shared = find(devices=["CPU:0"] * count, num_stages=count)
        self.assertGreater(shared.step_seconds, alone.step_seconds)
        self.assertLess(
            find(devices=["CPU:0", "CPU:1"]).step_seconds, alone.step_seconds
        )
        inputs = keras.Input((2048,), batch_size=4096)
        model = tf_gpipe.PipelinedSequential(
            [inputs, *layers], num_stages="auto", devices=["CPU:0"] * count
        )
        self.assertEqual(model.num_stages, 1)

    @parameterized.parameters(
        ((5, 700), "auto", [5, 700]),
        ((700, 700), "auto", 700),
        ((5, 700), "always", [5, 700]),
    )
    def test_several_open_sizes(self, sizes, remat, expected):
        """None is taken for all where what is recomputed depends on them."""

        def model(*lengths):
            inputs = [keras.Input((x, 8)) for x in lengths]
            x = keras.ops.concatenate(inputs, axis=1)
            for _ in range(4):
                x = keras.layers.Dense(8, "gelu")(x)
            return keras.Model(inputs, x)

        many = model(None, None)
        plan = tf_gpipe.plan(
            many,
            [(8, x, 8) for x in sizes],
            num_stages=2,
            num_micro_batches=2,
            remat=remat,
            **({"memory_limit": 0.9} if remat == "auto" else {}),
        )
        path = os.path.join(self.get_temp_dir(), "sizes.json")
        plan.save(path)
        self.assertEqual(plan.nominal_length, expected)
        make = tf_gpipe.PipelinedModel.from_model
        for x in (plan, tf_gpipe.Plan.load(path)):
            if remat == "auto" and isinstance(expected, list):
                with self.assertRaisesRegex(ValueError, r"sizes of \[5, 700\]"):
                    make(many, **x.arguments)
                with self.assertRaisesRegex(ValueError, "several of these"):
                    make(many, plan=x)
                self.assertEqual(make(model(5, 700), plan=x).remat, "auto")
            else:
                for made in (make(many, **x.arguments), make(many, plan=x)):
                    self.assertEqual(made.remat, remat)

    def test_wrong(self):
        plan = self.make()
        layers = [keras.Input((64,)), *make_layers()]
        for kwargs, error, message in (
            ({"plan": 3}, TypeError, "must be a `tf_gpipe.Plan`"),
            (
                {"plan": plan, "num_stages": 2},
                ValueError,
                "decides .*Received: num_stages=2",
            ),
            (
                {"plan": tuned(num_stages=2, devices=2)},
                ValueError,
                "every layer",
            ),
        ):
            some = layers if "every" not in message else layers[:-1]
            with self.assertRaisesRegex(error, message):
                tf_gpipe.PipelinedSequential(some, **kwargs)

    @parameterized.parameters(
        ({"device_flops": np.float32(1e9), "bandwidth": np.float32(1e9)},),
        ({"device_flops": 1e9, "latency": np.float32(1e-3)},),
        ({"device_memory": np.int64(10**9)},),
        ({"remat": "auto", "memory_limit": np.int64(10**9)},),
        ({"remat": "auto", "memory_limit": np.float32(1)},),
        ({"num_micro_batches": np.int32(4), "balance": np.array([4, 4])},),
    )
    def test_numbers_of_numpy_in_a_file(self, options):
        path = os.path.join(self.get_temp_dir(), "numpy.json")
        spec = keras.KerasTensor((np.int64(8), np.int32(64)))
        plan = tf_gpipe.plan(make_layers(), spec, num_stages=2, **options)
        plan.save(path)
        self.assertEqual(tf_gpipe.Plan.load(path).arguments, {**plan.arguments})
        json.dumps(plan.to_dict())

    def test_a_file_stays_whole(self):
        directory = tempfile.mkdtemp()
        path = os.path.join(directory, "plan.json")
        link = os.path.join(directory, "link.json")
        os.symlink(path, link)
        plan = self.make()
        plan.save(link)
        os.chmod(path, 0o640)
        with self.assertRaises(TypeError):
            dataclasses.replace(plan, reason=object()).save(path)
        self.assertEqual(str(tf_gpipe.Plan.load(path)), str(plan))
        other = dataclasses.replace(plan, reason="another")
        other.save(link)
        self.assertEqual(str(tf_gpipe.Plan.load(path)), str(other))
        self.assertTrue(os.path.islink(link))
        self.assertEqual(os.stat(path).st_mode & 0o777, 0o640)
        self.assertCountEqual(os.listdir(directory), ["plan.json", "link.json"])

    def test_file(self):
        plan = self.make(schedule="auto", device_memory="1GB")
        path = os.path.join(tempfile.mkdtemp(), "plan.json")
        plan.save(path)
        loaded = tf_gpipe.Plan.load(path)
        self.assertEqual(loaded, plan)
        self.assertEqual(hash(loaded.tasks), hash(plan.tasks))
        self.assertNotEqual(loaded, self.make(schedule="zb_v"))
        with open(path) as file:
            whole = file.read()
        config = json.loads(whole)
        for text in (
            whole[: len(whole) // 2],
            "[]",
            "{}",
            json.dumps({**config, "version": 99}),
            json.dumps({**config, "stages": config["stages"][:-1]}),
            json.dumps({**config, "bubble": "x"}),
            json.dumps({**config, "num_micro_batches": 3}),
            json.dumps({**config, "more": 1}),
            json.dumps({**config, "device_memory": 0}),
            json.dumps({**config, "nominal_length": [4, None]}),
            whole.replace('"sends": {\n', '"sends": {"9": Infinity,\n'),
        ):
            with open(path, "w") as file:
                file.write(text)
            with self.assertRaisesRegex(ValueError, "`Plan.save` has written"):
                tf_gpipe.Plan.load(path)
        with self.assertRaisesRegex(ValueError, "cannot be read"):
            tf_gpipe.Plan.load(path + "x")


if __name__ == "__main__":
    tf.test.main()
