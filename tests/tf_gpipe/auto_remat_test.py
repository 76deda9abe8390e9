"""`remat="auto"`: layers are recomputed as far as a memory limit requires."""

import collections
import itertools
import os
import re
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L  # noqa: N812

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison
from tests.tf_gpipe.partition.uncountable import Endless
from tf_gpipe.partition import stage_costs
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import peak_activations
from tf_gpipe.stage.recomputed_parts import RecomputedParts

_LOSS = keras.losses.MeanSquaredError
_RUN = {
    "num_stages": 2,
    "num_micro_batches": 4,
    "balance": "flops",
    "devices": ["CPU:0", "CPU:1"],
}


def residual():
    """A model with skips, dropout and batch statistics."""
    x = inputs = keras.Input((8,))
    for i in range(4):
        y = L.Dense(32, activation="gelu", name=f"wide_{i}")(x)
        y = L.Dropout(0.2, seed=i, name=f"dropped_{i}")(y)
        y = L.Dense(8, name=f"narrow_{i}")(y)
        y = L.Add(name=f"sum_{i}")([x, y])
        x = L.LayerNormalization(name=f"norm_{i}")(y)
        if i == 1:
            x = L.BatchNormalization(name="batch_norm")(x)
    return keras.Model(inputs, L.Dense(3, name="last")(x))


def data():
    rng = np.random.default_rng(0)
    return [
        (
            rng.normal(size=(12, 8)).astype("float32"),
            rng.normal(size=(12, 3)).astype("float32"),
        )
    ]


def planned(**kwargs):
    return tf_gpipe.plan(
        residual(),
        (256, 8),
        **{"num_stages": 4, "num_micro_batches": 8, "balance": "flops"}
        | kwargs,
    )


class PlanTest(parameterized.TestCase):
    @parameterized.parameters(0.45, 0.6, 0.8)
    @pytest.mark.slow_after(1)
    def test_fits_a_share_of_what_never_takes(self, share):
        never = planned(remat="never")
        auto = planned(remat="auto", memory_limit=share)
        limit = share * max(never.device_activation_bytes)
        self.assertLessEqual(max(auto.device_activation_bytes), limit)
        always = planned(remat="always")
        self.assertLess(auto.relative_step_time, always.relative_step_time)
        self.assertTrue(any(x.recomputed for x in auto.stages))

    def test_recomputes_nothing_where_all_fits(self):
        auto = planned(remat="auto", memory_limit=1.0)
        self.assertFalse(any(x.recomputed for x in auto.stages))

    def test_bytes_count_weights_and_slots(self):
        limit = max(planned(remat="never").device_bytes)
        auto = planned(remat="auto", memory_limit=limit)
        self.assertLessEqual(max(auto.device_bytes), limit)
        less = planned(remat="auto", memory_limit=int(0.9 * limit))
        self.assertLessEqual(max(less.device_bytes), 0.9 * limit)
        self.assertTrue(any(x.recomputed for x in less.stages))

    def test_tells_what_cannot_fit(self):
        with self.assertRaisesRegex(ValueError, r"too low for stage \d.*more"):
            planned(remat="auto", memory_limit=0.01)

    @parameterized.product(
        schedule=("1f1b", "zero_bubble", "eager_zero_bubble"),
        balance=(None, "parameters"),
    )
    @pytest.mark.slow_after(1)
    def test_tells_the_least_that_is_enough(self, **options):
        with self.assertRaisesRegex(ValueError, "too low") as raised:
            planned(remat="auto", memory_limit=1000, **options)
        (least,) = re.findall(r"takes? ([\d,]+) bytes", str(raised.exception))
        least = int(least.replace(",", ""))
        found = planned(remat="auto", memory_limit=least, **options)
        self.assertLessEqual(max(found.device_bytes), least)
        with self.assertRaisesRegex(ValueError, "too low"):
            planned(remat="auto", memory_limit=least - 1, **options)

    @parameterized.parameters(
        (512, 16, [64] * 4 + [2048, 64] + [512] * 6),
        (4096, 8, [4096] + [256] * 9),
        (4096, 8, [256] * 6 + [8192]),
    )
    @pytest.mark.slow_after(1)
    def test_a_searched_order_keeps_the_limit(self, rows, count, units):
        """With weights that differ much from stage to stage."""

        def largest(limit):
            found = tf_gpipe.plan(
                [*(L.Dense(n, "gelu") for n in units), L.Dense(16)],
                (rows, 256),
                num_stages=4,
                num_micro_batches=count,
                num_devices=2,
                schedule="auto",
                remat="auto",
                memory_limit=int(limit),
            )
            return max(found.device_bytes)

        with self.assertRaises(ValueError) as caught:
            largest(1000)
        least = caught.exception.least
        for share in (1.0, 1.1):
            self.assertLessEqual(largest(share * least), share * least)

    def test_split_backward_passes_save_little(self):
        with self.assertRaisesRegex(ValueError, "schedule='1f1b'"):
            planned(remat="auto", memory_limit=0.3, schedule="zero_bubble")

    def test_advice_is_the_limit_of_the_device(self):
        limit = max(planned(remat="never").device_bytes) - 1
        found = planned(
            remat="auto", memory_limit=1.0, device_memory=int(limit)
        )
        self.assertIn(f"memory_limit={int(limit)}", found.advice)

    def test_stages_that_share_a_device(self):
        kwargs = {"schedule": "interleaved", "num_devices": 2}
        never = planned(remat="never", **kwargs)
        auto = planned(remat="auto", memory_limit=0.6, **kwargs)
        self.assertLessEqual(
            max(auto.device_activation_bytes),
            0.6 * max(never.device_activation_bytes),
        )

    @parameterized.parameters(1.0, 0.7)
    @pytest.mark.slow_after(1)
    def test_a_share_with_a_searched_order(self, share):
        """It is one of what 1F1B takes, which bounds other searches, too."""
        kwargs = {"balance": [5, 5, 5, 7], "remat": "never"}
        order = schedules.neighbouring(4, 8, 2)
        never = planned(schedule=order, **kwargs)
        kwargs |= {"remat": "auto", "memory_limit": share}
        auto = planned(schedule="auto", num_devices=2, **kwargs)
        self.assertLessEqual(
            max(auto.device_activation_bytes),
            share * max(never.device_activation_bytes),
        )
        recomputed = any(x.recomputed for x in auto.stages)
        self.assertEqual(recomputed, share < 1)

    def test_a_layer_that_needs_what_it_makes_is_recomputed_whole(self):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((8,)), L.Dense(32, "tanh"), L.Dense(8, "tanh")],
            num_stages=1,
            devices=["CPU:0"],
        )
        graph = model._pipeline.graph
        parts = [range(0, 1), range(1, 2)]
        (costs,) = stage_costs.of_graph(graph, [2], recomputed=[parts])
        # The second part takes what the first one makes.
        self.assertEqual(costs.sizes.kept, 4 * 32)
        self.assertEqual(costs.sizes.adds_at_a_time, 4 * 32)

    def test_peak_of_what_is_kept_and_recomputed(self):
        sizes = {0: Sizes(inputs=1, stored=10, kept=4, adds_at_a_time=2)}
        schedule = schedules.gpipe(2, 3)
        self.assertEqual(peak_activations(schedule, "auto", sizes), 3 * 5 + 2)


class CutTest(tf.test.TestCase, parameterized.TestCase):
    def make(self, **kwargs):
        return tf_gpipe.PipelinedModel.from_model(
            residual(),
            num_stages=2,
            num_micro_batches=8,
            devices=["CPU:0", "CPU:1"],
            remat="auto",
            **kwargs,
        )

    @parameterized.parameters(0.5, 0.9, "24KB")
    @pytest.mark.slow_after(1)
    def test_the_default_is_made_for_the_limit(self, limit):
        limits = {"memory_limit": limit, "batch_size": 16}
        found = self.make(**limits)
        other = self.make(balance="flops", **limits)
        self.assertEqual(found.balance, other.balance)
        self.assertEqual(found._pipeline.chosen, other._pipeline.chosen)
        plan = planned(
            num_stages=2, balance=None, remat="auto", memory_limit=0.5
        )
        named = planned(num_stages=2, remat="auto", memory_limit=0.5)
        self.assertEqual(plan, named)
        # This cut is not the one by operations alone.
        alone = tf_gpipe.plan(residual(), (256, 8), num_stages=2)
        self.assertNotEqual(
            plan.arguments["balance"], alone.arguments["balance"]
        )

    @parameterized.parameters(
        (2, [32] * 6, [512, 10]),
        (3, [32] * 6, [512, 10]),
        (2, [8] * 4, [1024, 256, 64, 10]),
        (4, [16] * 9, [256, 256, 10]),
    )
    @pytest.mark.slow_after(2)
    def test_heavy_last_stages(self, num_stages, filters, units):
        """The search finds the cut that needs least, or one close to it."""

        def least(**kwargs):
            with self.assertRaises(ValueError) as caught:
                tf_gpipe.plan(
                    [
                        *(L.Conv2D(n, 3, padding="same") for n in filters),
                        L.Flatten(),
                        *(L.Dense(n) for n in units),
                    ],
                    (64, 16, 16, 3),
                    num_stages=num_stages,
                    remat="auto",
                    memory_limit=1000,
                    **kwargs,
                )
            return caught.exception.least

        count = len(filters) + 1 + len(units)
        cuts = [*itertools.combinations(range(1, count), num_stages - 1)]
        fewest = min(
            least(
                balance=[
                    b - a for a, b in itertools.pairwise([0, *bounds, count])
                ]
            )
            for bounds in cuts[:: 1 + len(cuts) // 20]
        )
        self.assertLessEqual(least(), fewest * 1.001)

    def test_layers_without_operations(self):
        def make(**kwargs):
            layers = [L.Embedding(n, 4) for n in (10, 300)]
            inputs = keras.Input((4,), dtype="int32")
            model = keras.Model(inputs, [x(inputs) for x in layers])
            return tf_gpipe.PipelinedModel.from_model(
                model, num_stages=2, devices=["CPU:0"] * 2, **kwargs
            )

        auto = {"remat": "auto", "memory_limit": 1.0}
        self.assertEqual(make(**auto).balance, make().balance)

    @parameterized.product(limit=(0.5, 0.7, 0.9), num_stages=(2, 4))
    @pytest.mark.slow_after(1)
    def test_a_model_does_what_its_plan_says(self, limit, num_stages):
        plan = planned(num_stages=num_stages, remat="auto", memory_limit=limit)
        options = {
            **plan.arguments,
            "devices": [f"CPU:{k}" for k in range(num_stages)],
        }
        again = planned(
            **{
                x: options[x] for x in ("num_stages", "balance", "memory_limit")
            },
            remat="auto",
        )
        self.assertEqual(again.to_dict(), plan.to_dict())
        model = tf_gpipe.PipelinedModel.from_model(residual(), **options)
        self.assertEqual(
            [
                [stage.nodes[i].layer.name for part in own for i in part]
                for stage, own in zip(
                    model.stages, model._pipeline.chosen, strict=True
                )
            ],
            [stage.recomputed for stage in plan.stages],
        )

    def of_open_length(self, functional, shape, **kwargs):
        """Returns a pipeline whose inputs leave sizes open."""
        layers = [L.Dense(8, "gelu") for _ in range(6)]
        inputs = keras.Input(shape)
        if not functional:
            return tf_gpipe.PipelinedSequential([inputs, *layers], **kwargs)
        x = inputs
        for layer in layers:
            x = layer(x)
        return tf_gpipe.PipelinedModel(inputs, x, **kwargs)

    @pairwise.product(
        functional=(True, False), limit=("share", "bytes"), length=(16, 512)
    )
    @pytest.mark.slow_after(2)
    def test_a_plan_for_longer_sequences(self, functional, limit, length):
        """What a model recomputes is for the sizes of its plan."""
        layers = [L.Dense(8, "gelu") for _ in range(6)]
        options = {"num_stages": 2, "num_micro_batches": 4, "optimizer": "sgd"}
        spec = (32, length, 8)
        never = tf_gpipe.plan(layers, spec, remat="never", **options)
        plan = tf_gpipe.plan(
            layers,
            spec,
            remat="auto",
            memory_limit=0.7
            if limit == "share"
            else int(0.7 * max(never.device_bytes)),
            **options,
        )
        path = os.path.join(self.get_temp_dir(), "plan.json")
        plan.save(path)
        model = self.of_open_length(
            functional, (None, 8), plan=tf_gpipe.Plan.load(path)
        )
        model.compile("sgd", "mse")
        model.make_train_function()
        found = [sum(map(len, own)) for own in model._pipeline.chosen]
        self.assertEqual(found, [len(x.recomputed) for x in plan.stages])
        self.assertGreater(sum(found), 0)
        self.assertEqual(model.nominal_length, length)
        copy = type(model).from_config(model.get_config())
        self.assertEqual(copy._pipeline.chosen, model._pipeline.chosen)
        # Unless the user says otherwise.
        model = self.of_open_length(
            functional, (None, 8), plan=plan, nominal_length=7
        )
        self.assertEqual(model.nominal_length, 7)

    @parameterized.parameters(True, False)
    def test_arguments_of_a_plan_for_longer_sequences(self, functional):
        x = inputs = keras.Input((None, 8))
        layers = [L.Dense(8, "gelu") for _ in range(6)]
        for layer in layers:
            x = layer(x)
        plain = keras.Model(inputs, x)
        if not functional:
            plain = keras.Sequential([keras.Input((None, 8)), *layers])
        options = {"num_stages": 2, "num_micro_batches": 4, "optimizer": "sgd"}
        never = tf_gpipe.plan(plain, (32, 512, 8), remat="never", **options)
        plan = tf_gpipe.plan(
            plain,
            (32, 512, 8),
            remat="auto",
            memory_limit=int(0.7 * max(never.device_bytes)),
            **options,
        )
        path = os.path.join(self.get_temp_dir(), "plan.json")
        plan.save(path)
        of_plan = self.of_open_length(functional, (None, 8), plan=plan)
        for each in (plan, tf_gpipe.Plan.load(path)):
            self.assertEqual(each.arguments["nominal_length"], 512)
            model = self.of_open_length(functional, (None, 8), **each.arguments)
            self.assertEqual(model.nominal_length, 512)
            self.assertEqual(model._pipeline.chosen, of_plan._pipeline.chosen)
        model = self.of_open_length(
            functional, (None, 8), plan=plan, nominal_length=7
        )
        self.assertEqual(model.nominal_length, 7)

    @parameterized.parameters(True, False)
    def test_a_plan_for_several_open_sizes(self, functional):
        def make(sizes, **options):
            plan = tf_gpipe.plan(
                [L.Dense(8, "gelu") for _ in range(6)],
                (32, *sizes, 8),
                num_stages=2,
                **options,
            )
            return self.of_open_length(functional, (None, None, 8), plan=plan)

        auto = {"remat": "auto", "memory_limit": 0.7}
        self.assertEqual(make((4, 4), **auto).nominal_length, 4)
        make((4, 5))
        with self.assertRaisesRegex(ValueError, r"\[\[4, 5, 8\]\].*open"):
            make((4, 5), **auto)

    @parameterized.parameters(0.5, 0.9)
    def test_is_loaded_as_it_was(self, limit):
        model = self.make(memory_limit=limit)
        path = os.path.join(self.get_temp_dir(), "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        self.assertEqual(loaded.balance, model.balance)
        self.assertEqual(loaded.memory_limit, limit)
        self.assertEqual(loaded._pipeline.chosen, model._pipeline.chosen)

    @pytest.mark.slow
    def test_is_decided_again_for_new_weights(self):
        model = self.make(memory_limit=0.5)
        before = model.balance, model._pipeline.chosen
        model.layers[1].enable_lora(2)
        model.compile("sgd", "mse")
        model.train_on_batch(*data()[0])
        other = self.make(memory_limit=0.5)
        self.assertEqual(before, (other.balance, other._pipeline.chosen))
        for stage in model.stages:
            self.assertLen(stage.used(), len(stage.variables))

    def frozen(self, limit, optimizer):
        """Returns a compiled model of which the second half alone trains."""
        model = residual()
        for layer in model.layers[: len(model.layers) // 2]:
            layer.trainable = False
        made = tf_gpipe.PipelinedModel.from_model(
            model, **_RUN, remat="auto", memory_limit=limit, batch_size=12
        )
        made.compile(optimizer, "mse")
        made.train_on_batch(*data()[0])
        return made

    @parameterized.parameters(
        ("24KB", {}, True),
        ("16KB", {"momentum": 0.9}, False),
        ("16KB", {"use_ema": True}, False),
        (0.75, {}, True),
    )
    @pytest.mark.slow_after(2)
    def test_is_decided_again_for_what_is_trained(
        self, limit, arguments, thaws
    ):
        """The steps of fine-tuning: thaw layers, compile, fit."""
        kind = keras.optimizers.SGD
        model = self.frozen(limit, kind())
        if thaws:
            for layer in model.layers:
                layer.trainable = True
        model.compile(kind(**arguments), "mse")
        model.train_on_batch(*data()[0])
        other = tf_gpipe.PipelinedModel.from_model(
            residual(), **_RUN, remat="auto", memory_limit=limit, batch_size=12
        )
        if not thaws:
            other = self.frozen(limit, kind(**arguments))
        other.compile(kind(**arguments), "mse")
        other.train_on_batch(*data()[0])
        self.assertEqual(model._pipeline.chosen, other._pipeline.chosen)
        self.assertEqual(
            [len(x.nodes) for x in model.stages],
            [len(x.nodes) for x in other.stages],
        )

    def test_is_kept_if_nothing_else_is_trained(self):
        model = self.frozen("26KB", keras.optimizers.SGD())
        before = model._pipeline
        model.compile(keras.optimizers.SGD(0.5), "mse")
        model.train_on_batch(*data()[0])
        self.assertIs(model._pipeline, before)

    @parameterized.parameters(
        {"remat": "auto", "memory_limit": "1GB", "batch_size": 4},
        {"remat": "auto", "memory_limit": 1.0},
        {"balance": "time"},
        {"balance": "memory"},
        {"schedule": "auto"},
    )
    def test_of_a_model_that_fit_builds(self, **arguments):
        """Keras builds a model without an `Input` as it traces the step."""
        model = tf_gpipe.PipelinedSequential(
            [L.Dense(8), L.BatchNormalization(), L.Dense(1)],
            num_stages=2,
            num_micro_batches=2,
            devices=["CPU:0", "CPU:1"],
            **arguments,
        )
        model.compile("adam", "mse")
        model.fit(np.ones((4, 4)), np.ones((4, 1)), batch_size=4, verbose=0)
        self.assertLen(model.stages, 2)

    def test_fewer_rows_than_micro_batches(self):
        """The limit is for the micro-batches that there are."""
        options = {
            **_RUN,
            "num_micro_batches": 16,
            "schedule": "gpipe",
            "remat": "auto",
            "memory_limit": "24KB",
        }
        devices = options.pop("devices")
        plan = tf_gpipe.plan(residual(), (4, 8), **options)
        model = tf_gpipe.PipelinedModel.from_model(
            residual(), **options, devices=devices, batch_size=4
        )
        self.assertEqual(
            [x.recomputed for x in plan.stages],
            [
                [stage.layers[i].name for r in ranges for i in r]
                for stage, ranges in zip(
                    model.stages, model._pipeline.chosen, strict=True
                )
            ],
        )


class TrainTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(schedule=("1f1b", "gpipe"), share=(0.45, 0.7))
    @pytest.mark.slow_after(1)
    def test_trains_as_never(self, schedule, share):
        runs = []
        for kwargs in (
            {"remat": "never"},
            {"remat": "auto", "memory_limit": share},
        ):
            counts = [11, 11] if schedule != "1f1b" else "flops"
            runs.append(
                comparison.train(
                    residual,
                    data(),
                    loss=_LOSS(),
                    # Adam magnifies gradients that are zero but for rounding.
                    optimizer=lambda: keras.optimizers.SGD(0.1),
                    **{**_RUN, "balance": counts},
                    schedule=schedule,
                    **kwargs,
                )
            )
        (never, logs), (auto, others) = runs
        self.assertTrue(any(auto._pipeline.recomputed(k) for k in range(2)))
        self.assertAllClose(logs, others, rtol=1e-6)
        # Not the same bits: TensorFlow may fuse other operations.
        for a, b in zip(never.weights, auto.weights, strict=True):
            self.assertAllClose(a, b, rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_split_backward_passes(self):
        found = []
        for chosen in ((), (range(0, 5), range(5, 9))):
            keras.utils.set_random_seed(1)
            model = tf_gpipe.PipelinedModel.from_model(
                residual(),
                **{**_RUN, "balance": [11, 11]},
                schedule="zero_bubble",
                remat="auto",
                memory_limit=1.0,
            )
            object.__setattr__(model._pipeline, "chosen", (chosen, chosen))
            model.compile("sgd", _LOSS())
            model.train_on_batch(*data()[0])
            found.append(model.get_weights())
        for a, b in zip(*found, strict=True):
            self.assertAllClose(a, b, rtol=1e-5, atol=1e-6)

    @parameterized.parameters("eager", "layer", "xla")
    @pytest.mark.slow_after(1)
    def test_other_ways_to_run(self, how):
        found = []
        for kwargs in (
            {"remat": "never"},
            {"remat": "auto", "memory_limit": 0.6},
        ):
            keras.utils.set_random_seed(1)
            model = tf_gpipe.PipelinedModel.from_model(
                residual(), **_RUN, **kwargs
            )
            model.compile(
                "sgd",
                _LOSS(),
                run_eagerly=how == "eager",
                jit_compile=how == "xla",
            )
            ((x, y),) = data()
            if how == "layer":
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x, training=True) ** 2)
                found.append(tape.gradient(loss, model.trainable_weights))
            else:
                model.train_on_batch(x, y)
                found.append(model.get_weights())
        for a, b in zip(*found, strict=True):
            self.assertAllClose(a, b, rtol=1e-5, atol=1e-6)

    def test_computes_again_what_is_chosen(self):
        calls = collections.Counter()

        def counted(name):
            @tf.custom_gradient
            def run(x):
                def count(x):
                    calls[name] += 1
                    return x

                # Stateless, so graph optimisation may merge two of them.
                y = tf.numpy_function(count, [x], tf.float32, stateful=False)
                y = tf.ensure_shape(y, x.shape)
                # The gradient needs the output.
                return y, lambda upstream: upstream * tf.sign(tf.abs(y) + 1)

            return L.Lambda(run)

        def make():
            layers = [keras.Input((6,))]
            for i in range(4):
                layers += [counted(i), L.Dense(6)]
            return layers

        pipeline = tf_gpipe.PipelinedSequential(
            make(),
            **{**_RUN, "num_stages": 1, "balance": [8], "devices": ["CPU:0"]},
        )
        choice = ((range(0, 2), range(4, 6)),)
        object.__setattr__(pipeline._pipeline, "chosen", choice)
        object.__setattr__(pipeline._pipeline, "remat", "auto")
        pipeline.compile("sgd", "mse")
        x = np.ones((8, 6), "float32")
        pipeline.train_on_batch(x, x)
        self.assertEqual(calls, {0: 8, 1: 4, 2: 8, 3: 4})


class Logged(L.Layer):
    """Logs when it runs, and when its gradients do, which need its output."""

    log = []

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.kernel = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        def noted(what, x, times=1):
            def note(x):
                self.log.append(f"{what} {self.name}")
                return x

            shape = x.shape
            for _ in range(times):
                # Stateless, so that it is run again where it is recomputed.
                x = tf.numpy_function(note, [x], x.dtype, stateful=False)
            return tf.ensure_shape(x, shape)

        @tf.custom_gradient
        def run(x, kernel):
            y = noted("forward", x * kernel)

            def gradients(upstream):
                by_input = noted("by inputs", upstream * tf.tanh(y))
                # As slow as for a large kernel, until it reads the output.
                by_kernel = noted("by weights", upstream, 30) * tf.exp(y)
                return by_input, tf.reduce_sum(by_kernel)

            return y, gradients

        return run(x, tf.convert_to_tensor(self.kernel))


class OrderTest(tf.test.TestCase):
    def test_of_what_is_recomputed(self):
        x = skip = Logged(name="a")(inputs := keras.Input((6,)))
        for name in "bcd":
            x = Logged(name=name)(x)
        x = Logged(name="e")(L.Add()([x, skip]))
        model = tf_gpipe.PipelinedModel.from_model(
            keras.Model(inputs, x),
            num_stages=1,
            num_micro_batches=1,
            devices=["CPU:0"],
        )
        # The second part takes the output of the first, which is thus kept.
        choice = ((range(0, 2), range(3, 6)),)
        object.__setattr__(model._pipeline, "chosen", choice)
        object.__setattr__(model._pipeline, "remat", "auto")
        model.compile("sgd", "mse")
        x = np.ones((8, 6), "float32")
        log = Logged.log = []
        found = []
        waits = RecomputedParts.waits

        def seen(parts, *args):
            found.append(waits(parts, *args))
            return found[-1]

        with mock.patch.object(RecomputedParts, "waits", seen):
            model.train_on_batch(x, x)

        def last(event):
            return len(log) - 1 - log[::-1].index(event)

        self.assertEqual(log.count("forward b"), 2)
        self.assertEqual(log.count("forward d"), 2)
        # The first part, though it needs nothing recomputed, waits for its
        # gradient.
        self.assertGreater(last("forward b"), last("by inputs d"))
        # It also waits for gradients of weights, so that no tensor of the
        # second part is left. The log alone could show this by chance.
        reads = [
            {x.op.type for op in awaited for x in op.inputs}
            for awaited in found[0].values()
        ]
        self.assertTrue(any("Exp" in types for types in reads), reads)
        for name in "de":
            self.assertGreater(last("forward b"), last(f"by weights {name}"))


class ArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    def make(self, **kwargs):
        return tf_gpipe.PipelinedModel.from_model(
            residual(), **_RUN, **{"remat": "auto", **kwargs}
        )

    @parameterized.parameters(
        ({}, "needs a `memory_limit`"),
        ({"memory_limit": 0.0}, "share above 0"),
        ({"memory_limit": 1.5}, "share above 0"),
        ({"memory_limit": "much"}, "positive number of bytes"),
        ({"memory_limit": "8GB"}, "`batch_size`"),
        ({"memory_limit": 0.5, "remat": "never"}, "is for remat='auto'"),
        ({"memory_limit": 1000, "batch_size": 12}, "too low for stage 1"),
    )
    def test_refuses(self, kwargs, text):
        with self.assertRaisesRegex(ValueError, text):
            self.make(**kwargs)

    @pytest.mark.slow
    def test_counts_the_slots_of_the_optimizer(self):
        model = self.make(memory_limit="30KB", batch_size=12)
        before = model._pipeline
        model.compile(keras.optimizers.SGD(), "mse")
        ((x, y),) = data()
        model.train_on_batch(x, y)
        self.assertIsNot(model._pipeline, before)
        self.assertLessEqual(
            sum(map(len, model._pipeline.recomputed(0))),
            sum(map(len, before.recomputed(0))),
        )

    @pytest.mark.slow
    def test_a_limit_for_an_optimizer_without_slots(self):
        ((x, y),) = data()
        model = self.make(memory_limit="18KB", batch_size=12)
        model.compile("sgd", "mse")
        model.train_on_batch(x, y)
        model.compile("adam", "mse")
        with self.assertRaisesRegex(ValueError, "too low for stage"):
            model.train_on_batch(x, y)

    def test_names_another_mode_for_a_layer_without_costs(self):
        with self.assertRaisesRegex(ValueError, "'endless'.*such as 'always'"):
            tf_gpipe.PipelinedSequential(
                [keras.Input((4,)), L.Dense(4), Endless(name="endless")],
                num_stages=2,
                devices=["CPU:0", "CPU:1"],
                balance=[1, 1],
                remat="auto",
                memory_limit=0.5,
            )

    def test_saves_its_arguments(self):
        model = self.make(memory_limit=0.6)
        again = type(model).from_config(model.get_config())
        self.assertEqual(again.memory_limit, 0.6)
        self.assertEqual(again._pipeline.chosen, model._pipeline.chosen)

    def test_summary_names_what_is_recomputed(self):
        lines = []
        self.make(memory_limit=0.5).summary(print_fn=lines.append)
        self.assertRegex(lines[-1], r"Stage 0 recomputes \d+ of")


if __name__ == "__main__":
    tf.test.main()
