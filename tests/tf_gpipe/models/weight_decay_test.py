"""Weights that an optimizer does not decay, and other looks at variables."""

import re

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L  # noqa: N812

import tf_gpipe
from tf_gpipe.devices import slots

TWO = {"num_stages": 2, "num_micro_batches": 2, "devices": ["CPU:0", "CPU:1"]}
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def plain(named="model"):
    keras.utils.set_random_seed(1)
    x = keras.Input((4,))
    y = L.Dense(4, "tanh", name="first")(x)
    y = L.LayerNormalization(name="layer_norm")(y)
    y = L.Dense(4, name="embedding")(y)
    return keras.Model(x, y, name=named)


def deferred():
    keras.utils.set_random_seed(1)
    layers = [
        L.Dense(4, "tanh", name="first"),
        L.LayerNormalization(name="layer_norm"),
        L.Dense(4, name="embedding"),
    ]
    return layers


def named(model):
    """Returns the names of TensorFlow's variables, without the model's."""
    return [
        re.sub(r"^[^/]*/(?=[^/]*/)", "", v.value.name) for v in model.weights
    ]


def optimizer(**excluded):
    made = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    made.exclude_from_weight_decay(**excluded)
    return made


def trained(model, made):
    model.compile(made, "mse")
    for _ in range(2):
        model.train_on_batch(X, X)
    return model.get_weights()


class WeightDecayTest(tf.test.TestCase, parameterized.TestCase):
    def pipelines(self):
        yield "moved", tf_gpipe.PipelinedModel.from_model(plain(), **TWO)
        yield (
            "built",
            tf_gpipe.PipelinedSequential(
                [keras.Input((4,)), *deferred()], **TWO
            ),
        )
        keras.utils.set_random_seed(1)
        made = tf_gpipe.PipelinedSequential(deferred(), **TWO)
        made.build((None, 4))
        yield "built later", made

    def test_names(self):
        expected = named(plain())
        for kind, model in self.pipelines():
            self.assertEqual(named(model), expected, kind)
            model.rebalance([1, 2])
            self.assertEqual(named(model), expected, kind)

    @parameterized.parameters(
        [["layer_norm"]], [["embedding"]], [["bias", "gamma"]], [["first/k"]]
    )
    def test_patterns(self, names):
        expected = trained(plain(), optimizer(var_names=names))
        for kind, model in self.pipelines():
            received = trained(model, optimizer(var_names=names))
            for a, b in zip(expected, received, strict=True):
                self.assertAllClose(a, b, msg=kind, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(
        ("before",), ("rebalance",), ("both",), ("before", True)
    )
    def test_variables_that_move(self, when, chosen=False):
        """Named before the optimizer is built, and moved then."""

        def excluded(model):
            layers = {x.name: x for x in model.layers}
            made = optimizer(
                var_list=[layers["first"].kernel, layers["embedding"].bias]
            )
            if not chosen:
                return made
            return keras.optimizers.MultiOptimizer(lambda variable: made)

        model = plain()
        expected = trained(model, excluded(model))
        model = plain()
        made = excluded(model)
        piped = tf_gpipe.PipelinedModel.from_model(model, **TWO)
        if when == "rebalance":
            made = excluded(piped)
        if when != "before":
            piped.compile(made, "mse")
            piped.rebalance(
                [2, 1] if len(piped.stages[0].nodes) == 1 else [1, 2]
            )
        for a, b in zip(expected, trained(piped, made), strict=True):
            self.assertAllClose(a, b, rtol=1e-5, atol=1e-6)


class OtherTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01))
        ),
    )
    def test_an_optimizer_that_a_plain_model_has_built(self, make):
        model = plain()
        made = make()
        trained(model, made)
        expected = trained(model, made)
        model = plain()
        made = make()
        trained(model, made)
        piped = tf_gpipe.PipelinedModel.from_model(model, **TWO)
        for a, b in zip(expected, trained(piped, made), strict=True):
            self.assertAllClose(a, b, rtol=1e-5, atol=1e-6)
        weights = piped.trainable_variables
        for weight, own in zip(
            weights, slots.of_optimizer(made, weights), strict=True
        ):
            self.assertLen(own, 2)
            for slot in own:
                self.assertEqual(slot.value.device, weight.value.device)

    @parameterized.parameters("from_model", "sequential", "to_keras")
    def test_loss_scale(self, how):
        """`compile` scales losses of a float16 model, as in plain Keras."""
        keras.config.set_dtype_policy("mixed_float16")
        self.addCleanup(keras.config.set_dtype_policy, "float32")
        model = plain()
        if how == "sequential":
            model = keras.Sequential([keras.Input((4,)), *deferred()])
        keras.config.set_dtype_policy("float32")
        if how == "sequential":
            model = tf_gpipe.PipelinedSequential(model, **TWO)
        else:
            model = tf_gpipe.PipelinedModel.from_model(model, **TWO)
        if how == "to_keras":
            model = model.to_keras()
        model.compile("adam", "mse")
        self.assertIsInstance(
            model.optimizer, keras.optimizers.LossScaleOptimizer
        )

    def test_two_pipelines_of_layers_whose_optimizer_is_built(self):
        """A model that is loaded has its optimizer before its first step."""
        first = tf_gpipe.PipelinedModel.from_model(plain(), **TWO)
        first.compile("adam", "mse")
        first.optimizer.build(first.trainable_variables)
        second = tf_gpipe.PipelinedModel.from_model(
            first.to_keras(), num_stages=3, devices=["CPU:2", "CPU:3", "CPU:4"]
        )
        first.fit(X, X, verbose=0)
        second.compile("adam", "mse")
        second.fit(X, X, verbose=0)
        first.fit(X, X, verbose=0)


if __name__ == "__main__":
    tf.test.main()
