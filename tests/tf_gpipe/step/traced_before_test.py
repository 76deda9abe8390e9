"""Traces are used again where the same would be traced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe

L = keras.layers


class Counting(L.Layer):
    """A user's layer, which may do anything when it is traced."""

    factor = 1.0

    def call(self, x):
        return x * self.factor


def _layers(extra=()):
    return [
        L.Input((4,)),
        L.Dense(6, "relu"),
        L.BatchNormalization(),
        L.Dropout(0.5, seed=1),
        *extra,
        L.Rescaling(0.5),
        L.Dense(3),
    ]


def _data(rows=8):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, rng.normal(size=(rows, 3)).astype("float32")


class TracedBeforeTest(parameterized.TestCase, tf.test.TestCase):
    def model(self, extra=()):
        keras.utils.set_random_seed(1)
        return tf_gpipe.PipelinedSequential(
            _layers(extra),
            num_stages=2,
            num_micro_batches=2,
            devices=["CPU:0", "CPU:1"],
        )

    def compile(self, model):
        model.compile(keras.optimizers.SGD(0.1), "mse")

    def traces(self, function):
        """Returns how often `Dense` layers are called while a function runs."""
        calls = []
        original = L.Dense.call

        def call(layer, *args, **kwargs):
            calls.append(layer)
            return original(layer, *args, **kwargs)

        L.Dense.call = call
        try:
            function()
        finally:
            L.Dense.call = original
        return len(calls)

    @pytest.mark.slow
    def test_fit_after_compile(self):
        x, y = _data()
        model, plain = self.model(), self.model()
        counts = []
        for each in (model, plain):
            for _ in range(3):
                self.compile(each)
                if each is plain:
                    # Forgets all traces.
                    each._pipeline.traced.clear()
                counts.append(
                    self.traces(
                        lambda each=each: each.fit(
                            x, y, verbose=0, shuffle=False
                        )
                    )
                )
        self.assertGreater(counts[0], 0)
        self.assertEqual(counts[1:3], [0, 0])
        self.assertGreater(counts[4], 0)
        for a, b in zip(model.variables, plain.variables, strict=True):
            self.assertAllEqual(a, b)

    def test_inference_after_compile(self):
        x, y = _data()
        model = self.model()
        for i in range(2):
            self.compile(model)
            for run in (
                lambda: model.evaluate(x, y, verbose=0),
                lambda: model.predict(x, verbose=0),
            ):
                found = self.traces(run)
                (self.assertEqual if i else self.assertGreater)(found, 0)

    @pytest.mark.slow
    def test_equal_layers_in_inference(self):
        """Equal layers are traced once, and give the plain model's numbers."""
        x = np.random.default_rng(0).normal(size=(16, 8, 4)).astype("float32")
        y = x[..., :3]

        def layers():
            keras.utils.set_random_seed(1)
            inputs = outputs = L.Input((8, 4))
            for _ in range(9):
                h = L.MultiHeadAttention(2, 2)(outputs, outputs)
                h = L.BatchNormalization()(L.Dense(4, "relu")(h))
                outputs = L.Add()([outputs, L.Dropout(0.5)(h)])
            return inputs, L.Dense(3)(outputs)

        model = tf_gpipe.PipelinedModel(
            *layers(),
            balance=[15, 15, 16],
            num_micro_batches=4,
            devices=["CPU:0", "CPU:1", "CPU:2"],
        )
        plain = keras.Model(*layers())
        for each in (model, plain):
            self.compile(each)
        found = []

        def evaluate():
            found.append(model.evaluate(x, y, batch_size=8, verbose=0))

        # There are ten, and most of them are in equal blocks.
        self.assertBetween(self.traces(evaluate), 2, 5)
        self.assertEqual(
            self.traces(
                lambda: found.append(model.predict(x, batch_size=8, verbose=0))
            ),
            0,
        )
        self.assertAllClose(
            found[0], plain.evaluate(x, y, batch_size=8, verbose=0)
        )
        self.assertAllClose(
            found[1], plain.predict(x, verbose=0), rtol=1e-4, atol=1e-5
        )
        # Weights that have changed since are read anew.
        for each in (model, plain):
            each.set_weights([0.5 * w for w in each.get_weights()])
        for rows in (16, 11):
            self.assertAllClose(
                model.evaluate(x[:rows], y[:rows], batch_size=8, verbose=0),
                plain.evaluate(x[:rows], y[:rows], batch_size=8, verbose=0),
            )

    def test_gradients_in_inference(self):
        """A user's step takes gradients, or a tape around one does."""
        x, y = _data()

        def in_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(self(x, training=False) ** 2)
            return {"norm": tf.norm(tape.gradient(loss, x))}

        found = []
        for cls in (tf_gpipe.PipelinedSequential, keras.Sequential):

            class Model(cls):
                test_step = in_step

            keras.utils.set_random_seed(1)
            pipelined = {"num_stages": 2, "devices": ["CPU:0", "CPU:1"]}
            model = Model(
                _layers(), **(pipelined if cls is not keras.Sequential else {})
            )
            self.compile(model)
            results = [model.evaluate(x, y, verbose=0)]
            model.predict(x, verbose=0)
            step = tf.function(lambda x, model=model: model.predict_step((x,)))
            step(tf.constant(x))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(step(tf.constant(x)) ** 2)
            results += tape.gradient(loss, model.trainable_variables)
            found.append(results)
        for a, b in zip(*found, strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=1e-5)

    @parameterized.named_parameters(
        ("rate", lambda m: setattr(m.layers[2], "rate", 0.0)),
        ("frozen", lambda m: setattr(m.layers[0], "trainable", False)),
        (
            "activation",
            lambda m: setattr(m.layers[0], "activation", keras.ops.tanh),
        ),
        ("global_state", lambda m: keras.config.set_epsilon(1e-3)),
        ("checks", lambda m: tf.debugging.enable_check_numerics()),
    )
    def test_what_has_changed(self, change):
        self.addCleanup(keras.config.set_epsilon, keras.config.epsilon())
        self.addCleanup(tf.debugging.disable_check_numerics)
        x, y = _data()
        model, plain = self.model(), self.model()
        for each in (model, plain):
            self.compile(each)
            each.fit(x, y, verbose=0, shuffle=False)
            change(each)
            self.compile(each)
            if each is plain:
                each._pipeline.traced.clear()
            run = lambda each=each: each.fit(x, y, verbose=0, shuffle=False)
            self.assertGreater(self.traces(run), 0)
        for a, b in zip(model.variables, plain.variables, strict=True):
            self.assertAllEqual(a, b)

    def test_layers_of_others(self):
        """A user's layer may depend on what is nowhere in the layer."""
        self.addCleanup(setattr, Counting, "factor", 1.0)
        x, y = _data()
        model = self.model([Counting()])
        self.compile(model)
        before = model.predict(x, verbose=0)
        Counting.factor = 2.0
        self.compile(model)
        after = model.predict(x, verbose=0)
        self.assertNotAllClose(before, after)

    def test_twice_in_a_graph(self):
        """Each call, and its gradient, uses the weights at its time."""
        x, _ = _data()
        found = []
        for each in (self.model(), keras.Sequential(_layers())):
            layers = [v for v in each.layers if isinstance(v, L.Dense)]
            rng = np.random.default_rng(1)
            for w in each.trainable_variables:
                w.assign(rng.normal(size=w.shape))

            @tf.function
            def twice(each=each, layers=layers):
                with tf.GradientTape(persistent=True) as tape:
                    first = tf.reduce_sum(each(x, training=False) ** 2)
                    with tape.stop_recording():
                        kernel = layers[1].kernel
                        kernel.assign(2 * kernel)
                    second = tf.reduce_sum(each(x, training=False) ** 2)
                weights = layers[0].kernel.value
                return (
                    first,
                    second,
                    tape.gradient(first, weights),
                    tape.gradient(second, weights),
                )

            found.append(twice())
        for a, b in zip(*found, strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=1e-4)

    def test_other_rows(self):
        x, y = _data(12)
        model = self.model()
        self.compile(model)
        for rows in (12, 5, 12):
            model.fit(x[:rows], y[:rows], batch_size=8, verbose=0)
        self.compile(model)

        def fit():
            for rows in (12, 5, 12):
                model.fit(x[:rows], y[:rows], batch_size=8, verbose=0)

        self.assertEqual(self.traces(fit), 0)


if __name__ == "__main__":
    tf.test.main()
