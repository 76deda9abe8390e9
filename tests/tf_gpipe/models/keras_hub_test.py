"""Tasks of KerasHub: their backbones are cut, with the plain task's numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.devices import KIND

keras_hub = pytest.importorskip("keras_hub")
SIZE, LENGTH, ROWS = 30, 8, 8
TOKENS = np.random.default_rng(0).integers(1, SIZE, (ROWS, LENGTH))
PADDING = np.where(np.arange(LENGTH) < 5 + np.arange(ROWS)[:, None] % 4, 1, 0)


def bert():
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=SIZE,
        num_layers=3,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=3, dropout=0.0
    )


def gpt2():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=SIZE,
        num_layers=3,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    return keras_hub.models.GPT2CausalLM(backbone)


def gemma():
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=SIZE,
        num_layers=3,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=8,
        dropout=0.0,
    )
    return keras_hub.models.GemmaCausalLM(backbone)


class KerasHubTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(bert, gpt2, gemma)
    def test_numbers(self, make):
        x = {"token_ids": TOKENS, "padding_mask": PADDING}
        shape = (ROWS, LENGTH)
        if make is bert:
            x["segment_ids"] = np.zeros_like(TOKENS)
            shape = (ROWS,)
        y = np.random.default_rng(1).integers(0, 3, shape)
        found = []
        for pipelined in (False, True):
            keras.backend.clear_session(free_memory=False)
            keras.utils.set_random_seed(1)
            model = make()
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model,
                    num_stages=3,
                    num_micro_batches=4,
                    devices=[f"{KIND}:{i}" for i in range(3)],
                )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss)
            logs = [model.train_on_batch(x, y) for _ in range(3)]
            found.append((model, logs, model.predict(x, verbose=0)))
        (plain, *expected), (model, *received) = found
        self.assertIsInstance(model, type(plain))
        self.assertAllClose(expected, received, rtol=1e-5, atol=1e-5)
        for a, b in zip(plain.variables, model.variables, strict=True):
            self.assertEqual(a.path, b.path)
            # Keys have no gradient by their bias, but for rounding.
            largest = max(np.abs(a).max(), 1e-3)
            self.assertAllClose(a, b, rtol=0, atol=1e-5 * largest)
        sizes = [stage.count_params() for stage in model.stages]
        self.assertLess(max(sizes), 0.5 * sum(sizes))
        for stage in model.stages:
            self.assertNotIn(model.backbone, stage.layers)


if __name__ == "__main__":
    tf.test.main()
