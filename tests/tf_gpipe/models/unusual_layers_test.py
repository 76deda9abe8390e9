"""Unusual layers work as in the plain model, or are refused."""

import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison
from tests.tf_gpipe.step.executed_graph import executed_graph

SGD = functools.partial(keras.optimizers.SGD, 0.1)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy
TWO = {
    "num_stages": 2,
    "num_micro_batches": 2,
    "devices": ["CPU:0", "CPU:1"],
}


def numbers(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape, dtype="float32")


def tokens(high, *shape):
    return np.random.default_rng(0).integers(0, high, shape)


def dense():
    return [
        keras.Input((6,)),
        L.Dense(5, activation="tanh"),
        L.Dense(4, activation="tanh"),
        L.Dense(3),
    ]


def plain_and_gpipe():
    """Yields a plain model and a pipeline, with equal weights."""
    for make in (
        keras.Sequential,
        functools.partial(
            tf_gpipe.PipelinedSequential, schedule="gpipe", **TWO
        ),
    ):
        keras.utils.set_random_seed(0)
        yield make(dense())


def replace_bias(layer):
    """Gives a built layer another bias, as quantisation gives it a kernel."""
    layer._tracker.unlock()
    shape = layer.bias.shape
    del layer.bias
    layer.bias = layer.add_weight(shape, "ones", name="bias")
    layer._tracker.lock()


class Counting(L.Layer):
    """A layer that counts the mini-batches that it has seen."""

    def build(self, input_shape):
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return x


def tied():
    inputs = keras.Input((5,), dtype="int32")
    embedding = L.Embedding(7, 4)
    x = L.Dense(4, activation="tanh")(embedding(inputs))
    x = L.Dense(4)(x)
    outputs = keras.ops.einsum("btd,vd->btv", x, embedding.embeddings)
    return keras.Model(inputs, outputs)


class Noise(L.Layer):
    """Multiplies by weights and by numbers that TensorFlow draws."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=input_shape[1:], initializer="ones")

    def call(self, x):
        noise = tf.random.uniform(tf.shape(x)[1:], 0.5, 2.0)
        return x * self.scale * noise


class StaticNoise(Noise):
    def call(self, x):
        return x * self.scale * tf.random.uniform(x.shape[1:], 0.5, 2.0)


class BuildsAPart(L.Layer):
    """Keras does not run it to learn its shape, and so builds no `inner`."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([L.Dense(6, "tanh"), L.PReLU()])
        self.unused = L.Dense(2)

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return self.scale * self.inner(x)

    def compute_output_shape(self, shape):
        return shape


class SharesAWeight(L.Layer):
    def __init__(self, get):
        super().__init__()
        self.get = get

    def build(self, shape):
        self.kernel = self.get()

    def call(self, x):
        return keras.ops.tanh(keras.ops.matmul(x, self.kernel))


def with_prelu():
    return L.Dense(6, activation=L.PReLU(keras.initializers.Constant(0.2)))


class AssignedInBuild(L.Layer):
    def build(self, input_shape):
        size = input_shape[-1]
        self.kernel = self.add_weight(shape=(size, size), initializer="zeros")
        self.kernel.assign(2 * np.eye(size))

    def call(self, x):
        return x @ keras.ops.convert_to_tensor(self.kernel)


class Shaken(L.Layer):
    """Adds noise from `keras.random` without a `SeedGenerator`."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


class Doubled(L.Layer):
    """Has no spec, like most layers: Keras calls it to infer its outputs."""

    def call(self, x):
        return 2 * x


class Raw(L.Layer):
    """Has a `tf.Variable`, which Keras does not know of."""

    def build(self, input_shape):
        with tf.init_scope():
            self.raw = tf.Variable(2.0)

    def call(self, x):
        return x * self.raw


class Gathered(L.Layer):
    """Takes all of its rows, by their indices."""

    def call(self, x):
        return keras.ops.take(x, keras.ops.arange(keras.ops.shape(x)[0]), 0)

    def compute_output_shape(self, input_shape):
        return input_shape


class Flattened(L.Layer):
    """Makes each time step a row."""

    def call(self, x):
        return keras.ops.reshape(x, (-1, x.shape[-1]))

    def compute_output_shape(self, input_shape):
        return (None, input_shape[-1])


class Rematerialized(L.Layer):
    """Recomputes its `Dense` layers for the gradient, by `keras.remat`."""

    def __init__(self, remat):
        super().__init__()
        self.remat = remat

    def build(self, input_shape):
        self.inner = L.Dense(6, activation="tanh")
        self.inner.build(input_shape)
        self.outer = L.Dense(input_shape[-1])
        self.outer.build((None, 6))

    def call(self, x):
        run = lambda x: self.outer(self.inner(x))
        return x + (keras.remat(run) if self.remat else run)(x)


class ToComplex(L.Layer):
    def call(self, x):
        return keras.ops.cast(x, "complex64")

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "complex64")


class Sparsely(L.Layer):
    """Returns a tensor that is not dense, unlike its spec."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, x):
        return self.kind(x)

    def compute_output_shape(self, shape):
        return shape


@keras.saving.register_keras_serializable(package="unusual_layers_test")
class Valued(L.Layer):
    """Makes a variable from a value, not from an initializer."""

    def __init__(self, early, **kwargs):
        super().__init__(**kwargs)
        self.early = early
        if early:
            self.scale = keras.Variable(numbers(4))

    def build(self, shape):
        if not self.early:
            self.scale = keras.Variable(numbers(4))

    def call(self, x):
        return x * self.scale

    def get_config(self):
        return {**super().get_config(), "early": self.early}


class Annealed(keras.regularizers.Regularizer):
    """A penalty whose strength is a variable, which can be trained."""

    def __init__(self):
        self.strength = keras.Variable(0.5)

    def __call__(self, weight):
        return self.strength * keras.ops.sum(weight**2)


class UnusualLayersTest(tf.test.TestCase, parameterized.TestCase):
    def assert_trains_alike(
        self,
        make,
        *data,
        loss="mse",
        rtol=1e-4,
        plain_eagerly=False,
        **kwargs,
    ):
        def compared(**arguments):
            return comparison.train(
                make, [data], loss=loss, optimizer=SGD, **arguments
            )

        comparison.assert_same(
            self,
            compared(run_eagerly=plain_eagerly),
            compared(**{**TWO, **kwargs}),
            rtol=rtol,
            atol=2e-2 * rtol,
        )

    @parameterized.parameters(
        ("1f1b", "always", 2),
        ("gpipe", "never", 2),
        ("zero_bubble", "always", 2),
        ("zero_bubble", "never", 1),
    )
    @pytest.mark.slow_after(1)
    def test_recurrent(self, schedule, remat, num_stages):
        def make():
            return [
                keras.Input((5,), dtype="int32"),
                L.Embedding(7, 4, mask_zero=True),
                L.Bidirectional(L.LSTM(3, return_sequences=True)),
                L.GRU(3),
                L.Dense(2),
            ]

        x, y = tokens(7, 8, 5), numbers(8, 2)
        self.assert_trains_alike(
            make,
            x,
            y,
            schedule=schedule,
            remat=remat,
            num_stages=num_stages,
            balance=[4] if num_stages == 1 else [1, 3],
        )

    @parameterized.product(
        schedule=("1f1b", "zero_bubble"), remat=("always", "never")
    )
    @pytest.mark.slow_after(1)
    def test_garbage_collected_before_the_first_step(self, schedule, remat):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((5, 4)), L.GRU(3, return_sequences=True), L.LSTM(2)],
            **TWO,
            schedule=schedule,
            remat=remat,
        )
        model.compile("sgd", "mse")
        x, y = tf.constant(numbers(8, 5, 4)), tf.constant(numbers(8, 2))
        step = tf.function(lambda x, y: model.loss_and_gradients(x, y))
        step = step.get_concrete_function(x, y)
        # Collects the trace that stages are cut from, whose loops are
        # functions.
        gc.collect()
        loss, _, outputs = step(x, y)
        self.assertAllClose(loss, tf.reduce_mean((outputs - y) ** 2))

    @pairwise.product(
        schedule=("gpipe", "1f1b", "zero_bubble"),
        remat=("always", "never"),
        shared=(True, False),
    )
    @pytest.mark.slow_after(1)
    def test_remat_of_a_layer(self, schedule, remat, shared):
        def train(own_remat, **kwargs):
            def make():
                layer = Rematerialized(own_remat)
                inputs = keras.Input((4,))
                x = L.Dense(4, activation="tanh")(layer(inputs))
                x = (layer if shared else Rematerialized(own_remat))(x)
                return keras.Model(inputs, L.Dense(3)(x))

            data = [(numbers(8, 4), numbers(8, 3))]
            return comparison.train(
                make, data, loss="mse", optimizer=SGD, **kwargs
            )

        # The plain model has no `keras.remat`: TensorFlow now and then lets the
        # optimizer change weights before the recomputation has read them.
        comparison.assert_same(
            self,
            train(False),
            train(True, **TWO, schedule=schedule, remat=remat, balance=[2, 2]),
        )

    @parameterized.parameters(("gpipe", 1), ("1f1b", 2), ("zero_bubble", 2))
    def test_assigned_weights(self, schedule, num_micro_batches):
        def make():
            return [
                keras.Input((6,)),
                L.SpectralNormalization(L.Dense(4)),
                L.Dense(3),
            ]

        self.assert_trains_alike(
            make,
            numbers(8, 6),
            numbers(8, 3),
            schedule=schedule,
            num_micro_batches=num_micro_batches,
        )

    @parameterized.parameters(
        ("gpipe", 2, "always"),
        ("1f1b", 1, "never"),
        ("1f1b", 2, "always"),
        ("zero_bubble", 2, "never"),
    )
    def test_penalties_of_assigned_weights(
        self, schedule, num_micro_batches, remat
    ):
        """They are those of the weights after the forward passes."""
        keep = {"kernel_regularizer": keras.regularizers.L2(0.1)}

        def make():
            return [
                keras.Input((6,)),
                L.SpectralNormalization(L.Dense(4, **keep)),
                L.SpectralNormalization(L.Dense(3, **keep)),
            ]

        self.assert_trains_alike(
            make,
            numbers(8, 6),
            numbers(8, 3),
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            remat=remat,
        )

    @parameterized.parameters(
        ("gpipe", False),
        ("gpipe", True),
        ("1f1b", False),
        ("1f1b", True),
    )
    def test_regularizer_with_a_variable(self, schedule, is_weight):
        def make():
            annealed = Annealed()
            layers = [
                keras.Input((6,)),
                L.Dense(4, kernel_regularizer=annealed),
                L.Dense(3, kernel_regularizer=annealed),
            ]
            if is_weight:
                # A weight of the first layer, which trains it.
                layers[1].strength = annealed.strength
            return layers

        self.assert_trains_alike(
            make,
            numbers(8, 6),
            numbers(8, 3),
            schedule=schedule,
            # In a graph plain Keras may add the penalty of weights that have
            # been updated.
            plain_eagerly=True,
        )

    def counted(self, pipelined=True, **kwargs):
        """Trains a model whose loss reads what a layer assigns."""
        keras.utils.set_random_seed(0)
        counter = Counting()
        layers = [keras.Input((6,)), counter, L.Dense(3)]
        model = keras.Sequential(layers)
        if pipelined:
            model = tf_gpipe.PipelinedSequential(
                layers, **{**TWO, "balance": [1, 1], **kwargs}
            )

        def loss(y_true, y_pred):
            return keras.ops.mean(
                counter.calls * keras.ops.square(y_true - y_pred), -1
            )

        model.compile(keras.optimizers.SGD(0.1), loss)
        x, y = numbers(8, 6), numbers(8, 3)
        logs = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        return logs.history["loss"], model.get_weights()

    @parameterized.parameters(
        {"schedule": "gpipe"},
        {"schedule": "gpipe", "remat": "never"},
        {"schedule": "1f1b", "num_micro_batches": 1},
    )
    def test_loss_reads_what_layers_assign(self, **kwargs):
        """Keras computes a loss after all layers."""
        losses, weights = self.counted(pipelined=False)
        other_losses, others = self.counted(**kwargs)
        self.assertAllClose(losses, other_losses)
        for a, b in zip(weights, others, strict=True):
            self.assertAllClose(a, b)

    @parameterized.parameters("1f1b", "zero_bubble")
    def test_loss_that_reads_it_too_early_is_refused(self, schedule):
        with self.assertRaisesRegex(ValueError, "'.*counting.*', which layers"):
            self.counted(schedule=schedule)

    @parameterized.parameters(
        ("gpipe", "always"), ("1f1b", "never"), ("zero_bubble", "always")
    )
    def test_weight_as_an_argument(self, schedule, remat):
        x = tokens(7, 8, 5)
        self.assert_trains_alike(
            tied,
            x,
            x,
            loss=CROSS_ENTROPY(from_logits=True),
            balance=[2, 2],
            schedule=schedule,
            remat=remat,
        )

    def test_weight_of_another_stage(self):
        embedding = L.Embedding(7, 4)
        model = tf_gpipe.PipelinedSequential(
            [
                keras.Input((5,), dtype="int32"),
                embedding,
                L.Dense(4),
                L.Lambda(
                    lambda x: x @ keras.ops.transpose(embedding.embeddings)
                ),
            ],
            balance=[1, 2],
            **TWO,
        )
        model.compile("sgd", CROSS_ENTROPY(from_logits=True))
        x = tokens(7, 8, 5)
        with self.assertRaisesRegex(ValueError, "embeddings.*would be lost"):
            model.train_on_batch(x, x)
        self.assertEqual(model.predict(x, verbose=0).shape, (8, 5, 7))

    def test_weight_of_another_model(self):
        teacher = L.Dense(4)
        teacher.build((None, 6))

        def make():
            return [
                keras.Input((6,)),
                L.Dense(6),
                L.Lambda(lambda x: teacher(x)),
                L.Dense(3),
            ]

        self.assert_trains_alike(make, numbers(8, 6), numbers(8, 3))

    @parameterized.parameters(
        (Noise, "1f1b", "always"),
        (Noise, "zero_bubble", "never"),
        (StaticNoise, "gpipe", "always"),
        (StaticNoise, "1f1b", "never"),
        (StaticNoise, "zero_bubble", "always"),
    )
    def test_gradient_is_that_of_the_numbers_drawn(
        self, layer, schedule, remat
    ):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((6,)), layer(), L.Identity()],
            schedule=schedule,
            remat=remat,
            **TWO,
        )
        model.compile(SGD(), loss=keras.losses.MeanAbsoluteError("sum"))

        @tf.function
        def step(x):
            _, gradients, outputs = model.loss_and_gradients(x, 0.0 * x)
            return gradients[0], outputs

        gradient, outputs = step(tf.ones((2, 6)))
        # Each micro-batch is one row. The gradient is a mean over 6 features
        # and a sum over rows.
        self.assertAllClose(gradient, np.sum(outputs, axis=0) / 6)
        self.assertNotAllClose(outputs[0], step(tf.ones((2, 6)))[1][0])

    def test_assigned_in_build(self):
        def make():
            return [keras.Input((6,)), AssignedInBuild(), L.Dense(3)]

        self.assert_trains_alike(make, numbers(8, 6), numbers(8, 3))

    @parameterized.parameters(
        (with_prelu, False, "fit"),
        (with_prelu, True, "tape"),
        (BuildsAPart, True, "fit"),
        (BuildsAPart, False, "tape"),
    )
    def test_layers_within_that_are_built_as_they_run(
        self, make, functional, first
    ):
        def train(**kwargs):
            keras.utils.set_random_seed(1)
            made = [keras.Input((6,)), make(), make(), L.Dense(3)]
            if functional:
                made = keras.Sequential(made)
                made = keras.Model(made.inputs, made.outputs)
            model = comparison.model_of(made, **kwargs)
            x, y = numbers(8, 6), numbers(8, 3)
            model.compile(
                keras.optimizers.Adam(0.1), "mse", run_eagerly=first == "tape"
            )
            if not kwargs:
                # In tests its optimizer is built before the first step.
                model(x)
            found = []
            if first == "tape":
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x, training=True) ** 2)
                found = tape.gradient(loss, model.trainable_variables)
            model.fit(x, y, epochs=2, verbose=0)
            return [*found, *model.trainable_variables]

        expected = train()
        for a, b in zip(expected, train(**TWO), strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=1e-5)

    @parameterized.parameters(False, True)
    def test_layers_within_that_were_frozen(self, functional):
        def train(**kwargs):
            keras.utils.set_random_seed(1)
            frozen = with_prelu()
            frozen.trainable = False
            inputs = keras.Input((6,))
            if functional:
                outputs = L.Dense(3)(frozen(inputs))
                model = (tf_gpipe.PipelinedModel if kwargs else keras.Model)(
                    inputs, outputs, **kwargs
                )
            else:
                model = (
                    tf_gpipe.PipelinedSequential if kwargs else keras.Sequential
                )([inputs, frozen, L.Dense(3)], **kwargs)
            frozen.trainable = True
            x, y = numbers(8, 6), numbers(8, 3)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model(x)
            model.fit(x, y, epochs=2, verbose=0)
            return [frozen.activation.alpha, *model.trainable_variables]

        expected = train()
        found = train(**TWO)
        for a, b in zip(expected, found, strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=1e-5)
        self.assertNotAllClose(found[0], np.full(6, 0.2), atol=1e-4)

    @parameterized.parameters(False, True)
    def test_layers_within_whose_weights_have_open_sizes(self, called):
        layer = with_prelu()
        if called:
            layer(numbers(2, 5, 6))
        layers = [keras.Input((None, 6)), layer, L.Dense(3)]
        if called:
            model = tf_gpipe.PipelinedSequential(layers, **TWO)
            model.compile("sgd", "mse")
            model.fit(numbers(8, 5, 6), numbers(8, 5, 3), verbose=0)
            self.assertNotAllClose(layer.activation.alpha, np.full((5, 6), 0.2))
        else:
            with self.assertRaisesRegex(
                ValueError, "p_re_lu.*leaves sizes open.*call the layer on"
            ):
                tf_gpipe.PipelinedSequential(layers, **TWO)

    def test_layers_within_that_share_a_weight(self):
        def make():
            first = L.Dense(6, use_bias=False)
            shared = L.Dense(6, activation=SharesAWeight(lambda: first.kernel))
            return [first, shared, L.Dense(3)]

        def train(**kwargs):
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((6,)), *make()])
            model = keras.Model(model.inputs, model.outputs)
            model = comparison.model_of(model, **kwargs)
            x, y = numbers(8, 6), numbers(8, 3)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model(x)
            model.fit(x, y, epochs=2, verbose=0)
            return model.trainable_variables

        for a, b in zip(train(), train(**TWO, balance=[2, 1]), strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=1e-5)

    @parameterized.parameters(lambda x: x.enable_lora(2), replace_bias)
    def test_weights_that_came_later(self, change):
        def train(model):
            change(model.layers[0])
            model.compile(SGD(), "mse")
            model.fit(numbers(8, 6), numbers(8, 3), epochs=2, verbose=0)
            return model.trainable_variables

        keras.utils.set_random_seed(1)
        plain = keras.Sequential(dense())
        model = tf_gpipe.PipelinedSequential(
            keras.models.clone_model(plain), **TWO
        )
        model.set_weights(plain.get_weights())
        keras.utils.set_random_seed(2)
        expected = train(plain)
        keras.utils.set_random_seed(2)
        for a, b in zip(expected, train(model), strict=True):
            self.assertAllClose(a, b, rtol=1e-4)
        self.assertEqual(model.get_config()["balance"], model.balance)

    def test_seed_that_is_set_later(self):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((2,)), Shaken(), Shaken()], **TWO
        )
        keras.utils.set_random_seed(3)
        first = model(tf.zeros((4, 2)), training=True).numpy()
        self.assertNotAllClose(first[:2], first[2:])
        keras.utils.set_random_seed(3)
        self.assertAllClose(first, model(tf.zeros((4, 2)), training=True))

    def test_variable_that_is_no_weight(self):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((2,)), L.Dense(2), Raw()], **TWO
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones((4, 2)), training=True))
        weights = model.trainable_variables
        gradients = tape.gradient(loss, [w.value for w in weights])
        self.assertAllClose(gradients[1], [8.0, 8.0])

    def test_weights_of_samples_and_a_mask(self):
        def train(**kwargs):
            return comparison.train(
                dense,
                [(numbers(8, 6), tokens(3, 8), np.ones((8, 1), "float32"))],
                loss=CROSS_ENTROPY(
                    from_logits=True,
                    ignore_class=1,
                    reduction="mean_with_sample_weight",
                ),
                optimizer=SGD,
                **kwargs,
            )

        comparison.assert_same(self, train(), train(**TWO))

    @parameterized.parameters(
        (keras.losses.Circle(), "compares samples"),
        (keras.losses.Dice(axis=(0,)), "numbers for all samples"),
    )
    def test_refuses_losses_that_couple_samples(self, loss, message):
        model = tf_gpipe.PipelinedSequential(dense(), **TWO)
        model.compile("sgd", loss)
        circle = isinstance(loss, keras.losses.Circle)
        y = tokens(2, 8) if circle else numbers(8, 3)
        with self.assertRaisesRegex(ValueError, f"{message}.*'gpipe'"):
            model.train_on_batch(numbers(8, 6), y)

    def test_uneven_rows_eagerly_from_the_last(self):
        schedule = tf_gpipe.Schedule(
            [
                "F0.1 F0.0 B0.1 B0.0".split(),
                "F1.1 B1.1 F1.0 B1.0".split(),
            ]
        )
        model = tf_gpipe.PipelinedSequential(dense(), schedule=schedule, **TWO)
        plain = keras.models.clone_model(keras.Sequential(dense()))
        plain.set_weights(model.get_weights())
        x, y = numbers(7, 6), numbers(7, 3)
        for each in (plain, model):
            each.compile(SGD(), "mse", run_eagerly=True)
            each.train_on_batch(x, y)
        for a, b in zip(plain.weights, model.weights, strict=True):
            self.assertAllClose(a, b, rtol=1e-4)

    @parameterized.parameters(
        ("gpipe", 1, 8), ("1f1b", 2, 7), ("zero_bubble", 2, 8)
    )
    def test_gather_along_the_rows(self, schedule, num_micro_batches, rows):
        def make():
            return [keras.Input((6,)), L.Dense(5), Gathered(), L.Dense(3)]

        self.assert_trains_alike(
            make,
            numbers(rows, 6),
            numbers(rows, 3),
            balance=[1, 2],
            schedule=schedule,
            num_micro_batches=num_micro_batches,
        )

    @parameterized.parameters((2, 8), (2, 7), (4, 3))
    @pytest.mark.slow_after(1)
    def test_several_rows_of_one(self, num_micro_batches, rows):
        def train(**kwargs):
            x, y = numbers(rows, 3, 2), tokens(2, 3 * rows)
            weights = np.linspace(0, 1, 3 * rows, dtype="float32")
            return comparison.train(
                lambda: [
                    keras.Input((3, 2)),
                    L.Dense(4),
                    Flattened(),
                    L.Dense(2),
                ],
                [(x, y, weights), (x, y, 2.0)],
                loss=CROSS_ENTROPY(from_logits=True),
                optimizer=SGD,
                **kwargs,
            )

        comparison.assert_same(
            self,
            train(),
            train(**{**TWO, "num_micro_batches": num_micro_batches}),
        )

    def test_labels_that_are_broadcast(self):
        self.assert_trains_alike(dense, numbers(8, 6), numbers(1, 3))

    @parameterized.product(loss=("mse", 0), eager=(False, True))
    def test_one_row(self, loss, eager):
        self.addCleanup(tf.config.run_functions_eagerly, False)
        tf.config.run_functions_eagerly(eager)
        self.assert_trains_alike(
            dense,
            numbers(1, 6),
            numbers(1, 3) if loss else tokens(3, 1),
            loss=loss or CROSS_ENTROPY(from_logits=True),
        )

    @pairwise.product(
        schedule=("gpipe", "1f1b"), num_micro_batches=(2, 8), weights=(0, 1)
    )
    def test_labels_of_a_generator_that_are_broadcast(
        self, schedule, num_micro_batches, weights
    ):
        def batches():
            # As with any generator, sizes are not known when a step is traced.
            x, y = numbers(8, 6), numbers(8 if weights else 1, 3, seed=1)
            while True:
                yield (x, y, np.ones(1, "float32")) if weights else (x, y)

        found = []
        for make in (
            keras.Sequential,
            functools.partial(
                tf_gpipe.PipelinedSequential,
                **{**TWO, "num_micro_batches": num_micro_batches},
                schedule=schedule,
            ),
        ):
            keras.utils.set_random_seed(0)
            model = make(dense())
            model.compile(SGD(), "mse")
            history = model.fit(batches(), steps_per_epoch=2, verbose=0)
            found.append([history.history["loss"], model.get_weights()])
        self.assertAllClose(*found)

    @pairwise.product(
        schedule=("gpipe", "1f1b"), num_micro_batches=(2, 3), reduction=(0, 1)
    )
    def test_values_that_are_fewer_than_rows(
        self, schedule, num_micro_batches, reduction
    ):
        class Labelled(keras.losses.Loss):
            def call(self, y_true, y_pred):
                values = keras.losses.sparse_categorical_crossentropy(
                    tf.maximum(y_true, 0), y_pred, from_logits=True
                )
                return tf.boolean_mask(values, y_true >= 0)

        reductions = "mean", "sum"
        self.assert_trains_alike(
            dense,
            numbers(8, 6),
            np.array([-1, 1, 2, -1, -1, -1, 0, 1]),
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            loss=Labelled(reduction=reductions[reduction]),
        )

    # Shapes (4, 4) and (4,) fit as arrays; the sizes of batches of 8 and 1
    # are unknown when the step is traced.
    @parameterized.parameters((4, 2), (4, 4), (9, 2), (9, 8))
    @pytest.mark.slow_after(1)
    def test_refuses_weights_of_something_else(self, rows, num_micro_batches):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4, 2)), L.Dense(4), L.Dense(1)],
            **{**TWO, "num_micro_batches": num_micro_batches},
        )
        model.compile("sgd", "mse")
        fit = functools.partial(
            model.fit,
            numbers(rows, 4, 2),
            numbers(rows, 4, 1),
            batch_size=8,
            verbose=0,
        )
        with self.assertRaisesRegex(ValueError, "must have 2 axes"):
            fit(sample_weight=np.ones(rows))
        fit(sample_weight=np.ones((rows, 1)))

    @parameterized.parameters(2, 8)
    def test_refuses_labels_of_something_else(self, num_micro_batches):
        model = tf_gpipe.PipelinedSequential(
            dense(), **{**TWO, "num_micro_batches": num_micro_batches}
        )
        model.compile("sgd", "mse")
        # The size of a batch is unknown where the last one has fewer rows.
        with self.assertRaises(ValueError) as caught:
            model.fit(numbers(9, 6), numbers(9), batch_size=8, verbose=0)
        notes = "".join(caught.exception.__notes__)
        self.assertIn("Raised by loss 'mse'", notes)

    @parameterized.parameters("1f1b", "zero_bubble")
    def test_loss_is_that_of_micro_batches_alone(self, schedule):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((5, 6)), L.Dense(4), L.Dense(3)],
            schedule=schedule,
            **TWO,
        )
        model.compile("sgd", CROSS_ENTROPY(from_logits=True))
        x, y = numbers(9, 5, 6), tokens(3, 9, 5)
        nodes = executed_graph(
            lambda: model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        )
        losses = [node for node in nodes if "SoftmaxCross" in node.op]
        self.assertLen(losses, 2)
        self.assertNotIn("Fill", [node.op for node in nodes])

    @pytest.mark.slow
    def test_layers_run_for_micro_batches_alone(self):
        # Masks of the outputs, which the loss counts, need no layer to run.
        model = tf_gpipe.PipelinedSequential(
            [
                keras.Input((5,), dtype="int32"),
                L.Embedding(9, 4, mask_zero=True),
                L.GRU(4, return_sequences=True),
                L.Dense(3),
            ],
            **TWO,
        )
        model.compile("sgd", CROSS_ENTROPY(from_logits=True))
        x, y = tokens(9, 8, 5), tokens(3, 8, 5)
        nodes = executed_graph(lambda: model.train_on_batch(x, y))
        # Nodes within functions, such as those of the stages, do not count.
        self.assertNotIn("LoopCond", [node.op for node in nodes])

    @parameterized.parameters(("gpipe", 2, 7), ("1f1b", 2, 7), ("1f1b", 3, 6))
    def test_float64(self, schedule, num_micro_batches, rows):
        def make():
            return [
                keras.Input((6,)),
                L.Dense(4, activation="tanh", kernel_regularizer="l2"),
                L.Dense(3, activity_regularizer="l2"),
            ]

        self.addCleanup(keras.config.set_floatx, keras.config.floatx())
        keras.config.set_floatx("float64")
        self.assert_trains_alike(
            make,
            numbers(rows, 6),
            numbers(rows, 3),
            np.arange(float(rows)),
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            rtol=1e-11,
        )

    def test_layers_of_float64(self):
        keras.utils.set_random_seed(1)
        tied = L.Dense(6, dtype="float64")
        plain = keras.Sequential(
            [
                keras.Input((6,)),
                L.Dense(6, dtype="float64", trainable=False),
                tied,
                L.SpectralNormalization(L.Dense(6, dtype="float64")),
                tied,
            ]
        )
        model = tf_gpipe.PipelinedModel.from_model(
            plain, **{**TWO, "num_micro_batches": 1}
        )
        x = numbers(8, 6)
        for training in (False, True):
            # Training changes the state of a layer, which both models share.
            before = [w.numpy() for w in plain.weights]
            expected = plain(x, training=training)
            after = [w.numpy() for w in plain.weights]
            for variable, value in zip(model.weights, before, strict=True):
                variable.assign(value)
            found = model(x, training=training)
            self.assertAllClose(expected, found, rtol=1e-12, atol=1e-12)
            for variable, value in zip(model.weights, after, strict=True):
                self.assertAllClose(variable, value, rtol=1e-12, atol=1e-12)

    @parameterized.parameters(
        L.ReLU, Doubled, lambda: L.Lambda(lambda x: 2 * x)
    )
    def test_first_values_are_made_where_the_stage_is(self, layer):
        made = {}

        class Noted(keras.initializers.Zeros):
            def __init__(self, name):
                self.name = name

            def __call__(self, shape, dtype=None):
                value = super().__call__(shape, dtype)
                if tf.executing_eagerly():
                    made[self.name] = value.device[-5:]
                return value

        tf_gpipe.PipelinedSequential(
            [
                keras.Input((4,)),
                L.Dense(4, kernel_initializer=Noted("first")),
                layer(),
                L.Dense(4, kernel_initializer=Noted("last")),
            ],
            balance=[2, 1],
            num_micro_batches=2,
            devices=["CPU:1", "CPU:2"],
        )
        self.assertEqual(made, {"first": "CPU:1", "last": "CPU:2"})

    def test_metric_made_in_build(self):
        class Watched(L.Layer):
            def build(self, input_shape):
                self.mean = keras.metrics.Mean(name="watched")

            def call(self, x):
                self.mean.update_state(x)
                return x

            def compute_output_shape(self, input_shape):
                return input_shape

        def make():
            return [keras.Input((6,)), L.Dense(4), Watched(), L.Dense(3)]

        self.assert_trains_alike(make, numbers(8, 6), numbers(8, 3))

    @parameterized.parameters(
        {},
        {"schedule": "gpipe", "remat": "always"},
        {"num_micro_batches": 3, "remat": "never"},
        {"run_eagerly": True, "schedule": "gpipe", "remat": "always"},
    )
    @pytest.mark.slow_after(1)
    def test_a_metric_of_layers_of_several_stages(self, **kwargs):
        class Watched(L.Layer):
            def __init__(self, mean):
                super().__init__()
                self.mean = mean

            def call(self, x):
                self.mean.update_state(x)
                return keras.ops.tanh(x)

        def make():
            mean = keras.metrics.Mean(name="watched")
            layers = [L.Dense(4), Watched(mean), L.Dense(4), Watched(mean)]
            return [keras.Input((6,)), *layers, L.Dense(3)]

        self.assert_trains_alike(make, numbers(8, 6), numbers(8, 3), **kwargs)

    @pairwise.each(
        reader=("layer", "lambda", "metric"),
        schedule=("1f1b", "gpipe"),
        run_eagerly=(False, True),
    )
    @pytest.mark.slow_after(1)
    def test_state_in_a_closure(self, reader, schedule, run_eagerly):
        """State of another stage is seen only if a layer has its owner."""
        counting = Counting()
        mean = keras.metrics.Mean()

        class Reading(L.Layer):
            def call(self, x):
                return x * counting.calls

        class Updating(L.Layer):
            def call(self, x):
                mean.update_state(x)
                return x

        def read(x):
            return x * counting.calls

        if reader == "metric":
            first, last = Updating(), Updating()
        else:
            last = Reading() if reader == "layer" else L.Lambda(read)
            first = counting
        layers = [keras.Input((6,)), first, L.Dense(4), last, L.Dense(3)]
        for balance in ([3, 1], [2, 2]):
            model = tf_gpipe.PipelinedSequential(
                layers, balance=balance, schedule=schedule, num_micro_batches=2
            )
            model.compile("sgd", "mse", run_eagerly=run_eagerly)
            if balance[0] == 3:
                model.train_on_batch(numbers(8, 6), numbers(8, 3))
                continue
            with self.assertRaisesRegex(
                ValueError, "stage 1 use .* layers of an earlier stage assign"
            ):
                model.train_on_batch(numbers(8, 6), numbers(8, 3))

    @pairwise.each(
        schedule=("1f1b", "gpipe", "zero_bubble"), remat=("always", "never")
    )
    @pytest.mark.slow_after(1)
    def test_tensor_kept_for_another_layer(self, **kwargs):
        """As in reversible instance normalisation, of time series."""

        class Centred(L.Layer):
            def call(self, x):
                self.mean = keras.ops.mean(x, axis=-1, keepdims=True)
                return x - self.mean

        class Shifted(L.Layer):
            def __init__(self, centred):
                super().__init__()
                self.centred = centred

            def call(self, x):
                return x + self.centred.mean

        def make():
            centred = Centred()
            layers = centred, L.Dense(4, "tanh"), Shifted(centred), L.Dense(3)
            return [keras.Input((6,)), *layers]

        data = numbers(8, 6), numbers(8, 3)
        self.assert_trains_alike(make, *data, balance=[3, 1], **kwargs)
        with self.assertRaisesRegex(
            ValueError, "stage_0/centred.*does not reach it as an input"
        ):
            self.assert_trains_alike(make, *data, balance=[2, 2], **kwargs)

    @parameterized.parameters(1, 2)
    def test_seed_in_a_closure(self, num_micro_batches):
        """It would be the same for all micro-batches."""
        seed = keras.random.SeedGenerator(1)

        def noisy(x):
            return x + keras.random.normal(keras.ops.shape(x), seed=seed)

        def make():
            seed.state.assign([1, 0])
            return [keras.Input((6,)), L.Lambda(noisy), L.Dense(4), L.Dense(3)]

        data = numbers(8, 6), numbers(8, 3)
        kwargs = {"num_micro_batches": num_micro_batches}
        if num_micro_batches == 1:
            self.assert_trains_alike(make, *data, **kwargs)
            return
        with self.assertRaisesRegex(ValueError, "random seed generator"):
            comparison.train(make, [data], loss="mse", **{**TWO, **kwargs})

    @parameterized.parameters(("1f1b", False), ("zero_bubble", True))
    @pytest.mark.slow_after(1)
    def test_complex_state(self, schedule, used):
        """It is averaged, and no gradient goes through an assignment."""

        class Spectrum(L.Layer):
            def build(self, input_shape):
                self.mean = self.add_weight(
                    shape=(3,), dtype="complex64", trainable=False
                )

            def call(self, x):
                found = tf.reduce_mean(tf.signal.rfft(x), axis=0)
                self.mean.assign(0.5 * self.mean.value + 0.5 * found)
                return x + used * tf.reduce_sum(tf.abs(self.mean.value))

            def compute_output_shape(self, input_shape):
                return input_shape

        def make():
            layers = L.Dense(4), Spectrum(), L.Dense(4), L.Dense(3)
            return [keras.Input((6,)), *layers]

        # If it is used, each micro-batch has the mean of the mini-batch.
        x = np.tile(numbers(1, 6), (8, 1)) if used else numbers(8, 6)
        self.assert_trains_alike(make, x, numbers(8, 3), schedule=schedule)

    def test_loss_with_a_state(self):
        class Noisy(keras.losses.Loss):
            def __init__(self):
                super().__init__(name="noisy")
                self.seed = keras.random.SeedGenerator(1)

            def call(self, y, y_pred):
                noise = keras.random.normal(
                    keras.ops.shape(y_pred), seed=self.seed
                )
                return keras.ops.mean((y_pred + noise - y) ** 2, -1)

        x, y = numbers(8, 6), numbers(8, 3)
        losses = []
        for model in plain_and_gpipe():
            model.compile(keras.optimizers.SGD(0.0), Noisy())
            losses.append([model.train_on_batch(x, y) for _ in range(3)])
        self.assertAllClose(*losses)
        model = tf_gpipe.PipelinedSequential(dense(), **TWO)
        model.compile("sgd", Noisy())
        with self.assertRaisesRegex(ValueError, "'noisy' changes variables"):
            model.train_on_batch(x, y)

    @parameterized.parameters("plain", "branch", "map")
    @pytest.mark.slow_after(1)
    def test_loss_that_assigns_a_tensorflow_variable(self, place):
        def loss(y, y_pred):
            def count(value):
                calls.assign_add(1.0)
                return value

            values = keras.ops.mean((y_pred - y) ** 2, -1)
            if place == "plain":
                return count(values) * calls
            if place == "branch":
                return tf.cond(
                    calls < 3.0, lambda: count(values), lambda: values
                )
            return tf.map_fn(count, values)

        x, y = numbers(8, 6), numbers(8, 3)
        found = []
        for model in plain_and_gpipe():
            calls = tf.Variable(0.0)
            model.compile("sgd", loss)
            found.append([model.train_on_batch(x, y) for _ in range(3)])
            found[-1].append(calls.numpy())
        self.assertAllClose(*found)
        model = tf_gpipe.PipelinedSequential(dense(), **TWO)
        model.compile("sgd", loss)
        with self.assertRaisesRegex(ValueError, "'loss' changes variables"):
            model.train_on_batch(x, y)

    def test_loss_of_positive_outputs(self):
        def loss(y, y_pred):
            del y
            tf.debugging.assert_positive(y_pred)
            return keras.ops.mean(-keras.ops.log(y_pred), -1)

        def make():
            return [keras.Input((6,)), L.Dense(5), L.Dense(3, "softplus")]

        self.assert_trains_alike(make, numbers(8, 6), numbers(8, 3), loss=loss)

    def test_layers_of_two_pipelines(self):
        inputs = keras.Input((6,))
        features = L.Dense(4)(inputs)
        x, y = numbers(8, 6), numbers(8, 3)
        first, second = (
            functools.partial(
                tf_gpipe.PipelinedModel,
                inputs,
                L.Dense(3)(features),
                num_micro_batches=2,
                devices=devices,
            )
            for devices in (["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"])
        )
        model = first()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        plain = keras.models.clone_model(keras.Model(model.input, model.output))
        plain.set_weights(model.get_weights())
        plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        for _ in range(2):
            for each in (model, plain):
                each.fit(x, y, batch_size=8, verbose=0)
            for a, b in zip(plain.weights, model.weights, strict=True):
                self.assertAllClose(a, b, rtol=1e-4)
            self.assertAllClose(
                model.predict(x, verbose=0), plain.predict(x, verbose=0)
            )
            second()

    def test_weights_that_do_not_decay_after_rebalance(self):
        model = tf_gpipe.PipelinedSequential(dense(), **TWO)
        optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
        kernel = model.layers[1].kernel
        optimizer.exclude_from_weight_decay(var_list=[kernel])
        model.compile(optimizer, "mse")
        before = kernel.numpy()
        for balance in ([1, 2], [2, 1]):
            model.rebalance(balance)
            # Nothing but decay changes weights.
            model.fit(np.zeros((8, 6)), np.zeros((8, 3)), verbose=0)
            self.assertAllClose(kernel, before)

    def test_refuses_xla_for_recurrent_layers(self):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((5, 2)), L.GRU(3), L.Dense(3)], **TWO
        )
        model.compile("sgd", "mse", jit_compile=True)
        with self.assertRaisesRegex(ValueError, "XLA cannot compile stage 0"):
            model.train_on_batch(numbers(8, 5, 2), numbers(8, 3))

    @parameterized.parameters(
        ([L.LSTM(3, stateful=True), L.Dense(2)], "keeps states.*stateful"),
        ([ToComplex(), L.Identity()], "complex numbers.*balance"),
        ([L.Dense(3, dtype="float8_from_float32"), L.Dense(2)], "in float8"),
    )
    def test_refuses(self, layers, message):
        shape = (8, 5, 2)
        with self.assertRaisesRegex(ValueError, message):
            tf_gpipe.PipelinedSequential(
                [keras.Input(batch_shape=shape), *layers], **TWO
            )

    @parameterized.parameters(True, False)
    def test_variable_of_a_value(self, early):
        layers = [keras.Input((4,)), L.Dense(4), Valued(early), L.Dense(2)]
        built = keras.Sequential(layers)
        model = tf_gpipe.PipelinedModel.from_model(built, **TWO)
        model.compile("sgd", "mse")
        x = numbers(8, 4)
        model.train_on_batch(x, numbers(8, 2))
        path = self.get_temp_dir() + "/model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
        self.assertIsInstance(loaded, tf_gpipe.PipelinedModel)
        self.assertAllClose(loaded.predict(x), model.predict(x))

    def test_variable_of_a_value_made_by_build(self):
        layers = [keras.Input((4,)), L.Dense(4), Valued(False), L.Dense(2)]
        with self.assertRaisesRegex(ValueError, "stateless scope") as found:
            tf_gpipe.PipelinedSequential(layers, **TWO)
        self.assertIn("add_weight", "".join(found.exception.__notes__))

    @parameterized.parameters(
        (tf.sparse.from_dense, "'sparsely'.*a SparseTensor"),
        (tf.RaggedTensor.from_tensor, "'sparsely'.*a RaggedTensor"),
        (
            lambda x: tf.IndexedSlices(x, tf.range(tf.shape(x)[0])),
            "'sparsely'.*a IndexedSlices",
        ),
    )
    def test_refuses_to_hand_on(self, kind, message):
        layer = Sparsely(kind)
        layer.name = "sparsely"
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), L.Dense(4), layer, L.Dense(2)],
            balance=[2, 1],
            **TWO,
        )
        model.compile("sgd", "mse")
        with self.assertRaisesRegex(TypeError, message):
            model.train_on_batch(numbers(8, 4), numbers(8, 2))


if __name__ == "__main__":
    tf.test.main()
