"""KerasHub's tasks: backbones are cut, and numbers equal the plain task's."""

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

TEXTS = ["abab", "ba", "a", "bbb"]


def _preprocessor():
    names = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "ab"]
    return keras_hub.models.GPT2CausalLMPreprocessor(
        keras_hub.models.GPT2Tokenizer(
            {x: i for i, x in enumerate(names)}, merges=["a b"]
        ),
        sequence_length=LENGTH,
    )


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


def gpt2(preprocessor=None):
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=SIZE,
        num_layers=3,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor)


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
    @pytest.mark.slow_after(1)
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
            # The bias of attention keys has no gradient, but for rounding.
            largest = max(np.abs(a).max(), 1e-3)
            self.assertAllClose(a, b, rtol=0, atol=1e-5 * largest)
        sizes = [stage.count_params() for stage in model.stages]
        self.assertLess(max(sizes), 0.5 * sum(sizes))
        for stage in model.stages:
            self.assertNotIn(model.backbone, stage.layers)

    @pytest.mark.slow
    def test_texts(self):
        """A task with a preprocessor takes texts, as people use it."""
        found = []
        for pipelined in (False, True):
            keras.backend.clear_session(free_memory=False)
            keras.utils.set_random_seed(1)
            model = gpt2(_preprocessor())
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model,
                    num_stages=2,
                    num_micro_batches=2,
                    devices=[f"{KIND}:{i}" for i in range(2)],
                )
            model.compile(keras.optimizers.SGD(1.0), sampler="greedy")
            logs = model.fit(
                TEXTS, batch_size=4, epochs=2, shuffle=False, verbose=0
            ).history
            logs["evaluated"] = model.evaluate(TEXTS, verbose=0)
            found.append((model, logs, model.generate(TEXTS, max_length=8)))
        (plain, expected, said), (model, logs, received) = found
        self.assertEqual(said, received)
        self.assertAllClose(expected, logs, rtol=1e-5)
        folder = self.get_temp_dir()
        model.save_to_preset(folder)
        loaded = keras_hub.models.CausalLM.from_preset(folder)
        self.assertIs(type(loaded), type(plain))
        loaded.compile(sampler="greedy")
        self.assertEqual(loaded.generate(TEXTS, max_length=8), said)
        plain = model.to_keras()
        self.assertIs(type(plain), type(loaded))
        plain.compile(sampler="greedy")
        self.assertEqual(plain.generate(TEXTS, max_length=8), said)

    @pytest.mark.slow
    def test_lora(self):
        """LoRA may be enabled before or after the pipeline is made."""
        x = {"token_ids": TOKENS, "padding_mask": PADDING}
        found = []
        for when in ("plain", "before", "after"):
            keras.backend.clear_session(free_memory=False)
            keras.utils.set_random_seed(1)
            model = gpt2()
            if when != "after":
                model.backbone.enable_lora(2)
            if when != "plain":
                model = tf_gpipe.PipelinedModel.from_model(
                    model,
                    num_stages=2,
                    num_micro_batches=2,
                    devices=[f"{KIND}:{i}" for i in range(2)],
                )
            if when == "after":
                model.backbone.enable_lora(2)
            model.compile(keras.optimizers.SGD(1.0))
            logs = model.fit(x, TOKENS, shuffle=False, epochs=2, verbose=0)
            found.append((model, logs.history))
        (plain, expected), *others = found
        self.assertNotEmpty(
            [v for v in plain.trainable_variables if "lora" in v.path]
        )
        for model, logs in others:
            self.assertAllClose(expected, logs, rtol=1e-5)
            for a, b in zip(plain.variables, model.variables, strict=True):
                self.assertEqual(a.path, b.path)
                self.assertAllClose(a, b, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    tf.test.main()
