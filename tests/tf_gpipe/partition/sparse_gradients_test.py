"""Sparse gradients of embeddings are kept for each micro-batch."""

import keras
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import peak_activations


class SparseGradientsTest(parameterized.TestCase):
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
            # Values and indices of all tokens of the mini-batch.
            slices = 64 * 10 * (8 * 4 + 4)
            if tokens:
                self.assertGreaterEqual(eight, slices + 64 * 10 * 4)
            else:
                self.assertLess(eight, one)
                self.assertLess(eight, slices)

    @parameterized.parameters(
        # The activations of three micro-batches, and one backward pass.
        (4, 3 * 11 + 3),
        # At the end of the step, all slices and their concatenation.
        (20, 2 * 3 * 20),
    )
    def test_peak_by_hand(self, slices, peak):
        sizes = {0: Sizes(inputs=1, stored=10, temporary=3, slices=slices)}
        self.assertEqual(
            peak_activations(schedules.gpipe(2, 3), "never", sizes), peak
        )
