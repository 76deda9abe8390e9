"""Loss and metrics of tokens, against plain formulas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tf_gpipe
from model_zoo.transformer_nmt import transformer_nmt
from trainers.token_losses import SmoothedCrossentropy
from trainers.token_losses import TokenMean
from trainers.token_losses import token_metrics

VOCABULARY = 7


def log_probs(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def smoothed(labels, logits, share):
    """Returns each token's cross-entropy, with label smoothing of `share`."""
    logs = log_probs(logits)
    own = np.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]
    return -(1 - share) * own - share * logs.mean(axis=-1)


def model():
    return transformer_nmt(
        1, ffn_dim=8, num_heads=2, dim=8, vocabulary=VOCABULARY, head_size=4
    )


def batch(rows, length, seed=0):
    """Tokens of texts of different lengths."""
    random = np.random.default_rng(seed)
    source, target, labels = random.integers(1, VOCABULARY, (3, rows, length))
    lengths = random.integers(1, length + 1, (rows, 1))
    lengths[0] = length
    inside = np.arange(length) < lengths
    return {"source": source, "target": target * inside}, labels * inside


class SmoothedCrossentropyTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(0.0, 0.1, 1.0)
    def test_formula(self, share):
        random = np.random.default_rng(0)
        labels = random.integers(0, VOCABULARY, (3, 4))
        logits = random.normal(size=(3, 4, VOCABULARY)).astype("float32")
        loss = SmoothedCrossentropy(share, reduction=None)
        expected = smoothed(labels, logits, share)
        self.assertAllClose(loss(labels, logits), expected, rtol=1e-5)
        if not share:
            plain = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=None
            )
            self.assertAllClose(plain(labels, logits), expected, rtol=1e-5)

    @parameterized.parameters("gpipe", "1f1b")
    @pytest.mark.slow_after(1)
    def test_masked_tokens_of_a_pipeline(self, schedule):
        pipeline = tf_gpipe.PipelinedModel.from_model(
            model(), num_stages=2, num_micro_batches=3, schedule=schedule
        )
        pipeline.compile(
            keras.optimizers.SGD(0.0),
            SmoothedCrossentropy(0.2),
            metrics=token_metrics(),
        )
        x, y = batch(5, 6)
        logits = pipeline(x).numpy()
        inside = x["target"] > 0
        self.assertLess(inside.mean(), 0.9)
        found = pipeline.train_on_batch(x, y, return_dict=True)
        expected = {
            "loss": smoothed(y, logits, 0.2)[inside].mean(),
            "cross_entropy": smoothed(y, logits, 0.0)[inside].mean(),
            "accuracy": (logits.argmax(axis=-1) == y)[inside].mean(),
        }
        self.assertAllClose(found, expected, rtol=1e-5)

    def test_saving(self):
        loss = SmoothedCrossentropy(0.3, reduction="sum", name="other")
        config = keras.saving.serialize_keras_object(loss)
        loaded = keras.saving.deserialize_keras_object(config)
        self.assertEqual(loaded.get_config(), loss.get_config())
        self.assertEqual(loaded.label_smoothing, 0.3)

    @parameterized.parameters(-0.1, 1.1)
    def test_share(self, share):
        with self.assertRaisesRegex(ValueError, f"label_smoothing={share}"):
            SmoothedCrossentropy(share)


class TokenMeanTest(tf.test.TestCase):
    def test_all_tokens_count_alike(self):
        network = model()
        network.compile(metrics=token_metrics())
        # Keras takes the mean over each text first: tokens of long texts would
        # count less.
        batches = [batch(4, 2), batch(3, 9, seed=1)]
        values = {"cross_entropy": [], "accuracy": []}
        metrics = {metric.name: metric for metric in token_metrics()}
        for x, y in batches:
            inside = x["target"] > 0
            outputs = network(x)
            logits = outputs.numpy()
            values["cross_entropy"] += [*smoothed(y, logits, 0.0)[inside]]
            values["accuracy"] += [*(logits.argmax(axis=-1) == y)[inside]]
            for metric in metrics.values():
                metric.update_state(y, outputs)
        for name, metric in metrics.items():
            self.assertAllClose(
                metric.result(), np.mean(values[name]), rtol=1e-5
            )

    def test_sample_weights(self):
        metric = TokenMean(keras.metrics.sparse_categorical_accuracy)
        logits = np.eye(3)[[[0, 1], [2, 2]]]
        weights = np.array([[3.0, 2.0], [1.0, 0.0]])
        metric.update_state(np.array([[0, 2], [0, 2]]), logits, weights)
        self.assertAllClose(metric.result(), 3 / 6)

    def test_saving(self):
        for metric in token_metrics():
            config = keras.saving.serialize_keras_object(metric)
            loaded = keras.saving.deserialize_keras_object(config)
            self.assertEqual(loaded.get_config(), metric.get_config())


if __name__ == "__main__":
    absltest.main()
