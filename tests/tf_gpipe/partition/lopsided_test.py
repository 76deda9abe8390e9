"""Warnings about uneven stages, and errors about layers that are not cut."""

import re
import warnings

import keras
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests.devices import KIND
from tests.tf_gpipe.partition.uncountable import Endless


class Block(L.Layer):
    """Several layers in one."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.inner = [L.Dense(units), L.Dense(16)]

    def build(self, input_shape):
        for layer in self.inner:
            layer.build(input_shape)
            input_shape = layer.compute_output_shape(input_shape)

    def call(self, x):
        return self.inner[1](self.inner[0](x))


class Own(keras.Model):
    """A model with a `call` of its own."""

    def call(self, x):
        return super().call(x)


def own(units):
    x = keras.Input((16,))
    return Own(x, L.Dense(16)(L.Dense(units)(x)), name="own")


def pipelined(*layers, num_stages=4, functional=False, **kwargs):
    kwargs["devices"] = [f"{KIND}:0"] * num_stages
    kwargs["num_stages"] = num_stages
    layers = [keras.Input((16,)), *layers]
    if not functional:
        return tf_gpipe.PipelinedSequential(layers, name="model", **kwargs)
    inner = keras.Sequential(layers)
    x = keras.Input((16,))
    model = keras.Model(x, inner(x), name="model")
    return tf_gpipe.PipelinedModel.from_model(model, **kwargs)


def small(number=3):
    return [L.Dense(16) for _ in range(number)]


class LopsidedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        functional=(True, False),
        large=(lambda: Block(2000, name="large"), lambda: own(2000)),
        balance=("parameters", "flops", "memory", lambda *_: None),
        place=(0, 2),
    )
    def test_is_told(self, functional, large, balance, place):
        layers = small()
        layers.insert(place, layer := large())
        what = balance
        if callable(balance):
            what = "cost"

            def balance(x, _):
                return 90 if x is layer else 1

        with self.assertWarnsRegex(
            UserWarning,
            rf"Stage {place} of model 'model' has 9\d% of the {what}, where "
            rf"each of 4 stages should have 25%.*Layer '{layer.name}' \(of "
            rf"type {type(layer).__name__}\) alone.*num_stages=1",
        ) as caught:
            pipelined(*layers, functional=functional, balance=balance)
        told = "functional model" in str(caught.warning)
        self.assertEqual(told, isinstance(layer, keras.Model))

    @parameterized.parameters(
        # Less than twice its share.
        dict(units=(300, 300, 16, 300, 450)),
        # Tiny.
        dict(units=(2, 2, 50, 2)),
        # One of two stages cannot have more than twice its share.
        dict(units=(1000, 200, 16), num_stages=2),
        dict(units=(2000, 16), num_stages=1),
        # The user gave the cut.
        dict(units=(2000, 16, 16, 16), balance=[1, 1, 1, 1]),
    )
    def test_is_not_told(self, units, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipelined(*(Block(n) for n in units), **kwargs)

    def test_of_two_stages(self):
        with self.assertWarnsRegex(UserWarning, "Stage 1 .* has 100%"):
            pipelined(L.Dense(16), Block(3000), num_stages=2)

    def test_what_it_advises(self):
        """`num_stages` is the whole cost, divided by the layer's."""
        layers = [Block(n) for n in (1000, 1000, 3000, 16, 16, 16, 16, 16)]
        with self.assertWarnsRegex(UserWarning, "num_stages=1,"):
            pipelined(*layers, num_stages=8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipelined(*layers, num_stages=1)

    def test_opened_models_are_even(self):
        inner = keras.Sequential([Block(500) for _ in range(8)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = pipelined(inner, L.Dense(16), functional=True)
        sizes = [stage.count_params() for stage in model.stages]
        self.assertLess(max(sizes), 1.1 * min(sizes))

    def test_rebalance(self):
        model = pipelined(*small(), Block(2000), balance=[1, 1, 1, 1])
        with self.assertWarnsRegex(UserWarning, "Stage 3 "):
            model.rebalance("parameters")


class SummaryTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ([2, 2], 0, 3), ([1, 3], 33, 36), ([3, 1], 33, 36)
    )
    def test_bubble_of_these_stages(self, balance, least, most):
        layers = [L.Dense(16, use_bias=False) for _ in range(4)]
        model = pipelined(
            *layers,
            num_stages=2,
            balance=balance,
            num_micro_batches=64,
            remat="never",
        )
        printed = []
        model.summary(print_fn=lambda x, **_: printed.append(x))
        (bubble,) = re.findall(
            r"bubble\s+([\d.]+)%\s+of\s+the\s+time,\s+by\s+the\s+operations",
            printed[-1],
        )
        self.assertBetween(float(bubble), least, most)

    def test_operations_that_cannot_be_counted(self):
        model = pipelined(L.Dense(16), Endless(), num_stages=2)
        printed = []
        model.summary(print_fn=lambda x, **_: printed.append(x))
        self.assertRegex(
            " ".join(printed[-1].split()), "of the time if stages were equal"
        )


class UncutTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        functional=(True, False),
        large=(lambda: Block(4, name="large"), lambda: own(4)),
    )
    def test_layer_that_is_one(self, functional, large):
        layer = large()
        with self.assertRaisesRegex(
            ValueError,
            rf"num_stages=4, 3 layers\. Layer '{layer.name}' \(of type "
            rf"{type(layer).__name__}\) has \d layers in it",
        ):
            pipelined(*small(2), layer, functional=functional)

    def test_layers_without_others(self):
        names = ["a", "b", "c"]
        with self.assertRaisesRegex(
            ValueError, "3 layers. They are 'a', 'b', 'c'; a layer is not cut."
        ):
            pipelined(*(L.Dense(16, name=x) for x in names))


if __name__ == "__main__":
    tf.test.main()
