import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import model_zoo
import tf_gpipe
from model_zoo.transformer_lm import transformer_lm

SMALL = {
    "num_layers": 3,
    "dim": 16,
    "ffn_dim": 32,
    "num_heads": 2,
    "vocabulary": 11,
    "length": 7,
}


def tokens(rows=4, seed=0):
    return np.random.default_rng(seed).integers(0, 11, (rows, 7))


class TransformerLmTest(tf.test.TestCase, parameterized.TestCase):
    # The parameters in the GPipe paper's Table 1.
    @parameterized.parameters(
        (3, 282.2e6), (13, 785.8e6), (103, 5.3e9), (415, 21.0e9), (1663, 83.9e9)
    )
    def test_parameters(self, num_layers, expected):
        # All blocks are alike, so two sizes tell the others.
        counts = []
        for layers in (1, 2):
            with keras.StatelessScope(initialize_variables=False):
                model = keras.Sequential(transformer_lm(layers))
            counts.append(sum(int(np.prod(w.shape)) for w in model.weights))
        first, second = counts
        count = first + (num_layers - 1) * (second - first)
        self.assertAllClose(count, expected, rtol=0.005)

    def test_logits_do_not_see_later_tokens(self):
        model = keras.Sequential(transformer_lm(**SMALL))
        x = tokens()
        logits = model.predict(x, verbose=0)
        self.assertEqual(logits.shape, (4, 7, 11))
        changed = x.copy()
        changed[:, 4] = (changed[:, 4] + 1) % 11
        others = model.predict(changed, verbose=0)
        self.assertAllClose(logits[:, :4], others[:, :4])
        self.assertNotAllClose(logits[:, 4:], others[:, 4:])

    def test_positions_matter(self):
        model = keras.Sequential(transformer_lm(**SMALL))
        logits = model.predict(np.ones((1, 7), int), verbose=0)
        self.assertNotAllClose(logits[:, 0], logits[:, 1])

    def test_any_length(self):
        keras.utils.set_random_seed(0)
        fixed = keras.Sequential(transformer_lm(**SMALL))
        free = keras.Sequential(transformer_lm(**{**SMALL, "length": None}))
        free.set_weights(fixed.get_weights())
        x = tokens()
        self.assertAllClose(fixed(x), free(x))
        self.assertAllClose(fixed(x)[:, :5], free(x[:, :5]))

    def test_dropout(self):
        model = keras.Sequential(transformer_lm(**SMALL, dropout=0.5))
        x = tokens()
        self.assertAllClose(model(x), model(x))
        self.assertNotAllClose(model(x, training=True), model(x, training=True))

    @parameterized.parameters("float32", "mixed_float16", "mixed_bfloat16")
    @pytest.mark.slow
    def test_trains_as_a_pipeline(self, policy):
        previous = keras.config.dtype_policy()
        self.addCleanup(keras.config.set_dtype_policy, previous)
        keras.config.set_dtype_policy(policy)
        x = tokens(8)
        losses = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(0)
            layers = transformer_lm(**SMALL)
            model = keras.Sequential(layers)
            if pipelined:
                model = tf_gpipe.PipelinedSequential(
                    layers, num_stages=3, num_micro_batches=4
                )
            model.compile(
                keras.optimizers.Adam(0.01),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            losses.append(
                [model.train_on_batch(x[:, :], x[:, :]) for _ in range(3)]
            )
        tolerance = 1e-4 if policy == "float32" else 2e-2
        self.assertAllClose(*losses, rtol=tolerance)
        self.assertLess(losses[0][-1], losses[0][0])

    def test_saving(self):
        model = keras.Sequential(transformer_lm(**SMALL))
        path = pathlib.Path(self.get_temp_dir(), "model.keras")
        model.save(path)
        x = tokens()
        self.assertAllClose(keras.saving.load_model(path)(x), model(x))

    def test_by_name(self):
        layers = model_zoo.get("transformer_lm", **SMALL)
        self.assertLen(layers, 8)

    @parameterized.parameters({"dim": 15}, {"num_heads": 3})
    def test_sizes_that_do_not_fit(self, **sizes):
        with self.assertRaisesRegex(ValueError, "multiple of `num_heads`"):
            transformer_lm(**{**SMALL, **sizes})


if __name__ == "__main__":
    tf.test.main()
