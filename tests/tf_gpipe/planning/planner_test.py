"""Plans, compared with counts by hand and with models that are built."""

import ast
import random
import time
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.devices import slots
from tf_gpipe.planning.planner import plan
from tf_gpipe.schedule import schedules
from tools.benchmark.workloads import FeedForward
from tools.benchmark.workloads import SelfAttention

LAYERS = keras.layers


def make_dense():
    return [
        LAYERS.Dense(8, activation="relu", name="a"),
        LAYERS.Dense(6, name="b"),
        LAYERS.Dense(2, name="c"),
    ]


def make_blocks(num_blocks, num_heads, inner_dim):
    return [
        half
        for _ in range(num_blocks)
        for half in (SelfAttention(num_heads), FeedForward(inner_dim))
    ]


def make_mixed():
    """Variables of all kinds: factored or not, trainable or not, seeds."""
    return [
        LAYERS.Dense(160),
        LAYERS.BatchNormalization(),
        LAYERS.Dropout(0.5),
        LAYERS.Dense(136, trainable=False),
        LAYERS.LayerNormalization(),
        LAYERS.Dense(3),
    ]


def total_bytes(variables):
    return sum(
        v.shape.num_elements() * tf.as_dtype(v.dtype).size
        for v in variables
        if v is not None
    )


def several():
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(), {".*/kernel": keras.optimizers.SGD()}
        )
    )


def loss_scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def accumulating():
    return keras.optimizers.Adam(gradient_accumulation_steps=2)


def built(layers, spec, optimizer, num_stages=2, **kwargs):
    """Returns a pipeline and its optimizer, both built."""
    model = tf_gpipe.PipelinedSequential(
        [keras.Input(spec[1:]), *layers], num_stages=num_stages, **kwargs
    )
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def changes(advice):
    """Returns the arguments that a plan's advice names."""
    call = advice.removeprefix("It would fit with ").removesuffix(".")
    keywords = ast.parse(f"_({call})", mode="eval").body.keywords
    return {x.arg: ast.literal_eval(x.value) for x in keywords}


class NoConfig(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


class OwnOptimizer(keras.optimizers.SGD):
    def __init__(self, factor):
        super().__init__(momentum=factor)


class Matrix(keras.layers.Layer):
    def build(self, shape):
        self.matrix = self.add_weight(shape=(8, 8))

    def call(self, x):
        return x @ self.matrix


class Late(keras.layers.Layer):
    def build(self, shape):
        self.inner = LAYERS.Dense(8)
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


class OptimizerTest(tf.test.TestCase, parameterized.TestCase):
    """Optimizers that Keras trains with, but cannot write into a file."""

    @parameterized.named_parameters(
        ("schedule", lambda: keras.optimizers.Adam(NoConfig()), 2),
        ("function", lambda: keras.optimizers.Adam(lambda: 0.1), 2),
        ("class", lambda: OwnOptimizer(0.9), 1),
        (
            "chosen",
            lambda: keras.optimizers.MultiOptimizer(
                lambda variable: OwnOptimizer(0.9)
            ),
            1,
        ),
    )
    def test_slots(self, make, count):
        optimizer = make()
        found = plan(
            make_dense(), (12, 4), num_stages=1, optimizer=optimizer
        ).stages[0]
        self.assertEqual(
            found.parameter_bytes, 4 * (2 + count) * found.parameters
        )
        self.assertFalse(optimizer.built)

    def test_none(self):
        for call in (
            lambda: plan(make_dense(), (12, 4), num_stages=1, optimizer=None),
            lambda: tf_gpipe.tune(make_dense(), (12, 4), 1, optimizer=None),
        ):
            with self.assertRaisesRegex(ValueError, "Received: optimizer=None"):
                call()

    def test_in_fit(self):
        """A model that `fit` builds decides while its step is traced."""
        layers = [LAYERS.Dense(8) for _ in range(3)]
        model = tf_gpipe.PipelinedSequential(
            layers,
            num_stages=2,
            num_micro_batches=2,
            remat="auto",
            memory_limit="1MB",
            batch_size=8,
        )
        model.compile(keras.optimizers.Adam(NoConfig()), "mse")
        x = tf.ones((8, 8))
        model.fit(x, x, batch_size=8, verbose=0)
        self.assertTrue(model.built)


class PlanTest(tf.test.TestCase, parameterized.TestCase):
    def plan(self, **kwargs):
        """Plans micro-batches of 4 rows of `make_dense`."""
        options = dict(num_stages=2, num_micro_batches=3, balance=[2, 1])
        return plan(make_dense(), (12, 4), **{**options, **kwargs})

    def test_by_hand(self):
        found = self.plan()
        first, second = found.stages
        self.assertEqual([first.layers, second.layers], [["a", "b"], ["c"]])
        self.assertEqual(first.parameters, 4 * 8 + 8 + 8 * 6 + 6)
        self.assertEqual(second.parameters, 6 * 2 + 2)
        # Weights, sums of gradients and two moments, of 4 bytes each.
        self.assertEqual(first.parameter_bytes, 4 * 4 * 94)
        self.assertEqual(second.parameter_bytes, 4 * 4 * 14)
        # Multiplications and additions, biases and the activation.
        products = [2 * 4 * 4 * 8, 2 * 4 * 8 * 6, 2 * 4 * 6 * 2]
        self.assertEqual(first.flops, products[0] + products[1] + 32 + 32 + 24)
        self.assertEqual(second.flops, products[2] + 8)
        # A product for the gradient of each operand.
        self.assertEqual(
            first.backward_flops,
            2 * (products[0] + products[1]) + 32 + 32 + 24,
        )
        self.assertEqual(second.backward_flops, 2 * products[2] + 8)
        self.assertEqual(first.boundary_bytes, 4 * 4 * 6)
        self.assertEqual(first.sends, {1: 4 * 4 * 6})
        self.assertEqual(second.sends, {})
        self.assertEqual(found.devices, [0, 1])
        self.assertEqual(found.device_bytes, [first.bytes, second.bytes])
        self.assertEqual(first.bytes, first.parameter_bytes + 768)
        self.assertTrue(found.fits)
        self.assertEmpty(found.advice)

    @parameterized.parameters(
        # Last: of how many micro-batches `a` keeps its activations at once.
        ("always", "1f1b", 1),
        # Micro-batch 1 is recomputed while 2 is kept.
        ("except_last", "1f1b", 2),
        ("never", "1f1b", 2),
        ("always", "gpipe", 1),
        ("except_last", "gpipe", 1),
        ("never", "gpipe", 3),
    )
    def test_activations_by_hand(self, remat, schedule, kept):
        found = self.plan(remat=remat, schedule=schedule)
        # Also the inputs of three micro-batches, the gradient by the stage's
        # outputs, and those by the outputs, inputs and weights of `a`.
        self.assertEqual(
            found.stages[0].activation_bytes,
            128 * kept + 3 * 64 + 4 * (24 + 32 + 16 + 32 + 8),
        )

    def test_activations_of_last_stage_by_hand(self):
        found = self.plan(remat="always", schedule="gpipe")
        # The inputs of three micro-batches, and their targets, one number a
        # row; for one micro-batch, the gradients by the outputs, inputs and
        # weights of `c`. It keeps nothing but its inputs.
        self.assertEqual(
            found.stages[1].activation_bytes,
            3 * (96 + 16) + 4 * (8 + 24 + 12 + 2),
        )

    @parameterized.product(
        schedule=("gpipe", "1f1b"), remat=("always", "never")
    )
    @pytest.mark.slow_after(1)
    def test_activations_fall_with_micro_batches(self, schedule, remat):
        layers = make_blocks(4, 2, 32)
        bytes_of = [
            [
                stage.activation_bytes
                for stage in plan(
                    layers,
                    (64, 8, 16),
                    num_stages=2,
                    num_micro_batches=m,
                    schedule=schedule,
                    remat=remat,
                ).stages
            ]
            for m in (2, 8, 32)
        ]
        for less, more in zip(bytes_of[1:], bytes_of, strict=False):
            for a, b in zip(less, more, strict=True):
                self.assertLess(a, b)

    def test_activations_fall_with_remat(self):
        layers = make_blocks(4, 2, 32)
        always, never = (
            plan(
                layers,
                (64, 8, 16),
                num_stages=2,
                num_micro_batches=8,
                balance="parameters",
                remat=remat,
            ).stages[0]
            for remat in ("always", "never")
        )
        self.assertLess(always.activation_bytes, never.activation_bytes)
        self.assertEqual(always.flops, never.flops)

    def test_batch_size_need_not_divide(self):
        # The largest micro-batch decides.
        self.assertEqual(
            plan(make_dense(), (10, 4), num_stages=2, num_micro_batches=3),
            plan(make_dense(), (12, 4), num_stages=2, num_micro_batches=3),
        )

    def test_bubble_and_time(self):
        layers = [LAYERS.Dense(8) for _ in range(4)]
        found = plan(
            layers, (24, 8), num_stages=4, num_micro_batches=12, remat="never"
        )
        self.assertAllClose(found.bubble, 3 / 15)
        self.assertAllClose(found.relative_step_time, 15 / 12 / 4)

    def test_slow_interconnect(self):
        layers = [keras.layers.Dense(64, use_bias=False) for _ in range(2)]
        options = {
            "num_stages": 2,
            "num_micro_batches": 1,
            "schedule": "gpipe",
            "remat": "never",
            "device_flops": 1e6,
        }
        alone = tf_gpipe.plan(layers, (8, 64), **options)
        # A forward pass and the two halves of a backward pass, but for the
        # gradient by the input of the first layer, which nobody needs.
        flops = 2 * 8 * 64 * 64
        self.assertAllClose(
            alone.step_seconds,
            sum(x.flops + x.backward_flops for x in alone.stages) / 1e6,
        )
        self.assertGreaterEqual(alone.step_seconds, 5 * flops / 1e6)
        self.assertEqual(alone.transfer_share, 0.0)
        slow = tf_gpipe.plan(
            layers, (8, 64), bandwidth=1e4, latency=0.01, **options
        )
        # An activation there and a gradient back.
        cost = 2 * (0.01 + 8 * 64 * 4 / 1e4)
        self.assertAllClose(slow.step_seconds, alone.step_seconds + cost)
        self.assertAllClose(slow.transfer_share, cost / slow.step_seconds)
        self.assertIn("transfers between stages cost", str(slow))
        # More micro-batches hide some of it.
        hidden = tf_gpipe.plan(
            layers,
            (8, 64),
            bandwidth=1e4,
            **{**options, "num_micro_batches": 8},
        )
        self.assertLess(hidden.transfer_share, slow.transfer_share)

    @parameterized.parameters(
        ({"bandwidth": 1e9}, "need `device_flops`"),
        ({"latency": 1e-3}, "need `device_flops`"),
        ({"device_flops": 0}, "`device_flops` must be a positive"),
        ({"device_flops": 0.5}, "`device_flops` must be a positive"),
        ({"device_flops": 1, "bandwidth": 1e-300}, "`bandwidth` must be"),
        ({"device_flops": 1e9, "bandwidth": -1}, "`bandwidth` must be"),
        ({"device_flops": 1e9, "latency": float("nan")}, "`latency` must be"),
    )
    def test_bad_speeds(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            tf_gpipe.plan(
                [keras.layers.Dense(2)] * 2, (4, 2), num_stages=2, **arguments
            )

    @parameterized.parameters(
        ("nonsuch",),
        ("LossScaleOptimizer",),
        ({"class_name": "nonsuch", "config": {}},),
        ({"config": {}},),
        (3,),
        (None,),
    )
    def test_bad_optimizer(self, optimizer):
        with self.assertRaisesRegex(ValueError, "must be a Keras optimizer"):
            tf_gpipe.plan(
                [keras.layers.Dense(2), keras.layers.Dense(2)],
                (4, 2),
                num_stages=2,
                optimizer=optimizer,
            )

    def test_interleaved(self):
        layers = [LAYERS.Dense(8, name=f"d{i}") for i in range(4)]
        found = plan(
            layers,
            (16, 8),
            num_stages=4,
            num_micro_batches=4,
            schedule="interleaved",
            num_devices=2,
        )
        self.assertEqual(found.devices, [0, 1, 0, 1])
        a, b, c, d = found.stages
        for device, (first, last) in enumerate([(a, c), (b, d)]):
            # Activations of two stages need not be at their peaks together.
            activations = found.device_bytes[device] - (
                first.parameter_bytes + last.parameter_bytes
            )
            peaks = first.activation_bytes, last.activation_bytes
            self.assertGreaterEqual(activations, max(peaks))
            self.assertLess(activations, sum(peaks))
        alone = plan(layers, (16, 8), num_stages=4, num_micro_batches=4)
        self.assertEqual(
            alone.device_bytes, [stage.bytes for stage in alone.stages]
        )

    @parameterized.parameters(
        ("1f1b", 1), ("zero_bubble", 2), ("interleaved", 4)
    )
    def test_num_devices_that_cannot_be(self, schedule, num_devices):
        with self.assertRaisesRegex(
            ValueError, "is for schedule='interleaved'"
        ):
            tf_gpipe.plan(
                make_dense(),
                (8, 4),
                num_stages=2,
                num_devices=num_devices,
                schedule=schedule,
            )

    def test_input_specs(self):
        specs = (
            (12, 4),
            [12, 4],
            tf.TensorSpec((12, 4)),
            keras.KerasTensor((12, 4)),
        )
        found = [plan(make_dense(), spec, num_stages=2) for spec in specs]
        self.assertEqual(found, found[:1] * 4)

    def test_sequential(self):
        model = keras.Sequential([keras.Input((4,)), *make_dense()])
        weights = model.get_weights()
        self.assertEqual(
            plan(model, (12, 4), num_stages=2),
            plan(make_dense(), (12, 4), num_stages=2),
        )
        self.assertAllEqual(weights[0], model.get_weights()[0])

    def test_text_and_dict(self):
        found = self.plan(device_memory=10)
        text = str(found)
        self.assertIn("108 parameters; schedule 1f1b of 3", text)
        self.assertIn("does not fit", text)
        self.assertIn(found.advice, " ".join(text.split()))
        self.assertEqual(found.to_dict()["parameters"], 108)
        self.assertFalse(found.to_dict()["fits"])


class ParameterBytesTest(tf.test.TestCase, parameterized.TestCase):
    def assert_as_built(self, make, spec, optimizer, **kwargs):
        """Compares a plan with a model that is built."""
        planned = plan(
            make(), spec, num_stages=2, optimizer=optimizer(), **kwargs
        )
        model = built(make(), spec, optimizer(), **kwargs)
        optimizer = model.optimizer
        weights = model.trainable_variables
        slots_of = {
            id(weight): own
            for weight, own in zip(
                weights, slots.of_optimizer(optimizer, weights), strict=True
            )
        }
        # Each variable of the optimizer is a slot of some weight, but for the
        # steps, the learning rate and the state of the loss scale.
        found = {id(x) for own in slots_of.values() for x in own}
        others = [x for x in optimizer.variables if id(x) not in found]
        self.assertLessEqual(len(others), 6)
        self.assertEqual([x.shape.rank for x in others], [0] * len(others))
        ids = {id(w) for w in model.weights}
        for stage, expected in zip(planned.stages, model.stages, strict=True):
            own = [v for v in expected.owned if id(v) in ids]
            trained = [v for v in own if id(v) in slots_of]
            of_trained = [x for v in trained for x in slots_of[id(v)]]
            # A copy and a gradient of what an earlier stage owns.
            of_trained += 2 * expected.borrowed
            self.assertEqual(stage.parameters, expected.count_params())
            self.assertEqual(
                stage.parameter_bytes, total_bytes(own + trained + of_trained)
            )
            self.assertLen(stage.layers, len(expected.layers))
        return planned

    def test_layers_within_that_are_built_as_they_run(self):
        def make():
            return [
                keras.layers.Dense(n, activation=keras.layers.PReLU())
                for n in (8, 6, 4)
            ]

        planned = self.assert_as_built(make, (4, 8), keras.optimizers.Adam)
        # Kernels, biases, and the slopes of the activations.
        self.assertEqual(
            sum(stage.parameters for stage in planned.stages),
            8 * 8 + 8 * 6 + 6 * 4 + 2 * (8 + 6 + 4),
        )

    def test_layers_that_differ_in_dtype(self):
        layers = [
            keras.layers.Dense(8),
            keras.layers.Dense(8, dtype="float16"),
            keras.layers.Dense(8),
        ]
        found = plan(
            layers, (4, 8), num_stages=3, balance=[1, 1, 1], optimizer="sgd"
        )
        # 72 weights and their gradients.
        self.assertEqual(
            [stage.parameter_bytes for stage in found.stages],
            [72 * 4 * 2, 72 * 2 * 2, 72 * 4 * 2],
        )

    @parameterized.parameters(
        "adam",
        "sgd",
        momentum,
        "adafactor",
        "lion",
        "nadam",
        "rmsprop",
        "ftrl",
        accumulating,
        loss_scaled,
        several,
    )
    @pytest.mark.slow_after(1)
    def test_optimizers(self, optimizer):
        make = lambda: keras.optimizers.get(optimizer)
        if callable(optimizer):
            make = optimizer
        self.assert_as_built(make_mixed, (8, 144), make)

    def test_mixed_float16(self):
        self.addCleanup(
            keras.config.set_dtype_policy, keras.config.dtype_policy()
        )
        keras.config.set_dtype_policy("mixed_float16")
        planned = self.assert_as_built(
            make_mixed, (8, 144), keras.optimizers.Adam
        )
        # Weights stay in float32, but not activations between stages.
        self.assertEqual(planned.stages[0].boundary_bytes % 2, 0)

    @pytest.mark.slow
    def test_dtype_policy(self):
        def make():
            return [
                SelfAttention(2, name="a"),
                LAYERS.Bidirectional(LAYERS.LSTM(8), name="d"),
                LAYERS.Dense(3, name="b"),
                LAYERS.Dense(3, dtype="float16", name="c"),
            ]

        before = keras.config.dtype_policy()
        found = plan(
            make(), (8, 4, 6), num_stages=2, dtype_policy="mixed_bfloat16"
        )
        self.assertEqual(keras.config.dtype_policy(), before)
        self.addCleanup(keras.config.set_dtype_policy, before)
        keras.config.set_dtype_policy("mixed_bfloat16")
        self.assertEqual(found, plan(make(), (8, 4, 6), num_stages=2))
        keras.config.set_dtype_policy("float32")
        plain = plan(make(), (8, 4, 6), num_stages=2)
        self.assertLess(
            found.stages[0].boundary_bytes, plain.stages[0].boundary_bytes
        )

    def test_unknown_dtype_policy(self):
        with self.assertRaisesRegex(ValueError, "mixed_float17"):
            plan(
                [LAYERS.Dense(2)],
                (8, 4),
                num_stages=1,
                dtype_policy="mixed_float17",
            )
        self.assertEqual(keras.config.dtype_policy().name, "float32")

    def test_shape_of_a_tensor(self):
        layers = [LAYERS.Dense(2)]
        self.assertEqual(
            plan(layers, tf.zeros((8, 4)).shape, num_stages=1),
            plan(layers, (8, 4), num_stages=1),
        )

    def test_weights_in_half_precision(self):
        make = lambda: [LAYERS.Dense(8, dtype="float16") for _ in range(2)]
        planned = self.assert_as_built(make, (8, 4), keras.optimizers.SGD)
        self.assertEqual(planned.stages[0].parameter_bytes, 2 * 2 * 40)

    def test_batch_norm(self):
        # Beta and gamma are trained; the moving statistics are not.
        planned = self.assert_as_built(
            lambda: [LAYERS.BatchNormalization() for _ in range(2)],
            (8, 16),
            keras.optimizers.Adam,
        )
        for stage in planned.stages:
            self.assertEqual(stage.parameters, 64)
            self.assertEqual(stage.parameter_bytes, 4 * (2 * 16 * 4 + 2 * 16))

    def test_tied_layer(self):
        def make():
            tied = LAYERS.Dense(8, name="tied")
            return [tied, LAYERS.Dense(8), tied, LAYERS.Dense(8)]

        planned = self.assert_as_built(
            make, (8, 8), keras.optimizers.Adam, balance=[1, 3]
        )
        self.assertEqual([x.parameters for x in planned.stages], [72, 144])

    @parameterized.product(
        build=(False, True), kind=("layer", "weight", "made as it is built")
    )
    def test_layers_that_hold_the_same(self, build, kind):
        """Their weights count once, wherever they are held."""

        def make():
            if kind == "weight":
                first, second = Matrix(), Matrix()
                first.build((None, 8))
                second.matrix = first.matrix
                second.built = True
                return [first, LAYERS.Dense(8), second]
            if kind == "made as it is built":
                return [Late(), LAYERS.Dense(8), Late()]
            held = LAYERS.Dense(8)
            around = [LAYERS.TimeDistributed(held) for _ in range(2)]
            if build:
                around[0].build((None, 3, 8))
            return [*around, LAYERS.Dense(8), held]

        spec = (8, 3, 8) if kind == "layer" else (8, 8)
        count = len(make())
        planned = self.assert_as_built(
            make, spec, keras.optimizers.Adam, balance=[1, count - 1]
        )
        self.assertEqual(
            [x.parameters for x in planned.stages],
            {"layer": [72, 72], "weight": [64, 72]}.get(kind, [72, 144]),
        )

    def test_equal_layers_are_not_one(self):
        planned = self.assert_as_built(
            lambda: [LAYERS.Dense(8) for _ in range(4)],
            (8, 8),
            keras.optimizers.Adam,
        )
        self.assertEqual([x.parameters for x in planned.stages], [144, 144])


class FitsTest(tf.test.TestCase, parameterized.TestCase):
    def advised(self, device_memory, **options):
        """Follows the advice of a plan that does not fit, and returns it."""
        layers = [LAYERS.Dense(32, activation="relu") for _ in range(8)]
        options = {
            "num_stages": 2,
            "device_memory": device_memory,
            "balance": "parameters",
            **options,
        }
        found = plan(layers, (64, 32), **options)
        self.assertFalse(found.fits)
        self.assertIn(found.advice, str(found))
        change = changes(found.advice)
        followed = plan(layers, (64, 32), **{**options, **change})
        self.assertTrue(followed.fits)
        self.assertEmpty(followed.advice)
        return change

    def fullest(self, **options):
        layers = [LAYERS.Dense(32, activation="relu") for _ in range(8)]
        options = {"num_stages": 2, "balance": "parameters", **options}
        found = plan(layers, (64, 32), **options)
        return max(found.device_bytes)

    def test_more_micro_batches(self):
        memory = self.fullest(num_micro_batches=16)
        self.assertEqual(
            self.advised(memory, num_micro_batches=4),
            {"num_micro_batches": 16},
        )
        # Not more than needed.
        self.assertEqual(
            self.advised(memory + 1, num_micro_batches=8),
            {"num_micro_batches": 16},
        )

    def test_remat(self):
        # No micro-batch is smaller than a row.
        memory = self.fullest(num_micro_batches=64)
        change = self.advised(memory, num_micro_batches=64, remat="never")
        self.assertEqual(change, {"remat": "always"})

    def test_micro_batches_and_remat(self):
        memory = self.fullest(num_micro_batches=64)
        change = self.advised(memory, num_micro_batches=32, remat="never")
        self.assertEqual(change, {"num_micro_batches": 64, "remat": "always"})

    def test_more_stages(self):
        weights = 4 * 4 * (32 * 32 + 32)
        change = self.advised(3 * weights, num_micro_batches=64)
        self.assertEqual(set(change) - {"remat"}, {"num_stages"})
        self.assertBetween(change["num_stages"], 3, 8)

    def test_no_more_micro_batches_than_can_be_traced(self):
        # Limits that a test reaches in little time.
        with (
            mock.patch.object(schedules, "MOST_MICRO_BATCHES", 16),
            mock.patch.object(schedules, "_MOST_PASSES", 40),
        ):
            options = {"device_memory": 16, "num_stages": 2}
            found = plan(make_dense(), (64, 4), **options)
            self.assertStartsWith(found.advice, "Nothing that the planner")
            found = plan(make_dense(), (64, 4), num_micro_batches=16, **options)
            self.assertStartsWith(found.advice, "Nothing that the planner")
            layers = [LAYERS.Dense(2) for _ in range(4)]
            found = plan(layers, (64, 2), num_stages=4)
            self.assertEqual(found.num_micro_batches, 10)
            with self.assertRaisesRegex(ValueError, "at most 40 passes"):
                plan(layers, (64, 2), num_stages=4, num_micro_batches=11)

    @parameterized.parameters("1f1b", "gpipe", "interleaved")
    def test_nothing_helps(self, schedule):
        found = plan(
            make_dense(),
            (16, 4),
            num_stages=2,
            schedule=schedule,
            device_memory=16,
        )
        self.assertFalse(found.fits)
        self.assertStartsWith(found.advice, "Nothing that the planner tries")

    def test_schedule_of_ones_own(self):
        schedule = tf_gpipe.Schedule(
            [["F0.0", "B0.0"], ["F1.0", "B1.0"]], name="mine"
        )
        found = plan(
            make_dense(),
            (16, 4),
            num_stages=2,
            num_micro_batches=1,
            schedule=schedule,
            device_memory=16,
        )
        self.assertEqual(found.schedule, "mine")
        self.assertNotEmpty(found.advice)


def two_inputs(nested=list):
    b, a = keras.Input((3,), name="b"), keras.Input((5,), name="a")
    outputs = LAYERS.Dense(2)(LAYERS.Dense(2)(b) + LAYERS.Dense(2)(a))
    return keras.Model([b, a] if nested is list else {"b": b, "a": a}, outputs)


def built_layers():
    model = keras.Sequential([keras.Input((4,)), *make_dense()])
    return list(model.layers)


class InputsTest(tf.test.TestCase, parameterized.TestCase):
    """`input_spec`, compared with the inputs of the model."""

    @parameterized.parameters(list, dict)
    def test_by_name(self, nested):
        model = two_inputs(nested)
        found = [
            plan(model, spec, num_stages=2)
            for spec in (
                {"a": (8, 5), "b": (8, 3)},
                [(8, 3), (8, 5)] if nested is list else [(8, 5), (8, 3)],
            )
        ]
        self.assertEqual(found[0], found[1])
        self.assertEqual(sum(x.parameters for x in found[0].stages), 8 + 12 + 6)

    def test_any_size(self):
        inputs = keras.Input((None, 4), batch_size=2)
        model = keras.Model(inputs, LAYERS.Dense(2)(LAYERS.Dense(3)(inputs)))
        found = plan(model, (8, 6, 4), num_stages=2)
        self.assertEqual(found.stages[0].parameters, 15)

    @parameterized.named_parameters(
        ("functional", two_inputs, [(8, 3), (8, 4)]),
        ("order", two_inputs, [(8, 5), (8, 3)]),
        ("number", two_inputs, [(8, 5)]),
        ("names", two_inputs, {"a": (8, 3), "c": (8, 5)}),
        ("sizes by name", two_inputs, {"a": (8, 3), "b": (8, 5)}),
        (
            "sequential",
            lambda: keras.Sequential([keras.Input((4,)), *make_dense()]),
            (8, 5),
        ),
        (
            "sequential rank",
            lambda: keras.Sequential([keras.Input((4,)), *make_dense()]),
            (8, 4, 4),
        ),
        ("input", lambda: [keras.Input((4,)), *make_dense()], (8, 5)),
        ("layer", lambda: [LAYERS.InputLayer((4,)), *make_dense()], (8, 5)),
    )
    def test_other_inputs(self, make, spec):
        with self.assertRaisesRegex(
            ValueError, "must be like the inputs of the model"
        ):
            plan(make(), spec, num_stages=2)

    def test_built_for_others_but_for_what_runs_build(self):
        layers = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(8, activation=keras.layers.PReLU()),
                keras.layers.Dense(2),
            ]
        ).layers
        with self.assertRaisesRegex(ValueError, "is built for other inputs"):
            plan(layers, (4, 16), num_stages=2)

    def test_built_for_others(self):
        layers = built_layers()
        self.assertLen(plan(layers, (8, 4), num_stages=2).stages, 2)
        with self.assertRaisesRegex(
            ValueError, r"Layer 'a' is built for other inputs.*\(4, 8\)"
        ):
            plan(layers, (8, 5), num_stages=2)

    @parameterized.named_parameters(
        ("functional", two_inputs),
        ("layers", lambda: [LAYERS.Add(), LAYERS.Dense(2)]),
    )
    def test_one_batch_size(self, make):
        with self.assertRaisesRegex(ValueError, "the same batch size"):
            plan(make(), [(8, 3), (4, 5)], num_stages=1)

    @parameterized.named_parameters(
        ("dataset", lambda: tf.data.Dataset.from_tensors((8, 4)).repeat()),
        ("generator", lambda: iter(int, 1)),
        ("range", lambda: range(2, 4)),
        ("text", lambda: "84"),
        ("number", lambda: 3.5),
        ("none", lambda: None),
    )
    def test_no_shape(self, make):
        for given in (make(), [make(), (8, 4)]):
            with self.assertRaisesRegex(TypeError, "`input_spec` must be a sh"):
                plan(make_dense(), given, num_stages=2)


class OwnCallsTest(tf.test.TestCase, parameterized.TestCase):
    """Models of which no pipeline can be made have no plan."""

    FUNCTIONS = (
        lambda model: plan(model, (8, 4), num_stages=2),
        lambda model: tf_gpipe.tune(model, (8, 4), 2, budget_seconds=0),
    )

    @parameterized.product(
        base=(keras.Model, keras.Sequential),
        name=("call", "__call__", "_run_through_graph"),
    )
    def test_methods(self, base, name):
        def method(self, *args, **kwargs):
            return getattr(super(type(self), self), name)(*args, **kwargs)

        inputs = keras.Input((4,))
        outputs = LAYERS.Dense(2)(LAYERS.Dense(3)(inputs))
        layers = keras.Model(inputs, outputs).layers
        cls = type("Own", (base,), {name: method})
        model = (
            cls(inputs, outputs) if base is keras.Model else cls([*layers[1:]])
        )
        for function in self.FUNCTIONS:
            with self.assertRaisesRegex(TypeError, f"Own overrides `{name}`"):
                function(model)

    def test_activity_regularizer(self):
        model = two_inputs(list)
        model.activity_regularizer = keras.regularizers.L2(0.1)
        for function in self.FUNCTIONS:
            with self.assertRaisesRegex(ValueError, "`activity_regularizer`"):
                function(model)

    def test_a_layer_of_a_list(self):
        """One layer, as in a pipeline."""

        class Own(keras.Sequential):
            def call(self, x, training=None):
                return 2 * super().call(x)

        layers = [Own(make_dense()), LAYERS.Dense(2)]
        self.assertLen(plan(layers, (8, 4), num_stages=2).stages, 2)

    def test_pipelines(self):
        class Mine(tf_gpipe.PipelinedModel):
            def train_step(self, data):
                return super().train_step(data)

        inputs = keras.Input((4,))
        outputs = LAYERS.Dense(2)(LAYERS.Dense(3)(inputs))
        model = Mine(inputs, outputs, num_stages=1)
        self.assertLen(plan(model, (8, 4), num_stages=2).stages, 2)


class CostsTest(tf.test.TestCase, parameterized.TestCase):
    """A cost function is asked with the layers that a model would give it."""

    @parameterized.named_parameters(
        ("name", lambda x, _: {"a": 9, "c": 5}.get(x.name, 1), False),
        ("name of built", lambda x, _: {"a": 9}.get(x.name, 1), True),
        ("weights", lambda x, shape: x.count_params() * shape[-1], False),
        ("own attribute", lambda x, _: getattr(x, "cost", 1), True),
        ("other operations", lambda x, _: 9 if x.name == "b_relu" else 1, True),
    )
    def test_as_in_a_model(self, cost, built):
        layers = [LAYERS.Dense(8, name=x) for x in "abcdef"]
        layers[3].cost = 12
        layers += [LAYERS.ReLU(name=f"{x}_relu") for x in "ab"]
        layers.append(layers[0])
        if built:
            keras.Sequential([keras.Input((8,)), *layers[:-1]])
        found = plan(layers, (8, 8), num_stages=3, balance=cost)
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((8,)), *layers], num_stages=3, balance=cost
        )
        self.assertEqual(found.arguments["balance"], model.balance)

    def test_names_in_errors(self):
        layers = [LAYERS.Dense(8, name=x) for x in "abc"]
        with self.assertRaisesRegex(ValueError, "-1 for layer 'b'"):
            plan(
                layers,
                (8, 8),
                num_stages=2,
                balance=lambda x, _: -1 if x.name == "b" else 1,
            )

    def test_layers_called_again(self):
        shared = LAYERS.Dense(8)
        x = inputs = keras.Input((8,))
        for layer in (shared, LAYERS.Dense(8), shared):
            x = layer(x)
        asked = []

        def cost(layer, shape):
            asked.append(layer)
            return 1

        found = plan(keras.Model(inputs, x), (8, 8), num_stages=3, balance=cost)
        self.assertIs(asked[0], shared)
        self.assertIs(asked[2], shared)
        self.assertEqual([x.parameters for x in found.stages], [72, 72, 0])


class ErrorsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"layers": []}, "needs layers"),
        ({"layers": [keras.Input((4,))]}, "needs layers"),
        ({"input_spec": (None, 4)}, "must give all sizes"),
        ({"input_spec": keras.KerasTensor((None, 4))}, "must give all sizes"),
        ({"input_spec": ()}, "must give all sizes"),
        ({"balance": "time"}, "measures nothing, as balance='time'"),
        ({"balance": "speed"}, "Received: balance='speed'"),
        ({"balance": [1, 1]}, "its counts must sum to 3"),
        ({"balance": [1, 1, 1]}, "2 "),
        ({"balance": [0, 3]}, "`balance` must be a list of positive"),
        ({"balance": [4, -1]}, "`balance` must be a list of positive"),
        ({"balance": 3}, "Received: balance=3"),
        ({"remat": "sometimes"}, "Received: remat='sometimes'"),
        ({"schedule": "zigzag"}, "zigzag"),
        ({"num_stages": 4}, "num_stages=4, 3 layers"),
        ({"num_stages": 0}, "num_stages"),
        ({"num_micro_batches": 0}, "num_micro_batches"),
        ({"optimizer": "x"}, "be a Keras optimizer.*optimizer=.x."),
        ({"device_memory": -1}, "`device_memory`.*Received: device_memory=-1"),
        ({"device_memory": 0}, "`device_memory`.*Received: device_memory=0"),
        ({"device_memory": "16 apples"}, "'16GB'.*='16 apples'"),
        ({"device_memory": "-1GB"}, "'16GB'.*='-1GB'"),
        ({"device_memory": float("nan")}, "`device_memory`.*nan"),
    )
    def test_refuses(self, options, message):
        arguments = {
            "layers": make_dense(),
            "input_spec": (16, 4),
            "num_stages": 2,
            **options,
        }
        with self.assertRaisesRegex(ValueError, message):
            plan(**arguments)

    @parameterized.parameters([[1]], True, 1j)
    def test_no_size(self, size):
        with self.assertRaisesRegex(TypeError, "`device_memory`.*'16GB'"):
            plan(make_dense(), (16, 4), num_stages=2, device_memory=size)

    @parameterized.parameters(
        ("16GB", 16 * 10**9),
        ("2 KiB", 2048),
        ("3b", 3),
        (5e3, 5000),
        ("2e3KB", 2000000),
    )
    def test_sizes(self, size, number):
        found = plan(make_dense(), (16, 4), num_stages=2, device_memory=size)
        self.assertEqual(found.device_memory, number)


class Uncopied(LAYERS.Dense):
    """A layer whose `from_config` does not take what `get_config` returns."""

    def get_config(self):
        return {**super().get_config(), "input_size": 4}


class UncopiedLayersTest(tf.test.TestCase, parameterized.TestCase):
    def planned(self, model, **options):
        return plan(
            model, (8, 4), num_stages=2, num_micro_batches=2, **options
        ).to_dict()

    def test_built(self):
        plans = []
        for cls in (Uncopied, LAYERS.Dense):
            x = keras.Input((4,))
            y = cls(6, name="a")(x)
            model = keras.Model(x, LAYERS.Dense(2, name="b")(y))
            weights = model.get_weights()
            plans.append(self.planned(model))
            self.assertAllEqual(model.get_weights()[0], weights[0])
        self.assertEqual(*plans)

    @parameterized.parameters(False, True)
    def test_refused(self, built):
        layers = [Uncopied(6, name="odd"), LAYERS.Dense(2)]
        options = {}
        if built:
            layers = keras.Sequential([keras.Input((4,)), *layers])
            options = {"dtype_policy": "float64"}
        with self.assertRaisesRegex(
            ValueError, "Layer 'odd' .*Uncopied.*cannot be copied"
        ):
            self.planned(layers, **options)


class NothingAllocatedTest(tf.test.TestCase):
    def test_layers_stay_unbuilt(self):
        layers = make_mixed()
        before = [layer.built for layer in layers]
        drawn = random.getstate()
        plan(layers, (8, 144), num_stages=2)
        self.assertEqual([layer.built for layer in layers], before)
        self.assertFalse(any(layer.weights for layer in layers))
        # Layers made afterwards get the values that they would have got.
        self.assertEqual(random.getstate(), drawn)
        outputs = keras.Sequential(layers)(tf.ones((2, 144)))
        self.assertEqual(outputs.shape, (2, 3))

    @pytest.mark.slow
    def test_84_billion_parameters(self):
        width, inner, num_blocks = 2048, 8192, 1663
        layers = make_blocks(num_blocks, 16, inner)
        start = time.perf_counter()
        found = plan(
            layers,
            (32, 1024, width),
            num_stages=128,
            num_micro_batches=32,
            device_memory=80 * 10**9,
        )
        self.assertLess(time.perf_counter() - start, 60)
        attention = 4 * (width * width + width)
        ffn = 2 * width * inner + inner + width
        parameters = num_blocks * (attention + ffn + 2 * 2 * width)
        self.assertBetween(parameters, 83e9, 85e9)
        self.assertEqual(sum(x.parameters for x in found.stages), parameters)
        self.assertEqual(
            sum(x.parameter_bytes for x in found.stages), 16 * parameters
        )

    def test_layers_are_looked_at_once_for_any_number_of_stages(self):
        looks = []

        class Looked(LAYERS.Dense):
            def get_config(self):
                looks.append(self.name)
                return super().get_config()

        found = {}
        for memory in (10**9, 60_000):
            looks.clear()
            layers = [Looked(32) for _ in range(12)]
            found[memory] = plan(
                layers,
                (2, 32),
                num_stages=2,
                num_micro_batches=2,
                device_memory=memory,
            )
            found[memory, "looks"] = len(looks)
        self.assertTrue(found[10**9].fits)
        self.assertIn("It would fit with num_stages=", found[60_000].advice)
        self.assertEqual(found[60_000, "looks"], found[10**9, "looks"])


if __name__ == "__main__":
    tf.test.main()
