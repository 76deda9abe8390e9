"""Limits that no other test pins: where one falls, docs/limits.md is wrong."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 1)).astype("float32")
TWO = {"num_stages": 2, "devices": ["CPU:0", "CPU:1"]}


class Noise(L.Layer):
    """Multiplies by a weight and by numbers that TensorFlow, say, draws."""

    def __init__(self, draw=lambda shape: tf.random.uniform(shape, 0.5, 1.5)):
        super().__init__()
        self.draw = draw

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.w * x * self.draw(tf.shape(x))


class OwnGradient(L.Layer):
    """Uses a weight within a custom gradient."""

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        @tf.custom_gradient
        def scaled(x):
            w = tf.convert_to_tensor(self.w.value)

            def gradient(upstream, variables=None):
                by_x = upstream * w
                if not variables:
                    return by_x
                return by_x, [tf.reduce_sum(upstream * x) for _ in variables]

            return x * w, gradient

        return scaled(x)


class Raw(L.Layer):
    def build(self, shape):
        with tf.init_scope():
            self.raw = tf.Variable(2.0)

    def call(self, x):
        return x * self.raw


class Positions(L.Layer):
    """Adds positions, which it looks up for each row."""

    def __init__(self):
        super().__init__()
        self.table = L.Embedding(9, 4)

    def build(self, shape):
        self.table.build((None,))

    def call(self, x):
        places = tf.tile(tf.range(5)[None], [tf.shape(x)[0], 1])
        return x + self.table(places)


@tf.custom_gradient
def local(x):
    """Returns `x`, with a gradient of its own."""
    return tf.identity(x), lambda upstream: 0.1 * x


class LimitsTest(tf.test.TestCase, parameterized.TestCase):
    def moved(self, model, layer):
        """Returns whether a step changes the weights of a layer."""
        model.compile("sgd", "mse")
        before = layer.get_weights()
        model.train_on_batch(X, Y)
        pairs = zip(before, layer.get_weights(), strict=True)
        return any(not np.array_equal(a, b) for a, b in pairs)

    @parameterized.parameters(False, True)
    def test_custom_gradient_that_no_gradient_reaches(self, pipelined):
        layers = [keras.Input((4,)), L.Dense(4), L.Lambda(local), L.Dense(1)]
        model = keras.Sequential(layers)
        if pipelined:
            model = tf_gpipe.PipelinedSequential(layers, **TWO)
        self.assertEqual(self.moved(model, layers[1]), not pipelined)

    @parameterized.parameters(False, True)
    def test_weight_in_a_closure(self, pipelined):
        head = L.Dense(6)
        head.build((None, 4))
        inputs = keras.Input((4,))
        called = L.Lambda(lambda x: head(x))(inputs)
        model = keras.Model(inputs, L.Dense(1)(called))
        model.head = head
        if pipelined:
            model = tf_gpipe.PipelinedModel.from_model(model, **TWO)
        self.assertEqual(self.moved(model, head), not pipelined)

    def test_lookups_of_one_row(self):
        x = np.random.default_rng(0).normal(size=(8, 5, 4)).astype("float32")
        tables = {}
        for number in (None, 4, 8):
            keras.utils.set_random_seed(1)
            layers = [keras.Input((5, 4)), Positions(), L.Dense(1)]
            model = keras.Sequential(layers)
            if number is not None:
                model = tf_gpipe.PipelinedSequential(
                    layers, num_micro_batches=number, **TWO
                )
            model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
            model.train_on_batch(x, x[..., :1])
            tables[number] = model.get_weights()[0]
        self.assertAllClose(tables[None], tables[4])
        self.assertNotAllClose(tables[None], tables[8])

    @parameterized.parameters(
        (),
        lambda shape: np.float32(np.random.uniform(0.5, 1.5)),
        lambda shape: np.float32(random.uniform(0.5, 1.5)),
    )
    def test_eager_recomputation_draws_anew(self, *draw):
        noise = Noise(*draw)
        inputs = keras.Input((4,))
        model = keras.Model(inputs, L.Dense(1)(noise(L.Dense(4)(inputs))))
        model = tf_gpipe.PipelinedModel.from_model(
            model, num_micro_batches=1, balance=[2, 1], **TWO
        )
        model.compile("sgd", "mse", run_eagerly=True)
        _, gradients, outputs = model.loss_and_gradients(X, Y)
        paths = [v.path for v in model.trainable_variables]
        by_w = gradients[paths.index(noise.w.path)]
        # The outputs are linear in `w`.
        expected = np.mean(2 * (outputs - Y) * outputs)
        self.assertNotAllClose(by_w, expected)

    def test_no_gradient_of_an_output_by_another_in_training_mode(self):
        inputs = keras.Input((4,))
        first = L.Dense(3)(inputs)
        plain = keras.Model(inputs, [first, L.Dense(1)(first)])
        model = tf_gpipe.PipelinedModel.from_model(
            plain, num_micro_batches=2, **TWO
        )
        for training, found in ((True, False), (False, True)):
            with tf.GradientTape() as tape:
                first, second = model(X, training=training)
            gradient = tape.gradient(second, first)
            self.assertEqual(gradient is not None, found)

    def test_no_gradient_of_a_raw_variable_in_training_mode(self):
        raw = Raw()
        layers = [keras.Input((4,)), L.Dense(3), raw, L.Dense(1)]
        model = tf_gpipe.PipelinedSequential(layers, **TWO)
        for training, found in ((True, False), (False, True)):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(model(X, training=training))
            self.assertEqual(tape.gradient(value, raw.raw) is not None, found)

    def test_no_forward_mode_in_training_mode(self):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), L.Dense(3), L.Dense(1)], **TWO
        )
        x = tf.constant(X)
        with self.assertRaisesRegex(NotImplementedError, "training=False"):
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)):
                model(x, training=True)

    def test_no_vectorized_jacobian_within_a_function(self):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), L.Dense(3, "tanh"), L.Dense(1)], **TWO
        )

        @tf.function
        def jacobian(vectorized):
            with tf.GradientTape() as tape:
                outputs = model(X, training=True)
            return tape.jacobian(
                outputs,
                model.layers[0].kernel.value,
                experimental_use_pfor=vectorized,
            )

        with self.assertRaisesRegex(ValueError, "experimental_use_pfor"):
            jacobian(True)
        with tf.GradientTape() as tape:
            outputs = model(X, training=False)
        expected = tape.jacobian(outputs, model.layers[0].kernel.value)
        self.assertAllClose(expected, jacobian(False))

    def test_own_gradient_of_a_layer_of_several_stages(self):
        shared = OwnGradient()
        inputs = keras.Input((4,))
        x = shared(L.Dense(4)(shared(inputs)))
        plain = keras.Model(inputs, L.Dense(1)(x))
        model = tf_gpipe.PipelinedModel.from_model(
            plain, num_micro_batches=2, balance=[2, 2], **TWO
        )
        model.compile("sgd", "mse")
        run = tf.function(lambda: model.loss_and_gradients(X, Y)[1])
        paths = [v.path for v in model.trainable_variables]
        found = run()[paths.index(shared.w.path)]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(X) - Y) ** 2)
        self.assertNotAllClose(
            tape.gradient(loss, shared.w.value),
            0.0 if found is None else found,
        )

    @parameterized.product(
        name=("hinge", "squared_hinge", "categorical_hinge"),
        labels=((0, 1), (-1, 1), (-1, 0, 1)),
    )
    @pytest.mark.slow_after(3)
    def test_hinge_looks_at_all_labels(self, name, labels):
        y = np.resize(labels, (8, 1)).astype("float32")
        y[4:] = 1.0
        # The last micro-batch has labels 0 and 1, whatever the others have.
        y[-1] = abs(labels[0]) if len(labels) == 2 else 0.0
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), L.Dense(4), L.Dense(1)],
            num_micro_batches=4,
            schedule="1f1b",
            **TWO,
        )
        model.compile("sgd", name)
        expected = np.mean(keras.losses.get(name)(y, model(X)))
        same = len(labels) == 2 or name == "categorical_hinge"
        check = self.assertAllClose if same else self.assertNotAllClose
        check(model.train_on_batch(X, y), expected)

    def test_first_row_of_a_micro_batch(self):
        x, scale = keras.Input((4,)), keras.Input(())
        y = L.Dense(1)(scale[0] * L.Dense(4)(x))
        plain = keras.Model([x, scale], y)
        plain.compile("sgd", "mse")
        for scales, rows, same in (
            (np.arange(8.0), 1, True),
            (np.arange(8.0), 2, False),
            # One for the whole batch, like Stable Diffusion's guidance scale.
            (np.full(8, 3.0), 2, True),
        ):
            model = tf_gpipe.PipelinedModel.from_model(
                plain, num_micro_batches=rows, **TWO
            )
            model.compile("sgd", "mse")
            data = [tf.constant(X), tf.constant(scales, "float32")]
            received = model.loss_and_gradients(data, tf.constant(Y))[0]
            expected = plain.compute_loss(y=Y, y_pred=plain(data))
            check = self.assertAllClose if same else self.assertNotAllClose
            check(received, expected)

    def test_batch_normalisation_used_twice(self):
        """Its moving variance is an approximation."""
        found = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(0)
            norm = L.BatchNormalization()
            inputs = keras.Input((4,))
            x = L.Dense(4)(norm(3.0 * norm(inputs) + 1.0))
            model = keras.Model(inputs, x)
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model, num_micro_batches=2, **TWO
                )
            model.compile(keras.optimizers.SGD(0.0), "mse")
            model.fit(X, X, batch_size=8, verbose=0)
            found.append(norm.moving_variance.numpy())
        self.assertNotAllClose(*found)
        self.assertAllClose(*found, rtol=0.2)

    def test_embeddings_where_xla_compiles_all(self):
        """In recomputed stages their gradients are dense."""
        tokens = np.random.default_rng(0).integers(0, 7, (8, 3))
        inputs = keras.Input((3,), dtype="int32")
        table = L.Embedding(7, 4)
        x = L.GlobalAveragePooling1D()(table(inputs))
        model = keras.Model(inputs, L.Dense(1)(L.Dense(4)(x)))
        # XLA compiles for one device.
        model = tf_gpipe.PipelinedModel.from_model(
            model,
            num_stages=2,
            num_micro_batches=2,
            schedule="gpipe",
            devices=["CPU:0", "CPU:0"],
        )
        model.compile("sgd", "mse")

        @tf.function(jit_compile=True, autograph=False)
        def run(tokens, y):
            gradients = model.loss_and_gradients(tokens, y)[1]
            dense = not isinstance(gradients[0], tf.IndexedSlices)
            return tf.constant(dense)

        self.assertTrue(run(tf.constant(tokens), tf.constant(Y)))

    def test_model_with_a_call_of_its_own_is_one_layer(self):
        class Doubled(keras.Model):
            def call(self, x, **kwargs):
                return 2.0 * super().call(x, **kwargs)

        x = keras.Input((4,))
        inner = Doubled(x, L.Dense(4)(L.Dense(4)(x)))
        inputs = keras.Input((4,))
        model = tf_gpipe.PipelinedModel.from_model(
            keras.Model(inputs, L.Dense(1)(inner(inputs))), **TWO
        )
        self.assertEqual(
            [[x.name for x in stage.layers] for stage in model.stages],
            [[inner.name], [model.layers[-1].name]],
        )

    def test_operation_on_a_weight_in_mixed_precision(self):
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            inputs, dense = keras.Input((4,)), L.Dense(4)
            outputs = keras.ops.add(dense(inputs), dense.bias)
            model = keras.Model(inputs, outputs)
        finally:
            keras.config.set_dtype_policy("float32")
        pipeline = tf_gpipe.PipelinedModel.from_model(model, **TWO)
        self.assertEqual(model(X).dtype, "bfloat16")
        self.assertEqual(pipeline(X).dtype, "float32")
