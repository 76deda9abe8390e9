"""Calls of layers share costs where these are equal, and only there."""

import gc
import itertools
import weakref

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tf_gpipe.partition import layer_costs
from tf_gpipe.stage import model_graph

WIDTHS = (16, 64)


def function_of_closure(width):
    kernel = np.ones((16, width), "float32")

    def times(x):
        return ops.matmul(x, kernel)

    return L.Lambda(times)


def default_of_function(width):
    def times(x, kernel):
        return ops.matmul(x, kernel)

    times.__defaults__ = (np.ones((16, width), "float32"),)

    return L.Lambda(times)


class Untold(L.Layer):
    """A layer whose config does not tell its width."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.width))

    def call(self, x):
        return ops.matmul(x, self.kernel)

    def get_config(self):
        return L.Layer.get_config(self)


class Cutting(L.Layer):
    def call(self, x, kernel):
        return ops.matmul(x, kernel)


class OddConfig(L.Layer):
    """A layer with a config that JSON cannot hold."""

    def call(self, x):
        return x + 1

    def get_config(self):
        return {**super().get_config(), "table": {(0, 1): 2}}


# So that no other one has the id of an older one.
_KEPT = []


def traced(make):
    """Returns the `LayerCosts` of the model `make`, called on its input."""
    x = keras.Input((16,))
    graph = model_graph.of_model(keras.Model(x, make(x)))
    costs, specs = layer_costs.trace(graph)
    _KEPT.extend(costs)
    return [id(c) for c in costs], [
        specs[v].shape[-1] for n in graph.nodes for v in n.made
    ]


class EqualCallsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(function_of_closure, default_of_function, Untold)
    def test_layers_with_equal_configs_that_differ(self, make):
        first, second = map(make, WIDTHS)
        calls, widths = traced(lambda x: [first(x), second(x)])
        self.assertCountEqual(widths, WIDTHS)
        self.assertLen(set(calls), 2)

    def test_arguments_that_print_alike(self):
        arrays = [np.ones((16, n), "float32") for n in (2000, 3000)]
        calls, widths = traced(lambda x: [Cutting()(x, a) for a in arrays])
        self.assertCountEqual(widths, [2000, 3000])
        self.assertLen(set(calls), 2)

    @parameterized.parameters("flops", "memory", "time", "parameters")
    def test_cut(self, balance):
        """A model of such layers is cut, and trains."""
        model = tf_gpipe.PipelinedSequential(
            [
                keras.Input((16,)),
                function_of_closure(16),
                function_of_closure(64),
                L.Dense(8),
                L.Dense(1),
            ],
            num_stages=2,
            num_micro_batches=2,
            balance=balance,
            devices=["CPU:0"] * 2,
        )
        model.compile("sgd", "mse")
        model.train_on_batch(np.ones((4, 16)), np.ones((4, 1)))

    def test_equal_layers(self):
        """Names, weights and initial values do not matter."""
        table = np.ones((16, 16), "float32")
        constant = keras.initializers.Constant
        for make in (
            lambda i: L.Dense(16, "relu", name=f"dense_{i}"),
            lambda i: L.Dense(16, kernel_initializer=constant(table)),
            lambda i: L.Dense(16, kernel_initializer=constant(float("0.5"))),
            lambda i: Untold(16),
            lambda i: L.LayerNormalization(epsilon=1e-5),
        ):
            calls, _ = traced(lambda x, make=make: make(2)(make(1)(x)))
            self.assertLen(set(calls), 1)

    def test_trainable(self):
        first, second = L.Dense(16), L.Dense(16)
        second.trainable = False
        calls, _ = traced(lambda x: second(first(x)))
        self.assertLen(set(calls), 2)

    def test_calls_of_other_models(self):
        """Those of Keras's layers are found once, whatever the model."""

        class Own(L.Dense):
            pass

        for kind, count in ((L.Dense, 1), (Own, 2)):
            found = [traced(kind(16, "selu"))[0] for _ in range(2)]
            self.assertLen(set(itertools.chain(*found)), count)

    def test_large_initial_values(self):
        """They are not listed number by number."""
        table = np.zeros((400_000, 300), "float32")
        layers = [
            keras.Input((4,), dtype="int32"),
            L.Embedding(
                *table.shape,
                embeddings_initializer=keras.initializers.Constant(table),
            ),
        ]
        graph = model_graph.of_model(keras.Sequential(layers))
        key = layer_costs.key(graph.nodes[0], {x: x.spec for x in graph.inputs})
        self.assertLess(len(repr(key)), 10_000)

    def test_what_layers_hold_is_not_kept(self):
        class Holder:
            pass

        holder = Holder()
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4,)), Untold(2), L.Dense(1)],
            num_stages=2,
            devices=["CPU:0"] * 2,
        )
        model.layers[0].holder = holder
        model.rebalance("flops")
        holder.model = model
        found = weakref.ref(model)
        del holder, model
        gc.collect()
        self.assertIsNone(found())

    def test_config_that_json_cannot_hold(self):
        layers = [keras.Input((4,)), L.Dense(4), OddConfig(), L.Dense(1)]
        for balance in (None, "flops"):
            model = tf_gpipe.PipelinedSequential(
                layers, num_stages=2, balance=balance, devices=["CPU:0"] * 2
            )
            self.assertLen(model.stages, 2)


if __name__ == "__main__":
    tf.test.main()
