"""What operations of a graph hold at a time."""

import keras
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.partition import tensor_memory

_SIDE = 8
_BYTES = 4 * _SIDE * _SIDE


def _in_place(x):
    y = x @ x
    return tf.exp(tf.exp(y) * 2.0)


def _elsewhere(x):
    y = x @ x
    return y @ y


def _used_again(x):
    y = x @ x
    return tf.exp(y) + y


def _both(x):
    y = x @ x
    return y, y @ y


def _aliases(x):
    y = tf.reshape(x @ x, [-1])
    return tf.reshape(tf.exp(y), [_SIDE, _SIDE])


def _many(x):
    made = [x @ x for _ in range(4)]
    made = [y @ y for y in made]
    return tf.add_n(made)


class PeakTest(parameterized.TestCase):
    @parameterized.parameters(
        (_in_place, 1),
        (_elsewhere, 2),
        (_used_again, 2),
        (_both, 2),
        (_aliases, 1),
        # The second of each pair while its operand is there.
        (_many, 5),
    )
    def test_by_hand(self, function, tensors):
        graph = (
            tf.function(function, autograph=False)
            .get_concrete_function(tf.TensorSpec((_SIDE, _SIDE)))
            .graph
        )
        operations = [
            x for x in graph.get_operations() if x.type != "Placeholder"
        ]
        found = tensor_memory.peak(operations, graph.outputs)
        # Constants are a few bytes.
        self.assertEqual(found // _BYTES, tensors)

    def test_a_backward_pass_that_holds_much(self):
        """Many gradients that meet at the end are there together."""

        @keras.saving.register_keras_serializable(package="test")
        class Fan(keras.layers.Layer):
            def build(self, shape):
                self.kernels = [
                    self.add_weight(shape=(shape[-1], shape[-1]))
                    for _ in range(12)
                ]

            def call(self, x):
                return sum(keras.ops.tanh(x @ w) for w in self.kernels)

            def compute_output_shape(self, shape):
                return shape

        def activations(layer):
            plan = tf_gpipe.plan(
                [layer],
                (256, 8),
                num_stages=1,
                num_micro_batches=1,
                remat="never",
            )
            return plan.stages[0].activation_bytes

        width = 256 * 8 * 4
        # Inputs; what twelve branches keep, and the gradient that each has for
        # the inputs.
        self.assertGreaterEqual(activations(Fan()), (1 + 12 + 12) * width)


class SlicesTest(parameterized.TestCase):
    def activations(self, tokens, num_micro_batches):
        inputs = keras.Input((10,), dtype="int32")
        layer = keras.layers.Embedding(50, 8)
        if tokens:
            outputs = layer(inputs)
        else:

            class Positions(keras.layers.Layer):
                def build(self, shape):
                    self.table = self.add_weight(shape=(50, 8))

                def call(self, x):
                    places = keras.ops.arange(x.shape[1])
                    return keras.ops.zeros_like(x, "float32")[
                        ..., None
                    ] + keras.ops.take(self.table, places, axis=0)

                def compute_output_spec(self, x):
                    return keras.KerasTensor((*x.shape, 8))

            outputs = Positions()(inputs)
        plan = tf_gpipe.plan(
            keras.Model(inputs, outputs),
            keras.KerasTensor((64, 10), "int32"),
            num_stages=1,
            num_micro_batches=num_micro_batches,
            remat="never",
        )
        return plan.stages[0].activation_bytes

    def test_there_for_each_micro_batch(self):
        for tokens in (True, False):
            one, eight = (self.activations(tokens, m) for m in (1, 8))
            # Of all tokens of the mini-batch: values, and what they are of.
            slices = 64 * 10 * (8 * 4 + 4)
            if tokens:
                self.assertGreaterEqual(eight, slices + 64 * 10 * 4)
            else:
                self.assertLess(eight, one)
                self.assertLess(eight, slices)
