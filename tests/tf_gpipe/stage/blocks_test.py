"""Blocks that repeat are found, whatever they are made of."""

import keras
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.stage import blocks
from tf_gpipe.stage.graph import Graph

L = keras.layers


def _residual(x):
    h = L.Dense(4)(x)
    h = L.BatchNormalization()(h)
    return keras.ops.relu(x + h)


def _transformer(x):
    h = L.LayerNormalization()(x)
    x = x + L.MultiHeadAttention(2, 2)(h, h)
    h = L.LayerNormalization()(x)
    return x + L.Dense(4)(L.Dense(8, "gelu")(h))


def _times(count, *makers):
    """Returns a function that calls makers of layers in turn."""

    def make(x):
        for _ in range(count):
            for maker in makers:
                x = maker(x)
        return x

    return make


def _dense(x):
    return L.Dense(4, "relu")(x)


class BlocksTest(parameterized.TestCase, tf.test.TestCase):
    def lengths(self, make, balance, shape=(4,)):
        """Returns how many calls each block has."""
        inputs = keras.Input(shape)
        model = tf_gpipe.PipelinedModel(
            inputs, make(inputs), balance=balance, num_micro_batches=2
        )
        stages = model.stages
        nodes = [node for stage in stages for node in stage.nodes]
        graph = Graph(nodes, stages[0].inputs, stages[-1].outputs)
        counts = [len(stage.nodes) for stage in stages]
        found = blocks.find(graph, counts, counts)
        # Blocks are in the order of the pipeline, and none is in two stages.
        self.assertEqual([x for block in found for x in block.nodes], nodes)
        stage_of = {x: stage for stage in stages for x in stage.nodes}
        for block in found:
            self.assertLen({stage_of[x] for x in block.nodes}, 1)
        return [len(block.nodes) for block in found]

    def test_residual(self):
        # Each residual block has four calls; two of them are found at a time.
        found = self.lengths(_times(6, _residual), [16, 8])
        self.assertEqual(found, [8, 8, 8])

    def test_transformer(self):
        found = self.lengths(_times(4, _transformer), [14, 14], (3, 4))
        self.assertEqual(found, [7, 7, 7, 7])

    def test_between_others(self):
        def make(x):
            x = L.Dense(4, "tanh")(x)
            x = _times(4, _transformer)(x)
            return L.Dense(1)(x)

        found = self.lengths(make, [15, 15], (3, 4))
        self.assertEqual(found, [1, 7, 7, 7, 7, 1])

    def test_a_stage_ends_within_one(self):
        found = self.lengths(_times(4, _transformer), [17, 11], (3, 4))
        self.assertEqual(found, [7, 7, *[1] * 7, 7])

    def test_many_small_ones(self):
        found = self.lengths(_times(50, _dense), [25, 25])
        self.assertEqual(found, [8, 8, 8, 1] * 2)

    def test_large_ones(self):
        """A block's gradients are held together: it must be a small part."""

        def large(x):
            return L.Dense(600, "relu")(x)

        found = self.lengths(_times(40, large), [20, 20], (600,))
        self.assertEqual(found, [*[2] * 10] * 2)
        found = self.lengths(_times(8, large), [4, 4], (600,))
        self.assertEqual(found, [1] * 8)

    def test_one_layer_many_times(self):
        """Its gradients are added up in the order of plain Keras."""

        def make(x):
            one = L.Dense(4, "relu")
            return _times(8, lambda x: one(x))(x)

        self.assertEqual(self.lengths(make, [4, 4]), [1] * 8)

    def test_nothing_repeats(self):
        def make(x):
            for i in range(1, 6):
                x = L.Dense(i, "relu")(x)
            return x

        self.assertEqual(self.lengths(make, [2, 3]), [1] * 5)

    def test_what_others_take_ends_a_block(self):
        """A value within a block would be lost to layers that take it later."""

        def make(x):
            taken = []
            for _ in range(4):
                x = L.Dense(4, "relu")(x)
                x = L.Dense(4, "tanh")(x)
                taken.append(x)
                x = L.Dense(4, "gelu")(x)
            return L.Add()([x, *taken])

        # From one such value to the next there is one block.
        found = self.lengths(make, [8, 5])
        self.assertEqual(found, [1, 1, 3, 3, 3, 1, 1])

    def test_two_that_others_take_are_no_block(self):
        def make(x):
            taken = []
            for _ in range(4):
                h = L.Dense(4, "relu")(x)
                x = L.Dense(4, "tanh")(h)
                taken += [h, x]
            return L.Add()(taken)

        self.assertEqual(self.lengths(make, [4, 5]), [1] * 9)


if __name__ == "__main__":
    tf.test.main()
