"""Frozen layers in which some layers or weights are trained."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison

DEVICES = ["CPU:0", "CPU:1"]


def numbers(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape, dtype="float32")


class Block(L.Layer):
    """Two layers, and a weight of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.a, self.b = L.Dense(4, activation="tanh"), L.Dense(4)

    def build(self, shape):
        self.a.build(shape)
        self.b.build(shape)
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        return x + self.scale * self.b(self.a(x))


class Outer(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = Block()

    def build(self, shape):
        self.block.build(shape)

    def call(self, x):
        return self.block(x)


def sublayer(layers):
    layers[0].trainable = False
    layers[0].block.a.trainable = True


def two_levels(layers):
    for layer in layers:
        layer.trainable = False
    layers[0].block.trainable = True
    layers[0].block.b.trainable = False
    layers[1].block.b.trainable = True


def single_weight(layers):
    layers[0].trainable = False
    layers[0].block.b.kernel.trainable = True
    layers[1].trainable = False
    layers[1].block.scale.trainable = True


def low_rank(layers):
    """Freezes layers as KerasHub's `Backbone.enable_lora` does."""
    for layer in layers:
        layer.trainable = False
        layer.block.a.trainable = True
        layer.block.a.enable_lora(2)


def frozen_weight(layers):
    layers[1].block.a.kernel.trainable = False


# What `Told` layers have been differentiated.
_TOLD = []


class Told(L.Dense):
    """Tells when a gradient passes it."""

    def call(self, x):
        @tf.custom_gradient
        def telling(x):
            def gradient(arrived):
                _TOLD.append(self.name)
                return tf.identity(arrived)

            return tf.identity(x), gradient

        return telling(super().call(x))


CHANGES = (sublayer, two_levels, single_weight, low_rank, frozen_weight)


def make(kind="functional"):
    """Returns a model and its `Outer` layers; "shared" calls one twice."""
    keras.utils.set_random_seed(1)
    layers = [Outer(name="first"), Outer(name="second")]
    if kind == "sequential":
        return keras.Sequential(
            [keras.Input((4,)), *layers, L.Dense(2)]
        ), layers
    x = inputs = keras.Input((4,))
    if kind == "nested":
        inner = keras.Model(inputs, layers[1](layers[0](inputs)))
        outer = keras.Input((4,))
        return keras.Model(outer, L.Dense(2)(L.Dense(4)(inner(outer)))), [
            *layers,
            inner,
        ]
    for layer in [*layers, layers[0]] if kind == "shared" else layers:
        x = layer(x)
    return keras.Model(inputs, L.Dense(2)(x)), layers


def pipelined(model, **kwargs):
    kwargs = {
        "num_stages": 2,
        "num_micro_batches": 2,
        "devices": DEVICES,
        **kwargs,
    }
    if isinstance(model, keras.Sequential):
        return tf_gpipe.PipelinedSequential(model, **kwargs)
    return tf_gpipe.PipelinedModel.from_model(model, **kwargs)


class FrozenLayersTest(tf.test.TestCase, parameterized.TestCase):
    def compare(self, change, kind, when="before", eager=False, **kwargs):
        x, y = numbers(6, 4), numbers(6, 2, seed=1)
        found = []
        for plain in (True, False):
            model, layers = make(kind)
            if when == "before":
                change(layers)
            if not plain:
                model = pipelined(model, **kwargs)
            if when == "between":
                change(layers)
            model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=eager)
            if when == "after":
                model.train_on_batch(x, y)
                change(layers)
                model.compile(
                    keras.optimizers.Adam(0.01), "mse", run_eagerly=eager
                )
            before = [np.array(v) for v in model.trainable_variables]
            logs = [
                model.train_on_batch(x, y, return_dict=True) for _ in range(2)
            ]
            for a, b in zip(before, model.trainable_variables, strict=True):
                self.assertNotAllEqual(a, b)
            found.append((model, logs))
        comparison.assert_same(self, *found)

    @parameterized.parameters(*CHANGES)
    @pytest.mark.slow_after(1)
    def test_trains(self, change):
        self.compare(change, "functional")

    @parameterized.parameters("gpipe", "zero_bubble")
    def test_schedules(self, schedule):
        self.compare(two_levels, "functional", schedule=schedule)

    @parameterized.product(
        kind=("sequential", "shared", "nested"), remat=("always", "never")
    )
    @pytest.mark.slow_after(1)
    def test_kinds_of_models(self, kind, remat):
        self.compare(single_weight, kind, remat=remat)

    @parameterized.product(
        change=(sublayer, low_rank), when=("between", "after")
    )
    @pytest.mark.slow_after(1)
    def test_changed_later(self, change, when):
        self.compare(change, "functional", when)

    @parameterized.parameters("1f1b", "gpipe")
    def test_eagerly(self, schedule):
        self.compare(single_weight, "shared", eager=True, schedule=schedule)

    def test_nothing_is_trained(self):
        """As in Keras, a warning says so, and metrics are computed."""
        x, y = numbers(8, 4), numbers(8, 1, seed=1)
        plain = keras.Sequential([keras.Input((4,)), L.Dense(3), L.Dense(1)])
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), L.Dense(3), L.Dense(1)],
            num_stages=2,
            devices=DEVICES,
        )
        model.set_weights(plain.get_weights())
        logs = []
        for each in (plain, model):
            each.trainable = False
            each.compile("sgd", "mse", metrics=["mae"])
            with self.assertWarnsRegex(UserWarning, "not have any trainable"):
                logs.append(each.fit(x, y, verbose=0).history)
        self.assertAllClose(*logs)

    @parameterized.parameters("functional", "sequential")
    @pytest.mark.filterwarnings("ignore:The model does not have any trainable")
    def test_model_that_is_frozen_itself(self, kind):
        """Keras trains no weight of a frozen model, whatever is in it."""
        for change in ("before", "after"):
            model, layers = make(kind)
            plain, others = make(kind)
            found = [(plain, plain, others)]
            if change == "before":
                model.trainable = False
                layers[0].block.trainable = True
            piped = pipelined(model)
            if change == "after":
                piped.trainable = False
                layers[0].block.trainable = True
            plain.trainable = False
            others[0].block.trainable = True
            found.append((piped, model, layers))
            self.assertLen(
                piped.trainable_variables, len(plain.trainable_variables)
            )
            before = piped.get_weights()
            piped.compile("sgd", "mse")
            piped.fit(numbers(4, 4), numbers(4, 2), verbose=0)
            for a, b in zip(before, piped.get_weights(), strict=True):
                self.assertAllEqual(a, b)

    @parameterized.product(
        kind=("functional", "shared"), compiled=(True, False)
    )
    def test_under_a_tape(self, kind, compiled):
        x = tf.constant(numbers(6, 4))
        found = []
        for plain in (True, False):
            model, layers = make(kind)
            single_weight(layers)
            if not plain:
                model = pipelined(model)

            def gradients(model=model):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(x, training=True) ** 2)
                return tape.gradient(loss, model.trainable_variables)

            found.append(tf.function(gradients)() if compiled else gradients())
        self.assertNotEmpty(found[0])
        for a, b in zip(*found, strict=True):
            self.assertAllClose(a, b, rtol=2e-5, atol=2e-6)

    def test_weight_that_tapes_do_not_follow(self):
        """Keras has no gradient of a weight created as not trainable."""
        x, y = numbers(6, 4), numbers(6, 2, seed=1)
        found = []
        for plain in (True, False):
            model, _ = make()
            norm = L.BatchNormalization()
            model = keras.Model(model.input, norm(model.output))
            norm.moving_mean.trainable = True
            if not plain:
                model = pipelined(model, num_micro_batches=1)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            logs = [model.train_on_batch(x, y, return_dict=True)]
            found.append((model, logs))
        comparison.assert_same(self, *found)

    @parameterized.parameters(True, False)
    def test_weights_of_no_stage(self, eager):
        class Weighted:
            def prepare(self):
                self.weight = self.add_weight(shape=(2,), initializer="ones")
                self.head = L.Dense(1)
                self.head.build((None, 2))

            def compute_loss(
                self, x=None, y=None, y_pred=None, sample_weight=None
            ):
                loss = ops.mean(self.weight * (y - y_pred) ** 2)
                return loss + ops.mean(self.head(y_pred) ** 2)

        class Plain(Weighted, keras.Model):
            pass

        class Piped(Weighted, tf_gpipe.PipelinedModel):
            pass

        x, y = numbers(6, 4), numbers(6, 2, seed=1)
        found = []
        for cls, kwargs in (
            (Plain, {}),
            (
                Piped,
                {
                    "num_stages": 2,
                    "num_micro_batches": 2,
                    "schedule": "gpipe",
                    "devices": DEVICES,
                },
            ),
        ):
            model, layers = make()
            sublayer(layers)
            model = cls(model.input, model.output, **kwargs)
            model.prepare()
            # What plain Keras compiles may read these weights after the update:
            # one step in ten has another loss.
            model.compile(
                keras.optimizers.Adam(0.01), run_eagerly=eager or cls is Plain
            )
            logs = [
                model.train_on_batch(x, y, return_dict=True) for _ in range(2)
            ]
            self.assertNotAllEqual(model.weight, np.ones(2))
            found.append((model, logs))
        comparison.assert_same(self, *found)

    @pairwise.product(
        schedule=("1f1b", "gpipe", "zero_bubble", "interleaved"),
        remat=("always", "never"),
        eager=(False, True),
    )
    @pytest.mark.slow_after(2)
    def test_no_gradient_passes_what_is_frozen(self, schedule, remat, eager):
        """As deep as the first weight that is trained, whatever the cut."""
        x, y = numbers(6, 4), numbers(6, 2, seed=1)
        found = []
        for plain in (True, False):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((4,))
            frozen = Told(4, "tanh", name="a", trainable=False)(inputs)
            frozen = L.BatchNormalization(trainable=False)(frozen)
            frozen = Told(4, "tanh", name="b", trainable=False)(frozen)
            frozen = Told(4, "tanh", name="c", trainable=False)(frozen)
            trained = Told(4, "tanh", name="d")(frozen)
            # Frozen after what is trained, and beside it.
            later = Told(4, "tanh", name="e", trainable=False)(trained)
            skip = Told(4, "softmax", name="f", trainable=False)(frozen)
            model = keras.Model(
                inputs, [L.Dense(2, name="g")(L.Add()([later, skip])), skip]
            )
            if not plain:
                model = pipelined(
                    model,
                    num_stages=4,
                    balance=[2, 2, 3, 2],
                    devices=DEVICES * 2,
                    schedule=schedule,
                    remat=remat,
                )
            model.compile(
                keras.optimizers.Adam(0.01),
                ["mse", "categorical_crossentropy"],
                run_eagerly=eager,
            )
            _TOLD.clear()
            logs = [
                model.train_on_batch(x, [y, abs(x)], return_dict=True)
                for _ in range(2)
            ]
            found.append((model, logs))
        self.assertEqual({*_TOLD}, {"d", "e"})
        comparison.assert_same(self, *found)

    def test_gradients_after_a_layer_is_not_frozen_any_more(self):
        found = []
        for plain in (True, False):
            keras.utils.set_random_seed(1)
            layers = [Told(4, "tanh", trainable=False) for _ in range(3)]
            model = keras.Sequential([keras.Input((4,)), *layers, L.Dense(2)])
            if not plain:
                model = pipelined(model)
            logs = []
            for frozen in (True, False, True):
                layers[0].trainable = not frozen
                model.compile(keras.optimizers.Adam(0.01), "mse")
                _TOLD.clear()
                logs.append(
                    model.train_on_batch(
                        numbers(6, 4), numbers(6, 2, seed=1), return_dict=True
                    )
                )
                if not plain:
                    self.assertEqual(not _TOLD, frozen)
            found.append((model, logs))
        comparison.assert_same(self, *found)

    @parameterized.product(
        steps_per_execution=(1, 2), schedule=("1f1b", "gpipe")
    )
    @pytest.mark.slow_after(2)
    def test_steps_that_freeze_layers_in_turn(
        self, steps_per_execution, schedule
    ):
        """As of two players; Keras freezes layers as it traces the step."""

        def step(model, data):
            x, y = data
            for own, other in ((0, 1), (1, 0)):
                model.layers[own].trainable = True
                model.layers[other].trainable = False
                weights = model.trainable_variables
                if isinstance(model, tf_gpipe.PipelinedSequential):
                    loss, gradients, _ = model.loss_and_gradients(x, y)
                else:
                    with tf.GradientTape() as tape:
                        loss = model.compute_loss(x, y, model(x, training=True))
                    gradients = tape.gradient(loss, weights)
                for v, gradient in zip(weights, gradients, strict=True):
                    v.assign_sub(0.1 * gradient)
            model.layers[0].trainable = True
            return {"loss": loss}

        found = []
        for cls, kwargs in (
            (keras.Sequential, {}),
            (
                tf_gpipe.PipelinedSequential,
                {
                    "num_stages": 2,
                    "num_micro_batches": 2,
                    "devices": DEVICES,
                    "schedule": schedule,
                },
            ),
        ):
            keras.utils.set_random_seed(1)
            kind = type("Alternating", (cls,), {"train_step": step})
            model = kind(
                [keras.Input((4,)), L.Dense(4, "tanh"), L.Dense(2)], **kwargs
            )
            model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
            model.fit(
                numbers(16, 4),
                numbers(16, 2, seed=1),
                batch_size=4,
                shuffle=False,
                verbose=0,
            )
            found.append(model.get_weights())
        for a, b in zip(*found, strict=True):
            self.assertAllClose(a, b)

    def test_a_weight_that_a_layer_reads_of_another(self):
        """A stage with a trained weight may have any part in its values."""
        found = []
        for plain in (True, False):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((4,))
            dense = L.Dense(4, use_bias=False)
            made = dense(inputs)
            also = L.Lambda(
                lambda x, dense=dense: ops.matmul(x, dense.kernel) ** 2
            )(inputs)
            model = keras.Model(
                inputs, L.Dense(2, trainable=False)(L.Add()([made, also]))
            )
            if not plain:
                model = pipelined(model, balance=[2, 2])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            logs = [
                model.train_on_batch(
                    numbers(6, 4), numbers(6, 2, seed=1), return_dict=True
                )
            ]
            found.append((model, logs))
        comparison.assert_same(self, *found)

    @parameterized.parameters(
        (sublayer, True),
        (sublayer, False),
        (two_levels, False),
        (single_weight, True),
    )
    def test_planned(self, change, built):
        """The planner counts gradients of trained weights only."""
        model, layers = make()
        change(layers)
        trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
        total = model.count_params()
        given = model
        if not built:
            given = [Outer(), Outer(), L.Dense(2)]
            change(given[:2])
        found = tf_gpipe.plan(
            given, (8, 4), num_stages=2, optimizer=keras.optimizers.SGD()
        )
        # A weight, and the sum of its gradients if it is trained.
        self.assertEqual(
            sum(stage.parameter_bytes for stage in found.stages),
            4 * (total + trained),
        )

    @parameterized.product(
        schedule=("1f1b", "gpipe", "zero_bubble", "auto"),
        remat=("never", "always"),
    )
    @pytest.mark.slow_after(2)
    def test_planned_without_backward_passes(self, schedule, remat):
        """Before what is trained nothing is kept, or computed again."""

        def planned(trained):
            layers = [L.Dense(64, "gelu") for _ in range(8)]
            for layer in layers[: 8 - trained]:
                layer.trainable = False
            return tf_gpipe.plan(
                layers,
                (64, 64),
                num_stages=4,
                balance=[2] * 4,
                num_micro_batches=4,
                optimizer="sgd",
                schedule=schedule,
                remat=remat,
            )

        whole, some, none = planned(8), planned(3), planned(0)
        # The third stage has a frozen layer, and a trained one.
        for frozen, trained in zip(
            (some.stages[0], some.stages[1], *none.stages),
            (whole.stages[0], whole.stages[1], *whole.stages),
            strict=True,
        ):
            self.assertEqual(frozen.flops, trained.flops)
            self.assertEqual(frozen.backward_flops, 0)
            self.assertEqual(frozen.recomputed, [])
            self.assertLess(frozen.activation_bytes, trained.activation_bytes)
        self.assertEqual(
            some.stages[2].backward_flops, whole.stages[2].backward_flops / 2
        )
        self.assertEqual(
            some.stages[3].backward_flops, whole.stages[3].backward_flops
        )

    def test_tuned_by_the_passes_that_there_are(self):
        """Frozen layers take a third of the time of trained ones."""

        def cut(frozen):
            layers = [L.Dense(256) for _ in range(12)]
            for layer in layers[:frozen]:
                layer.trainable = False
            return tf_gpipe.tune(
                layers,
                (4096, 256),
                2,
                budget_seconds=0,
                num_stages=2,
                remat="never",
                schedule="1f1b",
                device_flops=1e9,
            ).arguments["balance"]

        self.assertEqual(cut(0), [6, 6])
        self.assertEqual(cut(6), [8, 4])


if __name__ == "__main__":
    tf.test.main()
