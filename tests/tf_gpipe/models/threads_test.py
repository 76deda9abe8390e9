"""Several Python threads at once, with a model each, or one for all."""

import itertools
import random
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.devices import placement
from tf_gpipe.stage import seeds

_DEVICES = ["CPU:0", "CPU:1"]
_rng = np.random.default_rng(0)
_X = _rng.normal(size=(16, 6)).astype("float32")
_Y = _rng.normal(size=(16, 3)).astype("float32")


def _at_once(*functions):
    """Calls each function in a thread, and raises what one of them raises.

    Python switches threads as often as it can.
    """
    start = threading.Barrier(len(functions))
    errors = []

    def run(function):
        start.wait()
        try:
            function()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(f,)) for f in functions]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]


def _chain():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(3),
        ]
    )


def _branches():
    x = keras.Input((6,))
    a = keras.layers.Dense(8, activation="tanh")(x)
    b = keras.layers.Dense(8, activation="tanh")(a)
    return keras.Model(x, keras.layers.Dense(3)(keras.layers.Add()([a, b])))


def _piped(model, **kwargs):
    kwargs = {
        "num_stages": 2,
        "num_micro_batches": 2,
        "devices": _DEVICES,
        **kwargs,
    }
    if kwargs.get("schedule") == "interleaved":
        kwargs["num_stages"] = 4
    if isinstance(model, keras.Sequential):
        return tf_gpipe.PipelinedSequential(model, **kwargs)
    return tf_gpipe.PipelinedModel.from_model(model, **kwargs)


def _life(model, weights, eager=False):
    """Trains and evaluates a model. Returns its variables and outputs."""
    model.set_weights(weights)
    model.compile(
        keras.optimizers.Adam(0.05), "mse", metrics=["mae"], run_eagerly=eager
    )
    history = model.fit(_X, _Y, epochs=2, verbose=0, shuffle=False).history
    return [
        *model.get_weights(),
        *[np.asarray(v) for v in model.optimizer.variables],
        model.predict(_X, verbose=0),
        np.asarray(model(_X)),
        history["loss"],
        model.evaluate(_X, _Y, verbose=0),
    ]


def _assert_lives(rounds, kinds, **kwargs):
    lives = {}
    for make in (_chain, _branches):
        plain = make()
        weights = [_rng.normal(size=w.shape) for w in plain.weights]
        lives[make] = weights, _life(plain, weights)
    turns = itertools.cycle(itertools.product(kinds, lives))

    def life(kind, make):
        weights, expected = lives[make]
        model = _piped(make(), schedule=kind)
        received = _life(model, weights, **kwargs)
        for i, (a, b) in enumerate(zip(received, expected, strict=True)):
            np.testing.assert_allclose(
                a, b, rtol=1e-4, atol=1e-5, err_msg=f"{kind}, {i}"
            )

    for _ in range(rounds):
        _at_once(
            *(
                lambda turn=turn: life(*turn)
                for turn in itertools.islice(turns, 4)
            )
        )


class ThreadsTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_a_model_each(self):
        _assert_lives(1, ["gpipe", "zero_bubble"])

    @pytest.mark.slow
    def test_a_model_each_eagerly(self):
        _assert_lives(1, ["gpipe", "zero_bubble"], eager=True)

    @pytest.mark.slow
    def test_many_models(self):
        kinds = ["gpipe", "zero_bubble", "1f1b", "eager_1f1b", "interleaved"]
        kinds += ["eager_zero_bubble"]
        # Four threads at a time: each kind, with each model.
        _assert_lives(3, kinds)

    def test_variables_have_their_own_values(self):
        """TensorFlow alone mixes them up on devices other than the first."""
        shapes = [(3,), (8, 8), (6, 8), (8,), (16, 3)]

        def make():
            for shape in shapes * 30:
                with keras.StatelessScope(initialize_variables=False):
                    seed = random.Random(str(shape)).randint(1, 99)
                    variable = keras.Variable(
                        keras.initializers.RandomNormal(seed=seed), shape
                    )
                placement.place(variable, ["CPU:1"])
                self.assertEqual(tuple(variable.value.shape), shape)
                np.testing.assert_allclose(variable, expected[shape], rtol=1e-6)

        expected = {
            shape: keras.initializers.RandomNormal(
                seed=random.Random(str(shape)).randint(1, 99)
            )(shape)
            for shape in shapes
        }
        _at_once(*[make] * 4)

    def test_layers_that_run_eagerly(self):
        """`Reshape` and `Flatten`, to which each thread gives its own shape."""
        x = np.arange(64.0, dtype="float32").reshape(8, 8)
        weights: list = []

        def make(shape):
            model = tf_gpipe.PipelinedSequential(
                [
                    keras.Input((8,)),
                    keras.layers.Dense(8),
                    keras.layers.Reshape(shape),
                    keras.layers.Flatten(),
                    keras.layers.Reshape(shape[::-1]),
                ],
                num_stages=2,
                num_micro_batches=2,
                balance=[1, 3],
                devices=["CPU:1", "CPU:1"],
            )
            model.set_weights(weights or model.get_weights())
            return model

        models = [make(shape) for shape in ((2, 4), (8, 1), (4, 2), (1, 8))]
        weights = models[0].get_weights()

        def ask(model):
            model.set_weights(weights)
            expected = None
            for _ in range(30):
                with tf.GradientTape() as tape:
                    y = model(x, training=True)
                    loss = tf.reduce_sum(y * y)
                found = tape.gradient(loss, model.trainable_variables)
                received = [np.reshape(y, (8, 8)), *map(np.asarray, found)]
                if expected is None:
                    expected = [x @ weights[0] + weights[1]]
                    expected += [
                        2 * x.T @ expected[0],
                        2 * expected[0].sum(axis=0),
                    ]
                for a, b in zip(received, expected, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)

        _at_once(*(lambda model=model: ask(model) for model in models))

    @parameterized.parameters("gpipe", "1f1b")
    def test_one_model(self, schedule):
        model = _piped(_chain(), schedule=schedule)
        # With a learning rate of 0, the results of all threads are known.
        model.compile(keras.optimizers.SGD(0.0), "mse")
        expected = np.asarray(model(_X))
        loss = np.mean((expected - _Y) ** 2)

        def fit():
            for _ in range(3):
                history = model.fit(_X, _Y, verbose=0).history
                np.testing.assert_allclose(history["loss"], loss, rtol=1e-4)

        def predict():
            for _ in range(3):
                received = model.predict(_X, verbose=0)
                np.testing.assert_allclose(received, expected, atol=1e-5)

        def call():
            for _ in range(3):
                np.testing.assert_allclose(model(_X), expected, atol=1e-5)

        def gradients():
            for _ in range(3):
                with tf.GradientTape() as tape:
                    found = tf.reduce_mean((model(_X, training=True) - _Y) ** 2)
                np.testing.assert_allclose(found, loss, rtol=1e-4)
                self.assertNotIn(
                    None, tape.gradient(found, model.trainable_variables)
                )

        _at_once(fit, predict, call, gradients)

    def test_no_draw_is_undone(self):
        """Kernels drawn while others build pipelines are not drawn twice."""
        random.seed(3)
        drawn = []

        def draw():
            drawn.extend(random.random() for _ in range(20_000))

        def build():
            for _ in range(200):
                keras.src.backend.common.global_state.set_global_attribute(
                    "global_seed_generator", None
                )
                seeds.global_seed()

        _at_once(draw, build, build)
        random.seed(3)
        self.assertEqual(drawn, [random.random() for _ in range(20_000)])

    def test_the_seed_that_keras_would_draw(self):
        keras.utils.set_random_seed(5)
        keras.backend.clear_session(free_memory=False)
        (ours,) = seeds.global_seed()
        value, following = np.asarray(ours), random.random()
        keras.utils.set_random_seed(5)
        self.assertEqual(following, random.random())
        keras.utils.set_random_seed(5)
        keras.backend.clear_session(free_memory=False)
        np.testing.assert_array_equal(
            keras.src.random.seed_generator.global_seed_generator().state,
            value,
        )
