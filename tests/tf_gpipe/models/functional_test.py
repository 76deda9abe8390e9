"""`PipelinedModel`: graphs with skips, several inputs and outputs."""

import collections
import pathlib

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
from tests.tf_gpipe.step.executed_graph import executed_graph

GRID = {
    "num_micro_batches": (1, 4),
    "schedule": ("gpipe", "1f1b"),
    "remat": ("always", "except_last", "never"),
}


def numbers(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape, dtype="float32")


def two_by_two():
    """Two inputs, two outputs, one of them from the middle."""
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    left = L.Dense(8, activation="relu", kernel_regularizer="l2")(a)
    right = L.Dense(8, activation="tanh", activity_regularizer="l2")(b)
    middle = L.Add()([left, right])
    early = L.Dense(1, name="early")(middle)
    deep = L.LayerNormalization()(L.Dense(8)(middle))
    late = L.Dense(3, name="late")(L.Concatenate()([deep, left, b]))
    return keras.Model({"a": a, "b": b}, {"late": late, "early": early})


def two_by_two_data(rows):
    return [
        (
            {"a": numbers(rows, 6), "b": numbers(rows, 4, seed=1)},
            {
                "late": np.arange(rows) % 3,
                "early": numbers(rows, 1, seed=2),
            },
            {
                "late": np.linspace(0, 2, rows, dtype="float32"),
                "early": np.linspace(1, 2, rows, dtype="float32"),
            },
        )
    ]


TWO_LOSSES = {
    "loss": {
        "late": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "early": "mse",
    },
    "loss_weights": {"late": 1.0, "early": 0.3},
}


def unet(normalize=False):
    """Two levels of a U-Net on images of 8 x 8."""

    def convolve(x, filters):
        x = L.Conv2D(filters, 3, padding="same")(x)
        if normalize:
            x = L.BatchNormalization()(x)
        return L.ReLU()(x)

    x = image = keras.Input((8, 8, 2))
    skips = []
    for filters in (4, 8):
        x = convolve(x, filters)
        skips.append(x)
        x = L.MaxPooling2D()(x)
    x = convolve(x, 8)
    for filters in (8, 4):
        x = L.Conv2DTranspose(filters, 2, strides=2)(x)
        x = convolve(L.Concatenate()([x, skips.pop()]), filters)
    return keras.Model(image, L.Conv2D(1, 1)(x))


def shared():
    """A layer whose calls fall into different stages."""
    x = inputs = keras.Input((6,))
    layer = L.Dense(6, activation="tanh", activity_regularizer="l2")
    for _ in range(2):
        x = L.Dense(6)(layer(x))
    return keras.Model(inputs, layer(x))


def long_skip():
    x = inputs = keras.Input((6,))
    x = first = L.Dense(6, activation="relu")(x)
    for _ in range(4):
        x = L.Dense(6, activation="relu")(x)
    return keras.Model(inputs, L.Dense(2)(L.Add()([x, first, inputs])))


class Block(L.Layer):
    """A layer whose `call` has no `training` argument."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = L.BatchNormalization()
        self.drop = L.Dropout(0.5)

    def build(self, input_shape):
        self.norm.build(input_shape)

    def call(self, x):
        return self.drop(self.norm(x))


class FunctionalTest(tf.test.TestCase, parameterized.TestCase):
    def compare(
        self,
        make,
        data,
        loss="mse",
        loss_weights=None,
        optimizer=None,
        **kwargs,
    ):
        common = {
            "loss": loss,
            "loss_weights": loss_weights,
            "optimizer": optimizer,
        }
        plain = comparison.train_plain(make, data, **common)
        pipelined = comparison.train(make, data, **common, **kwargs)
        comparison.assert_same(self, plain, pipelined)
        return pipelined[0]

    @pairwise.product(**GRID, num_stages=(1, 2, 4), rows=(8, 7))
    @pytest.mark.slow_after(1)
    def test_two_inputs_two_outputs(self, rows, **kwargs):
        self.compare(two_by_two, two_by_two_data(rows), **TWO_LOSSES, **kwargs)

    @pairwise.product(**GRID, num_stages=(2, 4))
    @pytest.mark.slow_after(1)
    def test_shared_layer(self, **kwargs):
        data = [(numbers(7, 6), numbers(7, 6, seed=1))]
        model = self.compare(shared, data, **kwargs)
        users = [s for s in model.stages if model.layers[1] in s.layers]
        self.assertGreater(len(users), 1)

    @pairwise.product(**GRID)
    @pytest.mark.slow_after(1)
    def test_skip_over_three_stages(self, **kwargs):
        data = [(numbers(8, 6), numbers(8, 2, seed=1))]
        model = self.compare(long_skip, data, num_stages=5, **kwargs)
        first, *between, last = model.stages
        (skip,) = set(first.outputs) & set(last.inputs)
        for stage in between:
            self.assertNotIn(skip, stage.outputs)
        self.assertIn(model._pipeline.graph.inputs[0], last.inputs)

    @pairwise.product(
        num_micro_batches=(2, 4),
        schedule=("gpipe", "1f1b"),
        remat=("always", "never"),
        num_stages=(4,),
    )
    @pytest.mark.slow
    def test_unet(self, **kwargs):
        data = [(numbers(4, 8, 8, 2), numbers(4, 8, 8, 1, seed=1))]
        self.compare(unet, data, **kwargs)

    @parameterized.product(
        schedule=("gpipe", "1f1b"), remat=("always", "never")
    )
    @pytest.mark.slow
    def test_unet_with_batch_normalization(self, **kwargs):
        data = [(numbers(4, 8, 8, 2), numbers(4, 8, 8, 1, seed=1))]
        self.compare(
            lambda: unet(normalize=True),
            data,
            num_stages=4,
            num_micro_batches=1,
            **kwargs,
        )

    @pairwise.product(
        make=(long_skip, shared), remat=("always", "never"), rows=(8, 5)
    )
    @pytest.mark.slow
    def test_interleaved(self, make, remat, rows):
        width = make().output_shape[-1]
        self.compare(
            make,
            [(numbers(rows, 6), numbers(rows, width, seed=1))],
            num_stages=4,
            num_micro_batches=4,
            schedule="interleaved",
            remat=remat,
            devices=["CPU:0", "CPU:1"],
        )

    @parameterized.parameters(
        (keras.applications.ResNet50, 4), (keras.applications.MobileNetV2, 4)
    )
    @pytest.mark.slow
    def test_applications(self, make, num_stages):
        def small():
            return make(
                weights=None,
                input_shape=(32, 32, 3),
                classes=5,
                classifier_activation=None,
            )

        self.compare_outputs(small(), numbers(2, 32, 32, 3), num_stages)
        # Some fifty normalisations of small batches amplify rounding.
        self.addCleanup(
            keras.config.set_dtype_policy, keras.config.dtype_policy()
        )
        keras.config.set_dtype_policy("float64")
        keras.utils.set_random_seed(0)
        plain = small()
        keras.utils.set_random_seed(0)
        model = tf_gpipe.PipelinedModel.from_model(
            small(), num_stages=num_stages, num_micro_batches=1
        )
        x, y = numbers(4, 32, 32, 3), np.arange(4)
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, dtype="float64"
        )
        for each in (plain, model):
            # Tracing the plain model takes longer than its only step.
            each.compile("sgd", loss, run_eagerly=each is plain)
        self.assertAllClose(
            plain.train_on_batch(x, y), model.train_on_batch(x, y)
        )
        for a, b in zip(plain.variables, model.variables, strict=True):
            self.assertAllClose(a, b, rtol=1e-6, atol=1e-6, msg=a.path)

    def compare_outputs(self, plain, x, num_stages):
        expected = plain(x)
        model = tf_gpipe.PipelinedModel.from_model(
            plain, num_stages=num_stages, num_micro_batches=2
        )
        self.assertAllClose(model(x), expected, rtol=1e-4, atol=1e-5)
        self.assertAllClose(
            model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5
        )

    @pytest.mark.slow
    def test_operations_arguments_and_masks(self):
        def make():
            tokens = keras.Input((5,), dtype="int32", name="tokens")
            scale = keras.Input((1,), name="scale")
            x = L.Embedding(9, 4, mask_zero=True)(tokens)
            h = x * scale[:, None] + ops.mean(x, axis=1, keepdims=True)
            causal = ops.ones((1, 5, 5), "bool")
            h = L.MultiHeadAttention(2, 2)(
                h, value=x, attention_mask=causal, use_causal_mask=True
            )
            inner = keras.Sequential(
                [L.Dense(6, activation="relu"), L.Dense(4)]
            )
            h, state = L.GRU(4, return_state=True)(inner(h), mask=tokens > 0)
            both = L.Concatenate()([h, state, L.GlobalAveragePooling1D()(x)])
            return keras.Model([tokens, scale], L.Dense(2)(both))

        generator = np.random.default_rng(0)
        tokens = generator.integers(1, 9, (6, 5))
        tokens[:3, 3:] = 0
        data = [([tokens, numbers(6, 1)], numbers(6, 2, seed=1))]
        for schedule in ("gpipe", "1f1b"):
            model = self.compare(
                make,
                data,
                num_stages=4,
                num_micro_batches=3,
                schedule=schedule,
            )
        self.compare_outputs(make(), data[0][0], 3)
        names = [n.layer.name for s in model.stages for n in s.nodes]
        for kind in ("multiply", "get_item", "mean"):
            self.assertTrue(any(x.startswith(kind) for x in names), names)

    @parameterized.parameters("gpipe", "1f1b")
    def test_outputs_of_all_kinds(self, schedule):
        """Outputs of the first and the last stage, an input, and one twice."""

        def make():
            inputs = keras.Input((4,), name="inputs")
            first = L.Dense(4, name="first")(inputs)
            last = L.Dense(4, name="last")(L.Dense(4)(first))
            return keras.Model(inputs, [first, last, inputs, first])

        x = numbers(6, 4)
        y = [numbers(6, 4, seed=seed) for seed in range(4)]
        model = self.compare(
            make,
            [(x, y)],
            loss=["mse"] * 4,
            num_stages=3,
            num_micro_batches=2,
            schedule=schedule,
        )
        self.assertAllClose(model.predict(x, verbose=0)[2], x)

    @parameterized.parameters("gpipe", "1f1b")
    def test_output_without_a_loss(self, schedule):
        """Its weights have no gradient, so they do not decay either."""

        def make():
            inputs = keras.Input((4,))
            hidden = L.Dense(4)(inputs)
            return keras.Model(inputs, [L.Dense(2)(hidden), L.Dense(2)(hidden)])

        self.compare(
            make,
            [(numbers(6, 4), [numbers(6, 2, seed=1)] * 2)],
            loss=["mse", None],
            optimizer=lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
            num_stages=2,
            num_micro_batches=2,
            schedule=schedule,
        )

    @pairwise.product(
        schedule=("gpipe", "1f1b"),
        num_micro_batches=(1, 2),
        eager=(True, False),
    )
    def test_output_twice(self, schedule, num_micro_batches, eager):
        def trained(**kwargs):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((4,))
            x = L.Dense(2)(L.Dense(4, activation="tanh")(inputs))
            model = keras.Model(inputs, [x, x])
            if kwargs:
                model = tf_gpipe.PipelinedModel.from_model(model, **kwargs)
            model.compile("sgd", ["mse", "mae"], run_eagerly=eager)
            y = numbers(6, 2, seed=1)
            for _ in range(2):
                model.train_on_batch(numbers(6, 4), [y, 2 * y])
            return model.get_weights()

        found = trained(
            num_stages=2,
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            devices=["CPU:0"] * 2,
        )
        for a, b in zip(trained(), found, strict=True):
            self.assertAllClose(a, b, rtol=1e-5)

    @parameterized.parameters("gpipe", "1f1b")
    def test_several_losses_of_one_output(self, schedule):
        """Keras trains by the first one, and has a metric for each."""

        def logs(**kwargs):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((4,))
            model = keras.Model(
                inputs, L.Dense(2, name="a")(L.Dense(4)(inputs))
            )
            if kwargs:
                model = tf_gpipe.PipelinedModel.from_model(model, **kwargs)
            model.compile("sgd", ["mse", "mae"])
            return model.train_on_batch(
                numbers(6, 4), numbers(6, 2, seed=1), return_dict=True
            )

        found = logs(
            num_stages=2,
            num_micro_batches=2,
            schedule=schedule,
            devices=["CPU:0"] * 2,
        )
        expected = logs()
        self.assertLen(expected, 2)
        self.assertAllClose(expected, found, rtol=1e-5)

    @parameterized.product(schedule=("gpipe", "1f1b"), num_micro_batches=(1, 2))
    def test_loss_that_gathers_rows(self, schedule, num_micro_batches):
        def gathered(y_true, y_pred):
            rows = tf.range(tf.shape(y_pred)[0])
            return tf.reduce_sum((tf.gather(y_pred, rows) - y_true) ** 2, -1)

        def make():
            inputs = keras.Input((4,))
            return keras.Model(inputs, L.Dense(2)(L.Dense(4)(inputs)))

        self.compare(
            make,
            [(numbers(7, 4), numbers(7, 2, seed=1))],
            loss=gathered,
            num_stages=2,
            num_micro_batches=num_micro_batches,
            schedule=schedule,
        )

    @parameterized.product(sequential=(True, False), remat=("always", "never"))
    def test_layers_within_layers_train(self, sequential, remat):
        def make():
            layers = [keras.Input((6,)), L.Dense(4), Block(), L.Dense(2)]
            if sequential:
                return layers
            return keras.Sequential(layers)._functional

        self.compare(
            make,
            [(numbers(8, 6), numbers(8, 2, seed=1))],
            num_stages=2,
            num_micro_batches=1,
            remat=remat,
        )

    def test_dropout_does_not_depend_on_stages(self):
        def make():
            x = inputs = keras.Input((6,))
            for _ in range(3):
                x = L.Add()([x, L.Dropout(0.5)(L.Dense(6)(x))])
            return keras.Model(inputs, x)

        data = [(numbers(8, 6), numbers(8, 6, seed=1))]
        one, other = (
            comparison.train(
                make, data, loss="mse", num_stages=k, num_micro_batches=4
            )
            for k in (1, 4)
        )
        comparison.assert_same(self, one, other)

    def test_a_skip_is_sent_once_a_device(self):
        x = inputs = keras.Input((6,))
        x = first = L.Dense(6, name="first")(x)
        for name in ("second", "third", "fourth"):
            x = L.Add(name=f"add_{name}")([L.Dense(6, name=name)(x), first])
        model = tf_gpipe.PipelinedModel(
            inputs,
            x,
            num_micro_batches=2,
            balance=[1, 2, 2, 2],
            schedule=tf_gpipe.Schedule(
                [
                    "F0.0 F0.1 B0.0 B0.1".split(),
                    "F1.0 F1.1 B1.0 B1.1".split(),
                    "F2.0 F3.0 F2.1 F3.1 B3.0 B2.0 B3.1 B2.1".split(),
                ]
            ),
        )
        step = tf.function(lambda x: model(x, training=False))
        x = tf.constant(numbers(4, 6))
        received = collections.Counter(
            node.device[-1]
            for node in executed_graph(step, x)
            if node.op == "_Recv" and "F0.0" in node.name
        )
        self.assertEqual(received, {"1": 1, "2": 1})

    @parameterized.parameters("float32", "float16")
    def test_mask_of_a_given_tensor(self, dtype):
        tokens = np.array([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
        embedded = L.Embedding(9, 4, mask_zero=True, dtype=dtype)(tokens)
        inputs = keras.Input((3, 4))
        outputs = L.LSTM(4)(inputs)
        plain = keras.Model(inputs, L.Dense(2)(outputs))
        pipelined = tf_gpipe.PipelinedModel.from_model(
            plain, num_stages=2, num_micro_batches=2
        )
        self.assertAllClose(plain(embedded), pipelined(embedded))
        bare = tf.convert_to_tensor(embedded.numpy())
        self.assertNotAllClose(plain(bare), pipelined(embedded))


class LifeTest(tf.test.TestCase, parameterized.TestCase):
    def make(self, num_stages=3, seed=0, **kwargs):
        keras.utils.set_random_seed(seed)
        model = tf_gpipe.PipelinedModel.from_model(
            two_by_two(),
            num_stages=num_stages,
            **{"num_micro_batches": 2, **kwargs},
        )
        model.compile("adam", **TWO_LOSSES)
        return model

    def path(self, name):
        return pathlib.Path(self.get_temp_dir(), name)

    @pytest.mark.slow
    def test_fit_evaluate_predict(self):
        ((x, y, _),) = two_by_two_data(8)
        model, plain = self.make(), two_by_two()
        plain.set_weights(model.get_weights())
        plain.compile("adam", **TWO_LOSSES)
        for each in (model, plain):
            each.history_ = each.fit(
                x, y, batch_size=3, epochs=2, verbose=0, shuffle=False
            ).history
        self.assertAllClose(model.history_, plain.history_)
        self.assertAllClose(
            model.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0)
        )
        self.assertAllClose(
            model.predict(x, verbose=0), plain.predict(x, verbose=0)
        )

    def test_saving_a_subclass_with_a_constructor_of_its_own(self):
        @keras.saving.register_keras_serializable("functional_test")
        class Net(tf_gpipe.PipelinedModel):
            def __init__(self, width=4, **kwargs):
                self.width = width
                inputs = keras.Input((4,))
                x = L.Dense(width)(inputs)
                super().__init__(inputs, L.Dense(1)(x), **kwargs)

            def get_config(self):
                return {**super().get_config(), "width": self.width}

        model = Net(width=6, num_stages=2, num_micro_batches=2)
        path = pathlib.Path(self.get_temp_dir(), "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        self.assertIsInstance(loaded, Net)
        self.assertEqual(loaded.width, 6)
        self.assertLen(loaded.stages, 2)
        x = numbers(4, 4)
        self.assertAllClose(loaded(x), model(x))

    @pytest.mark.slow
    def test_saving(self):
        ((x, y, _),) = two_by_two_data(8)
        model = self.make()
        model.train_on_batch(x, y)
        path = self.path("model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        self.assertIsInstance(loaded, tf_gpipe.PipelinedModel)
        self.assertEqual(
            [len(s.nodes) for s in loaded.stages],
            [len(s.nodes) for s in model.stages],
        )
        for stage in loaded.stages:
            for variable in stage.owned:
                self.assertEndsWith(variable.value.device, stage.device[-5:])
        self.assertAllClose(
            loaded.train_on_batch(x, y), model.train_on_batch(x, y)
        )

    @pytest.mark.slow
    def test_weights_of_the_plain_model_and_back(self):
        ((x, y, _),) = two_by_two_data(8)
        model, plain = self.make(num_stages=4), two_by_two()
        plain.compile("adam", **TWO_LOSSES)
        plain.train_on_batch(x, y)
        path = self.path("model.weights.h5")
        plain.save_weights(path)
        model.load_weights(path)
        logs = [each.train_on_batch(x, y) for each in (plain, model)]
        self.assertAllClose(*logs)
        model.save_weights(path)
        again = self.make(num_stages=2, seed=5)
        again.load_weights(path)
        logs = [each.train_on_batch(x, y) for each in (model, again)]
        self.assertAllClose(*logs)

    @pytest.mark.slow
    def test_rebalance(self):
        ((x, y, _),) = two_by_two_data(8)
        model, twin = self.make(), self.make()
        for each in (model, twin):
            each.train_on_batch(x, y)
        model.rebalance([2, 2, 4])
        self.assertEqual([len(s.nodes) for s in model.stages], [2, 2, 4])
        self.assertAllClose(
            model.train_on_batch(x, y), twin.train_on_batch(x, y)
        )

    def test_config_of_a_schedule(self):
        schedule = tf_gpipe.Schedule([["F0.0", "B0.0"], ["F1.0", "B1.0"]])
        model = self.make(num_stages=2, num_micro_batches=1, schedule=schedule)
        copy = tf_gpipe.PipelinedModel.from_config(model.get_config())
        self.assertEqual(str(copy._pipeline.schedule), str(schedule))
        self.assertEqual(copy.name, model.name)

    def test_subclass_with_a_train_step(self):
        class Signed(tf_gpipe.PipelinedModel):
            def train_step(self, data):
                x, y = data
                loss, gradients, _ = self.loss_and_gradients(x, y)
                self.optimizer.apply(
                    [ops.sign(g) for g in gradients], self.trainable_variables
                )
                return {"loss": loss}

        x = inputs = keras.Input((4,))
        for _ in range(2):
            x = L.Add()([x, L.Dense(4)(x)])
        model = Signed(inputs, x, num_stages=2, num_micro_batches=2)
        model.compile(keras.optimizers.SGD(0.5), "mse")
        before = model.get_weights()
        model.fit(numbers(4, 4), numbers(4, 4, seed=1), verbose=0)
        for a, b in zip(before, model.get_weights(), strict=True):
            self.assertAllClose(np.abs(a - b), np.full(a.shape, 0.5))

    @parameterized.parameters(True, False)
    def test_as_a_layer(self, eagerly):
        plain = two_by_two()
        inner = tf_gpipe.PipelinedModel.from_model(
            keras.models.clone_model(plain), num_stages=3, num_micro_batches=2
        )
        inner.set_weights(plain.get_weights())
        ((x, _, _),) = two_by_two_data(6)
        x = keras.tree.map_structure(tf.constant, x)

        def gradients(model):
            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = model(x, training=True)
                loss = tf.add_n(
                    [tf.reduce_sum(v**2) for v in outputs.values()]
                    + model.losses
                )
            weights = [w.value for w in model.trainable_weights]
            return tape.gradient(loss, [x, weights])

        run = gradients if eagerly else tf.function(gradients, autograph=False)
        self.assertAllClose(run(inner), gradients(plain), rtol=1e-4, atol=1e-5)

    def test_within_a_functional_model(self):
        inner = tf_gpipe.PipelinedModel.from_model(
            long_skip(), num_stages=3, num_micro_batches=2
        )
        inputs = keras.Input((3,))
        outputs = L.Dense(1)(inner(L.Dense(6)(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile("adam", "mse")
        x, y = numbers(4, 3), numbers(4, 1, seed=1)
        losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
        self.assertLess(losses[-1], losses[0])

    def test_weights_without_values_get_them_on_their_stage(self):
        with keras.StatelessScope(initialize_variables=False):
            plain = long_skip()
        for variable in plain.variables:
            self.assertIsNone(variable._value)
        model = tf_gpipe.PipelinedModel.from_model(
            plain, num_stages=3, num_micro_batches=2
        )
        for stage in model.stages:
            for variable in stage.owned:
                self.assertEndsWith(variable.value.device, stage.device[-5:])

    @pytest.mark.slow
    def test_replicas(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:2"])
        ((x, y, weight),) = two_by_two_data(8)
        plain = two_by_two()
        with strategy.scope():
            model = tf_gpipe.PipelinedModel.from_model(
                keras.models.clone_model(plain),
                num_stages=2,
                num_micro_batches=2,
                devices=[["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]],
            )
            model.compile("adam", **TWO_LOSSES)
        model.set_weights(plain.get_weights())
        plain.compile("adam", **TWO_LOSSES)
        for each in (plain, model):
            each.history_ = each.fit(
                x, y, sample_weight=weight, batch_size=8, epochs=3, verbose=0
            ).history
        self.assertAllClose(plain.history_, model.history_, rtol=1e-5)
        for a, b in zip(plain.weights, model.weights, strict=True):
            self.assertAllClose(a, b, rtol=1e-5, atol=1e-6, msg=a.path)

    def test_summary_tells_skips(self):
        model = tf_gpipe.PipelinedModel.from_model(
            long_skip(), num_stages=4, num_micro_batches=2
        )
        lines = []
        model.summary(120, print_fn=lambda text, **_: lines.append(text))
        # A row of six float32 numbers has 0.0234 KiB.
        self.assertIn("1 (0.0234), 3 (0.0234)", "\n".join(lines))


class PlanTest(tf.test.TestCase, parameterized.TestCase):
    def test_skips(self):
        found = tf_gpipe.plan(
            long_skip(), (8, 6), num_stages=4, num_micro_batches=2
        )
        size = 4 * 4 * 6
        self.assertEqual(found.stages[0].sends, {1: size, 3: size})
        self.assertIn("skips from stage 0 to 3 (0.0 MiB)", str(found))
        # The stage that uses a skip holds it.
        chain = tf_gpipe.plan(
            [L.Dense(6) for _ in range(5)] + [L.Dense(2)],
            (8, 6),
            num_stages=4,
            num_micro_batches=2,
        )
        self.assertGreater(
            found.stages[3].activation_bytes, chain.stages[3].activation_bytes
        )

    def test_transfers_of_skips_take_time(self):
        common = {
            "num_stages": 4,
            "num_micro_batches": 2,
            "device_flops": 1e9,
            "bandwidth": 1e3,
        }
        with_skip = tf_gpipe.plan(long_skip(), (8, 6), **common)
        simple = tf_gpipe.plan(
            [L.Dense(6) for _ in range(5)] + [L.Dense(2)], (8, 6), **common
        )
        self.assertGreaterEqual(with_skip.step_seconds, simple.step_seconds)

    def test_same_stages_as_the_model(self):
        inputs = {"a": (8, 6), "b": (8, 4)}
        found = tf_gpipe.plan(
            two_by_two(), inputs, num_stages=3, num_micro_batches=2
        )
        model = tf_gpipe.PipelinedModel.from_model(
            two_by_two(), num_stages=3, num_micro_batches=2
        )
        self.assertEqual(
            [stage.parameters for stage in found.stages],
            [stage.count_params() for stage in model.stages],
        )

    @parameterized.parameters("parameters", "flops", "memory", "time")
    def test_balance(self, balance):
        model = tf_gpipe.PipelinedModel.from_model(
            unet(normalize=True),
            num_stages=3,
            num_micro_batches=2,
            balance=balance,
        )
        self.assertLen(model.stages, 3)

    def test_cost_function_gets_all_shapes(self):
        shapes = []

        def cost(layer, input_shape):
            if isinstance(layer, L.Concatenate):
                shapes.append(input_shape)
            return 1.0

        tf_gpipe.PipelinedModel.from_model(
            two_by_two(), num_stages=2, num_micro_batches=2, balance=cost
        )
        self.assertEqual(shapes, [[(1, 8), (1, 8), (1, 4)]])

    def test_equal_cuts_send_little(self):
        # All parameters are in the first and the last layer: any cut between
        # them is equal.
        inputs = keras.Input((8, 8, 2))
        x = L.Conv2D(4, 1)(inputs)
        x = L.UpSampling2D(2)(x)
        x = L.GlobalAveragePooling2D()(x)
        x = L.RepeatVector(50)(x)
        outputs = L.Dense(2)(x)
        model = tf_gpipe.PipelinedModel(
            inputs,
            outputs,
            num_stages=2,
            num_micro_batches=2,
            balance="parameters",
        )
        self.assertIsInstance(
            model.stages[0].layers[-1], L.GlobalAveragePooling2D
        )

    def test_spec_unlike_the_inputs(self):
        with self.assertRaisesRegex(ValueError, "like the inputs"):
            tf_gpipe.plan(two_by_two(), (8, 6), num_stages=2)


class ErrorsTest(tf.test.TestCase, parameterized.TestCase):
    def test_no_graph(self):
        class Subclassed(keras.Model):
            def call(self, x):
                return x

        for make in (
            tf_gpipe.PipelinedModel.from_model,
            lambda model: tf_gpipe.plan(model, (2, 2), num_stages=1),
        ):
            with self.assertRaisesRegex(TypeError, "only its `call` knows"):
                make(Subclassed())
        with self.assertRaisesRegex(TypeError, "built `keras.Sequential`"):
            tf_gpipe.PipelinedModel.from_model(keras.Sequential([L.Dense(2)]))

    def test_no_layers(self):
        inputs = keras.Input((4,))
        with self.assertRaisesRegex(ValueError, "needs layers between"):
            tf_gpipe.PipelinedModel(inputs, inputs)

    def test_optional_input(self):
        a, b = keras.Input((4,)), keras.Input((4,), optional=True, name="b")
        with self.assertRaisesRegex(ValueError, "name='b', optional=True"):
            tf_gpipe.PipelinedModel([a, b], L.Add()([a, b]), num_stages=1)

    def test_more_stages_than_layers(self):
        with self.assertRaisesRegex(ValueError, "7 layers"):
            tf_gpipe.PipelinedModel.from_model(long_skip(), num_stages=8)
        with self.assertRaisesRegex(ValueError, "sums to 3"):
            tf_gpipe.PipelinedModel.from_model(long_skip(), balance=[1, 2])

    def test_layer_that_raises_is_named(self):
        class Picky(L.Layer):
            def call(self, x):
                if x.shape[0] == 2:
                    raise KeyError("no")
                return x

        inputs = keras.Input((4,))
        x = L.Dense(4)(inputs)
        model = tf_gpipe.PipelinedModel(
            inputs, Picky(name="picky")(x), num_stages=2, num_micro_batches=2
        )
        with self.assertRaisesRegex(KeyError, "no") as raised:
            model(numbers(4, 4))
        self.assertRegex(
            "".join(raised.exception.__notes__), "'picky'.*stage 1"
        )


if __name__ == "__main__":
    tf.test.main()
