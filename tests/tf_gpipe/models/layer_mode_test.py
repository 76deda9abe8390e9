"""A pipeline called as a layer: in a larger model, under the caller's tape."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests import pairwise
from tests.devices import KIND

SCHEDULES = ("1f1b", "gpipe")
REMATS = ("always", "except_last", "never")


def make_layers():
    return [
        keras.Input((4,)),
        keras.layers.Dense(
            6,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.1),
            name="first",
        ),
        keras.layers.Dense(
            5,
            activation="tanh",
            activity_regularizer=keras.regularizers.L2(0.1),
            name="second",
        ),
        keras.layers.Dense(3, name="third"),
    ]


def pipelined(layers, num_stages=3, **kwargs):
    kwargs.setdefault("num_micro_batches", 3)
    return tf_gpipe.PipelinedSequential(
        layers,
        num_stages=num_stages,
        devices=[f"CPU:{k}" for k in range(num_stages)],
        **kwargs,
    )


def one_by_one(layers, x, training=True):
    """Calls the layers one after another."""
    for layer in layers:
        if layer._call_has_training_arg:
            x = layer(x, training=training)
        else:
            x = layer(x)
    return x


def make_data(*shape):
    random = np.random.default_rng(1)
    return random.normal(size=shape).astype("float32")


def total(outputs):
    """Returns a sum that weights each row of each float output differently."""
    result = tf.zeros(())
    for i, x in enumerate(keras.tree.flatten(outputs)):
        if x.dtype.is_floating:
            rows = tf.range(1, tf.shape(x)[0] + 1, dtype=x.dtype)
            rows = tf.reshape(rows, [-1] + [1] * (x.shape.rank - 1))
            result += (i + 1.0) * tf.reduce_sum(rows * tf.sin(x))
    return result


class Fork(keras.layers.Layer):
    """Maps a tensor to a tuple with a dict in it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.left = keras.layers.Dense(3, activation="tanh")
        self.right = keras.layers.Dense(2)

    def build(self, shape):
        self.left.build(shape)
        self.right.build(shape)

    def call(self, x):
        return self.left(x), {"b": self.right(x), "a": x}


class Cross(keras.layers.Layer):
    """Maps a tuple with a dict in it to a dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(3)

    def build(self, shapes):
        self.dense.build(shapes[1]["b"])

    def call(self, inputs):
        left, rest = inputs
        return {
            "one": left * self.dense(rest["b"]),
            "two": keras.ops.sum(rest["a"], axis=-1, keepdims=True),
        }


class Tell(keras.layers.Layer):
    """Returns its float input, and the integer positions of its maxima."""

    def call(self, x):
        return x, keras.ops.argmax(x, axis=-1)


class LookUp(keras.layers.Layer):
    """Uses floats and integers, and returns both."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(5, 5)

    def build(self, shapes):
        self.table.build(shapes[1])

    def call(self, inputs):
        x, places = inputs
        return x * self.table(places), places + 1


class Rematerialized(keras.layers.Layer):
    """Recomputes its `Dense` layer for the gradient, by `keras.remat`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(4, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return keras.remat(self.dense)(x)


class Body(keras.Model):
    """A subclassed model around `body`."""

    def __init__(self, body):
        super().__init__()
        self.stem = keras.layers.Dense(4, activation="tanh")
        self.body = body
        self.head = keras.layers.Dense(1)

    def call(self, x, training=None):
        return self.head(self.body(self.stem(x), training=training))


def around(body):
    """A functional model around `body`."""
    inputs = keras.Input((5,))
    x = keras.layers.Dense(4, activation="tanh")(inputs)
    x = body(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


class LayerModeTest(tf.test.TestCase, parameterized.TestCase):
    """Compares the call of a pipeline with calls of its layers."""

    def assert_same_numbers(self, a, b):
        self.assertAllClose(a, b, rtol=1e-4, atol=1e-5)

    def assert_same_gradients(self, model, x, compiled, training=True):
        """Compares outputs, and gradients by weights and by inputs.

        Args:
            model: The pipeline.
            x: Its inputs.
            compiled: What `tf.function` compiles: `"step"`, `"call"`, or
                `None` for nothing.
            training: Boolean, the argument of the call.
        """
        floats = [
            t for t in keras.tree.flatten(x) if tf.as_dtype(t.dtype).is_floating
        ]
        layers = model.layers

        def run(function):
            sources = [v.value for v in model.trainable_variables] + floats
            with tf.GradientTape() as tape:
                tape.watch(floats)
                outputs = function(x)
                loss = total(outputs)
            return outputs, [
                None if g is None else tf.convert_to_tensor(g)
                for g in tape.gradient(loss, sources)
            ]

        expected, expected_gradients = run(
            lambda x: one_by_one(layers, x, training)
        )
        call = lambda x: model(x, training=training)
        step = lambda: run(tf.function(call) if compiled == "call" else call)
        found, gradients = (tf.function(step) if compiled == "step" else step)()
        keras.tree.assert_same_structure(expected, found)
        for a, b in zip(
            keras.tree.flatten(expected),
            keras.tree.flatten(found),
            strict=True,
        ):
            self.assertEqual(a.dtype, b.dtype)
            self.assert_same_numbers(a, b)
        self.assertTrue(
            any(np.any(g) for g in expected_gradients if g is not None)
        )
        for a, b in zip(expected_gradients, gradients, strict=True):
            if a is None or b is None:
                self.assertFalse(np.any(0 if a is None else a))
                self.assertFalse(np.any(0 if b is None else b))
            else:
                self.assert_same_numbers(a, b)


class ModelTest(LayerModeTest):
    @pairwise.product(
        make=(around, Body),
        schedule=SCHEDULES,
        options=({}, {"run_eagerly": True}),
    )
    @pytest.mark.slow
    def test_fit(self, make, schedule, options):
        x, y = make_data(10, 5), make_data(10, 1)
        plain = make(keras.Sequential(make_layers()))
        model = make(pipelined(make_layers(), schedule=schedule))
        for m in (plain, model):
            m(x[:2])
        start = plain.get_weights()
        model.set_weights(start)
        histories = []
        for m in (plain, model):
            m.compile(
                keras.optimizers.Adam(0.02), "mse", metrics=["mae"], **options
            )
            histories.append(
                m.fit(
                    x,
                    y,
                    batch_size=4,
                    epochs=2,
                    shuffle=False,
                    validation_data=(x[:3], y[:3]),
                    verbose=0,
                ).history
            )
        self.assertEqual(histories[0].keys(), histories[1].keys())
        for key in histories[0]:
            self.assert_same_numbers(histories[0][key], histories[1][key])
        for before, a, b in zip(
            start, plain.get_weights(), model.get_weights(), strict=True
        ):
            self.assertNotAllClose(before, a)
            self.assert_same_numbers(a, b)
        self.assert_same_numbers(
            plain.predict(x, verbose=0), model.predict(x, verbose=0)
        )

    def test_losses(self):
        x = make_data(7, 5)
        plain = around(keras.Sequential(make_layers()))
        model = around(pipelined(make_layers()))
        model.set_weights(plain.get_weights())
        for m in (plain, model):
            m(x, training=True)
        self.assertLen(plain.losses, 2)
        self.assert_same_numbers(sum(plain.losses), sum(model.losses))
        self.assertLen(model.losses, 2)

    def test_weights_stay_on_their_stages(self):
        body = pipelined(make_layers())
        model = around(body)
        model.compile("adam", "mse")
        model.fit(make_data(8, 5), make_data(8, 1), verbose=0)
        for k, stage in enumerate(body.stages):
            self.assertEndsWith(stage.device, f"{KIND}:{k}")
            for layer in stage.layers:
                for variable in layer.variables:
                    self.assertEndsWith(variable.value.device, stage.device)

    @pytest.mark.slow
    def test_saved_and_loaded(self):
        path = os.path.join(self.get_temp_dir(), "model.keras")
        model = around(pipelined(make_layers(), schedule="gpipe"))
        model.compile("adam", "mse")
        x, y = make_data(8, 5), make_data(8, 1)
        model.fit(x, y, verbose=0)
        model.save(path)
        loaded = keras.models.load_model(path)
        self.assertIsInstance(loaded.layers[2], tf_gpipe.PipelinedSequential)
        self.assertLen(loaded.layers[2].stages, 3)
        self.assert_same_numbers(model(x), loaded(x))
        for m in (model, loaded):
            m.fit(x, y, shuffle=False, verbose=0)
        self.assert_same_numbers(model(x), loaded(x))

    def test_cloned(self):
        model = around(pipelined(make_layers(), schedule="gpipe"))
        copy = keras.models.clone_model(model)
        self.assertIsInstance(copy.layers[2], tf_gpipe.PipelinedSequential)
        self.assertIsNot(copy.layers[2], model.layers[2])
        copy.set_weights(model.get_weights())
        x = make_data(7, 5)
        self.assert_same_numbers(model(x), copy(x))

    def test_pipeline_without_input_is_built_by_the_model(self):
        body = pipelined(make_layers()[1:])
        model = around(body)
        self.assertLen(body.stages, 3)
        self.assertEqual(model(make_data(7, 5)).shape, (7, 1))

    def test_another_seed_between_two_steps(self):
        x, y = make_data(8, 5), make_data(8, 1)
        plain = around(keras.Sequential(make_layers()))
        model = around(pipelined(make_layers()))
        model.set_weights(plain.get_weights())
        drawn = []
        for m in (plain, model):
            m.compile("sgd", "mse")
            m.train_on_batch(x, y)
            # Drops the generator that the first step has read. The second step
            # is traced again.
            keras.utils.set_random_seed(5)
            m.train_on_batch(x[:6], y[:6])
            drawn.append(keras.random.normal((3,)))
        self.assertAllEqual(*drawn)
        for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
            self.assert_same_numbers(a, b)

    @parameterized.parameters(*SCHEDULES)
    def test_frozen_pipeline_passes_gradients_on(self, schedule):
        x, y = make_data(8, 5), make_data(8, 1)
        plain = around(keras.Sequential(make_layers()))
        model = around(pipelined(make_layers(), schedule=schedule))
        start = plain.get_weights()
        model.set_weights(start)
        for m in (plain, model):
            m.layers[2].trainable = False
            m.compile(keras.optimizers.SGD(0.1), "mse")
            m.fit(x, y, epochs=2, shuffle=False, verbose=0)
        self.assertNotAllClose(start[0], model.get_weights()[0])
        for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
            self.assert_same_numbers(a, b)

    @parameterized.parameters(*SCHEDULES)
    @pytest.mark.slow
    def test_layer_that_was_made_frozen(self, schedule):
        x, y = make_data(8, 5), make_data(8, 1)

        def make_frozen_layers():
            inner = keras.Sequential([keras.layers.Dense(3, name="inner")])
            frozen = keras.layers.Dense(5, trainable=False)
            return [*make_layers(), frozen, inner]

        plain = around(keras.Sequential(make_frozen_layers()))
        model = around(pipelined(make_frozen_layers(), schedule=schedule))
        start = plain.get_weights()
        model.set_weights(start)
        for trainable in (None, False, True):
            for m in (plain, model):
                if trainable is not None:
                    m.trainable = trainable
                m.compile(keras.optimizers.SGD(0.1), "mse")
                if m.trainable_variables:
                    m.train_on_batch(x, y)
            for a, b in zip(
                plain.get_weights(), model.get_weights(), strict=True
            ):
                self.assert_same_numbers(a, b)
        for before, after in zip(start, model.get_weights(), strict=True):
            self.assertNotAllClose(before, after)

    @parameterized.parameters(*SCHEDULES)
    def test_called_twice(self, schedule):
        x = tf.constant(make_data(7, 4))
        layers = make_layers()[:-1] + [keras.layers.Dense(4)]
        model = pipelined(layers, schedule=schedule)

        def run(function):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = total(function(function(x)))
            return tape.gradient(loss, [x, *model.trainable_variables])

        expected = run(lambda x: one_by_one(model.layers, x))
        found = tf.function(lambda: run(lambda x: model(x, training=True)))()
        for a, b in zip(expected, found, strict=True):
            self.assert_same_numbers(a, b)


class TapeTest(LayerModeTest):
    @pairwise.product(
        schedule=SCHEDULES,
        remat=REMATS,
        compiled=("step", "call", None),
        rows=(6, 7, 2),
    )
    @pytest.mark.slow
    def test_gradients(self, schedule, remat, compiled, rows):
        model = pipelined(make_layers(), schedule=schedule, remat=remat)
        self.assert_same_gradients(
            model, tf.constant(make_data(rows, 4)), compiled
        )

    @pairwise.product(
        schedule=SCHEDULES, remat=REMATS, compiled=("step", "call", None)
    )
    @pytest.mark.slow_after(1)
    def test_remat_of_a_layer(self, schedule, remat, compiled):
        layers = [
            keras.Input((4,)),
            Rematerialized(),
            keras.layers.Dense(4, activation="tanh"),
            Rematerialized(),
        ]
        model = pipelined(layers, schedule=schedule, remat=remat)
        self.assert_same_gradients(
            model, tf.constant(make_data(7, 4)), compiled
        )

    @parameterized.product(compiled=("step", "call", None), remat=REMATS)
    @pytest.mark.slow_after(1)
    def test_gradients_in_inference_mode(self, compiled, remat):
        layers = make_layers()
        layers.insert(2, keras.layers.Dropout(0.5))
        model = pipelined(layers, remat=remat)
        self.assert_same_gradients(
            model, tf.constant(make_data(7, 4)), compiled, training=False
        )

    @pairwise.product(
        compiled=("step", "call", None),
        training=(False, None, True),
        schedule=SCHEDULES,
        rows=(2, 7),
    )
    @pytest.mark.slow_after(3)
    def test_layer_of_several_stages(self, compiled, training, schedule, rows):
        """Each stage's part of a shared weight's gradient counts."""
        shared = keras.layers.Dense(4, "tanh")
        x = keras.Input((4,))
        plain = keras.Model(x, shared(keras.layers.Dense(4)(shared(x))))
        values = tf.constant(make_data(rows, 4))

        def gradients(model):
            def step(call):
                with tf.GradientTape() as tape:
                    loss = total(call(values))
                return tape.gradient(loss, plain.trainable_variables)

            def call(x):
                return model(x, training=training)

            if compiled == "step":
                return tf.function(lambda: step(call))()
            return step(tf.function(call) if compiled == "call" else call)

        expected = gradients(plain)
        received = gradients(
            tf_gpipe.PipelinedModel.from_model(
                plain,
                num_stages=3,
                num_micro_batches=2,
                balance=[1, 1, 1],
                schedule=schedule,
                devices=["CPU:0", "CPU:1", "CPU:0"],
            )
        )
        for a, b in zip(expected, received, strict=True):
            self.assert_same_numbers(a, b)

    @parameterized.parameters("step", "call", None)
    def test_variable_as_input(self, compiled):
        model = pipelined(make_layers())
        x = tf.Variable(make_data(7, 4))
        self.assert_same_gradients(model, x, compiled)

    @parameterized.parameters(True, False)
    def test_gradients_by_some_sources(self, compiled):
        model = pipelined(make_layers())
        x = tf.constant(make_data(7, 4))
        for pick in (
            lambda: x,
            lambda: model.layers[1].kernel.value,
            lambda: model.layers[2].bias.value,
        ):

            def run(function, pick=pick):
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(pick())
                    loss = total(function(x))
                return tape.gradient(loss, pick())

            step = lambda run=run: run(lambda x: model(x, training=True))
            found = (tf.function(step) if compiled else step)()
            expected = run(lambda x: one_by_one(model.layers, x))
            self.assert_same_numbers(expected, found)

    @parameterized.parameters("1f1b", "gpipe")
    def test_backward_in_a_function_of_a_call_that_ran(self, schedule):
        """A Jacobian's backward pass, which TensorFlow vectorizes."""
        model = pipelined(make_layers(), schedule=schedule)
        x = tf.constant(make_data(4, 4))

        def run(function):
            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = function(x)
            return tape.batch_jacobian(outputs, x)

        found = run(lambda x: model(x, training=True))
        expected = run(lambda x: one_by_one(model.layers, x))
        self.assert_same_numbers(expected, found)

    @parameterized.product(schedule=SCHEDULES, compiled=("step", "call", None))
    @pytest.mark.slow_after(1)
    def test_persistent_tape(self, schedule, compiled):
        model = pipelined(make_layers(), schedule=schedule)
        x = tf.constant(make_data(7, 4))

        def run(function):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                outputs = function(x)
                one, other = total(outputs), tf.reduce_sum(outputs**2)
            return [
                tape.gradient(one, x),
                tape.gradient(other, x),
                *tape.gradient(one, model.trainable_variables),
            ]

        call = lambda x: model(x, training=True)
        step = lambda: run(tf.function(call) if compiled == "call" else call)
        found = (tf.function(step) if compiled == "step" else step)()
        expected = run(lambda x: one_by_one(model.layers, x))
        for a, b in zip(expected, found, strict=True):
            self.assert_same_numbers(a, b)

    @parameterized.product(training=(True, False), compiled=(True, False))
    @pytest.mark.slow_after(2)
    def test_persistent_tape_of_penalties(self, training, compiled):
        """A penalty of a weight may be differentiated more than once."""
        layers = make_layers()
        model = pipelined(layers)
        x = tf.constant(make_data(7, 4))

        def run(model):
            with tf.GradientTape(persistent=True) as tape:
                outputs = model(x, training=training)
                one = total(outputs) + sum(model.losses)
                other = tf.stack([one**2, one])
            return [
                tape.gradient(one, layers[1].kernel.value),
                tape.gradient(other, layers[1].kernel.value),
                tape.jacobian(
                    other, layers[1].kernel.value, experimental_use_pfor=False
                ),
            ]

        expected = run(keras.Sequential(layers))
        found = (tf.function(run) if compiled else run)(model)
        for a, b in zip(expected, found, strict=True):
            self.assert_same_numbers(a, b)

    @pairwise.product(
        remat=(tf.recompute_grad, keras.remat),
        schedule=SCHEDULES,
        compiled=("step", "call", None),
    )
    @pytest.mark.slow_after(1)
    def test_within_remat(self, remat, schedule, compiled):
        model = pipelined(make_layers(), schedule=schedule)
        x = tf.constant(make_data(7, 4))

        def run(function):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = total(remat(function)(x))
            return tape.gradient(loss, [x, *model.trainable_variables])

        call = lambda x: model(x, training=True)
        step = lambda: run(tf.function(call) if compiled == "call" else call)
        found = (tf.function(step) if compiled == "step" else step)()
        expected = run(lambda x: one_by_one(model.layers, x))
        for a, b in zip(expected, found, strict=True):
            self.assert_same_numbers(a, b)

    @parameterized.product(
        compiled=("step", "call", None), of_weights=(True, False)
    )
    @pytest.mark.slow_after(1)
    def test_second_derivatives_are_refused(self, compiled, of_weights):
        model = pipelined(make_layers())
        x = tf.constant(make_data(7, 4))
        call = lambda x: model(x, training=True)
        if compiled == "call":
            call = tf.function(call)

        def step():
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    # As in a gradient penalty.
                    outputs = tf.reduce_sum(call(x))
                gradient = inner.gradient(outputs, x)
                loss = tf.reduce_sum(gradient**2)
            sources = model.trainable_variables if of_weights else x
            return outer.gradient(loss, sources)

        with self.assertRaisesRegex(Exception, "no second derivatives in"):
            (tf.function(step) if compiled == "step" else step)()

    @parameterized.parameters(True, False)
    def test_losses_under_the_tape(self, compiled):
        model = pipelined(make_layers())
        x = tf.constant(make_data(7, 4))

        def step():
            with tf.GradientTape() as tape:
                loss = total(model(x, training=True)) + sum(model.losses)
            return tape.gradient(loss, model.trainable_variables)

        found = (tf.function(step) if compiled else step)()
        plain = keras.Sequential(make_layers())
        plain.set_weights(model.get_weights())
        with tf.GradientTape() as tape:
            loss = total(plain(x, training=True)) + sum(plain.losses)
        expected = tape.gradient(loss, plain.trainable_variables)
        for a, b in zip(expected, found, strict=True):
            self.assert_same_numbers(a, b)

    @parameterized.product(compiled=(True, False), schedule=SCHEDULES)
    def test_unused_output_rows(self, compiled, schedule):
        model = pipelined(make_layers(), schedule=schedule)
        x = tf.constant(make_data(7, 4))

        def run(function):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x)[5:] ** 2)
            return tape.gradient(loss, x)

        step = lambda: run(lambda x: model(x, training=True))
        found = (tf.function(step) if compiled else step)()
        self.assertAllEqual(found[:5], tf.zeros((5, 4)))
        self.assert_same_numbers(
            run(lambda x: one_by_one(model.layers, x)), found
        )


class StructureTest(LayerModeTest):
    @pairwise.product(
        remat=REMATS, schedule=SCHEDULES, compiled=("step", "call", None)
    )
    @pytest.mark.slow_after(1)
    def test_embedding_of_integers(self, remat, schedule, compiled):
        model = pipelined(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(6, 3),
                keras.layers.Dense(4, activation="tanh"),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ],
            remat=remat,
            schedule=schedule,
        )
        x = np.random.default_rng(2).integers(0, 6, size=(7, 4))
        self.assert_same_gradients(
            model, tf.constant(x.astype("int32")), compiled
        )

    @pairwise.product(
        remat=REMATS, schedule=SCHEDULES, compiled=("step", "call", None)
    )
    @pytest.mark.slow_after(1)
    def test_nested_between_stages(self, remat, schedule, compiled):
        model = pipelined(
            [keras.Input((4,)), keras.layers.Dense(4), Fork(), Cross()],
            remat=remat,
            schedule=schedule,
        )
        self.assert_same_gradients(
            model, tf.constant(make_data(7, 4)), compiled
        )

    @pairwise.product(
        remat=REMATS, schedule=SCHEDULES, compiled=("step", "call", None)
    )
    def test_nested_inputs(self, remat, schedule, compiled):
        model = pipelined([Cross(), Join()], 2, remat=remat, schedule=schedule)
        x = tf.constant(make_data(7, 5))
        inputs = (x[:, :3], {"a": x[:, 3:], "b": x[:, 1:]})
        model(inputs)
        self.assert_same_gradients(model, inputs, compiled)

    @pairwise.product(
        remat=REMATS, schedule=SCHEDULES, compiled=("step", "call", None)
    )
    @pytest.mark.slow_after(1)
    def test_integers_next_to_floats(self, remat, schedule, compiled):
        model = pipelined(
            [
                keras.Input((4,)),
                keras.layers.Dense(5, activation="tanh"),
                Tell(),
                LookUp(),
            ],
            remat=remat,
            schedule=schedule,
        )
        self.assert_same_gradients(
            model, tf.constant(make_data(7, 4)), compiled
        )

    @pairwise.product(
        schedule=SCHEDULES, num_stages=(1, 3), outputs=("int", "nested")
    )
    @pytest.mark.slow_after(1)
    def test_fit(self, schedule, num_stages, outputs):
        x = make_data(10, 4)
        if outputs == "int":
            make = lambda: [
                keras.Input((4,)),
                keras.layers.Dense(5, activation="tanh"),
                Tell(),
                LookUp(),
                First(),
            ]
            y = make_data(10, 5)
        else:
            make = lambda: [
                keras.Input((4,)),
                keras.layers.Dense(4),
                Fork(),
                Cross(),
            ]
            y = {"one": make_data(10, 3), "two": make_data(10, 1)}
        plain = keras.Sequential(make())
        model = pipelined(make(), num_stages, schedule=schedule)
        model.set_weights(plain.get_weights())
        for m in (plain, model):
            m.compile(keras.optimizers.SGD(0.05), "mse")
        options = dict(batch_size=4, epochs=2, shuffle=False, verbose=0)
        self.assert_same_numbers(
            plain.fit(x, y, **options).history["loss"],
            model.fit(x, y, **options).history["loss"],
        )
        for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
            self.assert_same_numbers(a, b)

    def test_same_tensor_twice(self):
        model = pipelined([Twice(), Join()], 2)
        x = tf.constant(make_data(7, 4))
        model(x)
        for compiled in ("step", "call", None):
            self.assert_same_gradients(model, x, compiled)


class Join(keras.layers.Layer):
    """Maps any nested structure to one tensor."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def build(self, shapes):
        if isinstance(shapes, dict):
            shapes = [shapes[key] for key in sorted(shapes)]
        self.dense.build((None, sum(shape[-1] for shape in shapes)))

    def call(self, inputs):
        return self.dense(
            keras.ops.concatenate(keras.tree.flatten(inputs), axis=-1)
        )


class Twice(keras.layers.Layer):
    def call(self, x):
        x = keras.ops.tanh(x)
        return x, x


class First(keras.layers.Layer):
    def call(self, inputs):
        return inputs[0]


if __name__ == "__main__":
    tf.test.main()
