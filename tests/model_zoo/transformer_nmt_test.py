import gc
import itertools
import pathlib
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from model_zoo.decoding import decode
from model_zoo.transformer_nmt import transformer_nmt
from model_zoo.transformer_nmt_layers import SharedEmbedding
from tests.tf_gpipe import comparison

SMALL = {
    "num_layers": 2,
    "ffn_dim": 32,
    "num_heads": 2,
    "dim": 16,
    "vocabulary": 11,
    "head_size": 8,
}
START, END = 1, 2


def tokens(shape, seed=0):
    """Tokens that are no padding."""
    return np.random.default_rng(seed).integers(1, 11, shape)


def batch(seed=0):
    """Sources and targets of several lengths, padded to 6 and 5."""
    source, target = tokens((4, 6), seed), tokens((4, 5), seed + 1)
    for row, (source_length, target_length) in enumerate(
        [(6, 5), (3, 2), (1, 4), (5, 1)]
    ):
        source[row, source_length:] = 0
        target[row, target_length:] = 0
    return {"source": source, "target": target}


def random_model(seed=5, **options):
    """A model with weights so large that all of its inputs matter.

    With this seed and untied logits, translations do not repeat one token.
    """
    model = transformer_nmt(**{**SMALL, **options})
    rng = np.random.default_rng(seed)
    scales = {"kernel": 0.8, "bias": 0.1, "gamma": 0.1, "beta": 0.1}
    for w in model.weights:
        scale = scales.get(w.path.split("/")[-1], 0.2)
        w.assign(rng.normal("gamma" in w.path, scale, w.shape))
    return model


def compiled(model, **arguments):
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **arguments,
    )
    return model


class TransformerNmtTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (6, 8192, 16, 342.6e6, 400e6),
        (24, 8192, 16, 1173.8e6, 1.3e9),
        (12, 16384, 32, 1173.6e6, 1.3e9),
        (32, 16384, 32, 3020.5e6, 3e9),
        (64, 16384, 32, 5975.4e6, 6e9),
    )
    def test_parameters(self, num_layers, ffn_dim, num_heads, expected, paper):
        # All blocks are alike, so two sizes tell the others.
        counts = []
        for layers in (1, 2):
            with keras.StatelessScope(initialize_variables=False):
                model = transformer_nmt(layers, ffn_dim, num_heads)
            counts.append(sum(int(np.prod(w.shape)) for w in model.weights))
        first, second = counts
        count = first + (num_layers - 1) * (second - first)
        self.assertAllClose(count, expected, rtol=1e-4)
        # The paper's figures are rounded, and count a separate matrix for
        # logits.
        self.assertAllClose(count + 64000 * 1024, paper, rtol=0.05)

    def test_logits_do_not_see_later_targets(self):
        model = random_model()
        x = {"source": tokens((4, 6)), "target": tokens((4, 5), 1)}
        logits = model(x)
        self.assertEqual(logits.shape, (4, 5, 11))
        x["target"][:, 3] = x["target"][:, 3] % 10 + 1
        others = model(x)
        self.assertAllClose(logits[:, :3], others[:, :3])
        self.assertNotAllClose(logits[:, 3:], others[:, 3:])

    def test_logits_see_the_whole_source(self):
        model = random_model()
        x = {"source": tokens((4, 6)), "target": tokens((4, 5), 1)}
        logits = model(x)
        for position in (0, 5):
            source = x["source"].copy()
            source[:, position] = source[:, position] % 10 + 1
            others = model({**x, "source": source})
            self.assertNotAllClose(logits[:, 0], others[:, 0])

    def test_padding_of_the_source(self):
        # Blocks after the first one, too.
        model = random_model(num_layers=3)
        x = {"source": tokens((4, 4)), "target": tokens((4, 5), 1)}
        padded = np.pad(x["source"], [(0, 0), (0, 3)])
        others = model({**x, "source": padded})
        self.assertAllClose(model(x), others, atol=1e-5)

    def test_padding_of_the_target(self):
        model = random_model()
        x = batch()
        valid = x["target"] != 0
        labels = tokens((4, 5), 2)
        changed = np.where(valid, labels, labels % 10 + 1)
        log_probs = tf.nn.log_softmax(model(x)).numpy()
        picked = np.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
        loss = -np.mean(picked[valid])
        weights = model.get_weights()
        trained = []
        for y in (labels, changed):
            model.set_weights(weights)
            compiled(model, run_eagerly=True)
            history = model.fit(x, y, verbose=0).history
            self.assertAllClose(history["loss"], [loss], rtol=1e-5)
            trained.append(model.get_weights())
        self.assertAllClose(*trained)
        self.assertNotAllClose(trained[0], weights)

    def test_only_padding(self):
        model = random_model()
        x = {name: np.zeros_like(x) for name, x in batch().items()}
        self.assertAllInRange(model(x), -30.0, 30.0)

    def test_embedding_without_padding(self):
        x = SharedEmbedding(5, 4, mask_zero=False)(np.array([[3, 0]]))
        self.assertIsNone(getattr(x, "_keras_mask", None))

    def test_masks_are_lost_nowhere(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = random_model()
            x = batch()
            mask = model(x)._keras_mask
            decode(model, x["source"], START, END, 3)
        self.assertAllEqual(mask, x["target"] != 0)

    @parameterized.parameters((True, 1), (False, 2))
    def test_tied_weights(self, tie_weights, expected):
        model = transformer_nmt(**SMALL, tie_weights=tie_weights)
        large = [w for w in model.weights if 11 in w.shape]
        self.assertLen(large, expected)
        self.assertLen({id(w) for w in model.weights}, len(model.weights))
        grads = []
        for source, target in [(3, 4), (5, 6)]:
            x = {"source": np.array([[source]]), "target": np.array([[target]])}
            with tf.GradientTape() as tape:
                loss = model(x)[0, 0, 7]
            grad = tape.gradient(loss, large[0].value)
            grads.append(tf.convert_to_tensor(grad).numpy().any(axis=1))
        used = [[3, 4, 7], [5, 6, 7]] if tie_weights else [[3, 4], [5, 6]]
        for grad, rows in zip(grads, used, strict=True):
            self.assertAllEqual(np.flatnonzero(grad), rows)

    def test_initial_values_of_feed_forward_layers(self):
        models = []
        for scale_ffn_init in (False, True):
            keras.utils.set_random_seed(0)
            models.append(
                transformer_nmt(
                    **{**SMALL, "num_layers": 4}, scale_ffn_init=scale_ffn_init
                )
            )
        scaled = []
        for plain, small in zip(*[m.weights for m in models], strict=True):
            if plain.shape in [(16, 32), (32, 16)]:
                self.assertAllClose(small, plain / 4)
                # Glorot uniform.
                limit = (6 / (16 + 32)) ** 0.5
                self.assertAllInRange(plain, -limit, limit)
                self.assertGreater(np.max(plain), 0.95 * limit)
                scaled.append(small.path)
            else:
                self.assertAllClose(small, plain)
        self.assertLen(scaled, 2 * 4 * 2)

    def test_clipping(self):
        x = batch()
        logits = random_model(logit_clip=None)(x).numpy()
        self.assertGreater(logits.max(), 0.6)
        self.assertLess(logits.min(), -0.6)
        clipped = random_model(logit_clip=0.5)(x)
        self.assertAllClose(clipped, logits.clip(-0.5, 0.5))
        embedding = transformer_nmt(**SMALL).get_layer("embedding")
        self.assertEqual(embedding.logit_clip, 30.0)

    def test_dropout(self):
        x = batch()
        valid = x["target"] != 0
        logits = random_model()(x)[valid]
        for rates in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
            model = random_model(**rates)
            self.assertAllClose(model(x)[valid], logits, atol=1e-5)
            trained = [model(x, training=True)[valid] for _ in range(2)]
            self.assertNotAllClose(*trained)

    @parameterized.parameters("gpipe", "1f1b")
    @pytest.mark.slow
    def test_trains_as_a_pipeline(self, schedule):
        def make():
            return transformer_nmt(**SMALL)

        x = batch()
        # As a target is fed shifted right, so is its padding.
        data = [(x, np.where(x["target"] > 0, x["source"][:, :5], 0))]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        common = {
            "loss": loss,
            # Not Adam: the gradient by the keys' bias is nothing but rounding.
            "optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        }
        plain = comparison.train(make, data, **common)
        pipelined = comparison.train(
            make,
            data,
            **common,
            num_stages=4,
            num_micro_batches=2,
            schedule=schedule,
        )
        comparison.assert_same(self, plain, pipelined, rtol=1e-4, atol=1e-5)
        # The matrix of embeddings and logits lives on the first stage.
        first, *_, last = pipelined[0].stages
        (matrix,) = pipelined[0].get_layer("embedding").weights
        self.assertIn(matrix.path, [v.path for v in first.owned])
        self.assertIn(matrix.path, [v.path for v in last.borrowed])

    @pytest.mark.slow
    def test_learns_to_copy(self):
        model = compiled(transformer_nmt(**{**SMALL, "num_layers": 1}))
        rng = np.random.default_rng(0)

        def sentences(rows):
            words = rng.integers(3, 11, (rows, 4))
            words[:, 2:] *= rng.integers(0, 2, (rows, 1))
            ends = np.full((rows, 1), END)
            labels = np.pad(words, [(0, 0), (0, 1)])
            np.put_along_axis(
                labels, np.sum(words != 0, axis=1)[:, None], ends, axis=1
            )
            target = np.where(labels == END, 0, labels)
            target = np.concatenate([ends - 1, target[:, :-1]], axis=1)
            return {"source": words, "target": target}, labels

        losses = [model.train_on_batch(*sentences(64)) for _ in range(150)]
        self.assertLess(losses[-1], 0.3 * losses[0])
        x, labels = sentences(64)
        decoded = decode(model, x["source"], START, END, 5)
        self.assertGreater(np.mean(decoded == labels), 0.9)

    @parameterized.parameters("mixed_float16", "mixed_bfloat16")
    @pytest.mark.slow
    def test_mixed_precision(self, policy):
        exact = random_model()
        previous = keras.config.dtype_policy()
        self.addCleanup(keras.config.set_dtype_policy, previous)
        keras.config.set_dtype_policy(policy)
        model = random_model()
        x = batch()
        logits = model(x)
        self.assertEqual(logits.dtype, policy.removeprefix("mixed_"))
        self.assertAllClose(
            tf.cast(logits, tf.float32), exact(x), rtol=0.1, atol=0.1
        )
        decoded = decode(model, x["source"], START, END, 4, beam_size=2)
        self.assertEqual(decoded.shape, (4, 4))
        # Layers keep their policy.
        path = pathlib.Path(self.get_temp_dir(), "model.keras")
        model.save(path)
        keras.config.set_dtype_policy("float32")
        logits = model(x)
        others = keras.saving.load_model(path)(x)
        self.assertEqual(others.dtype, logits.dtype)
        self.assertAllClose(others, logits)

    @parameterized.parameters(
        {}, {"dropout": 0.1, "tie_weights": False, "logit_clip": None}
    )
    def test_saving(self, **options):
        model = random_model(**options)
        path = pathlib.Path(self.get_temp_dir(), "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        x = batch()
        self.assertAllClose(loaded(x), model(x))
        self.assertAllEqual(loaded(x)._keras_mask, x["target"] != 0)

    def test_lengths(self):
        free = transformer_nmt(**SMALL)
        fixed = transformer_nmt(**SMALL, source_length=6, target_length=5)
        for model, source, target in [(free, None, None), (fixed, 6, 5)]:
            self.assertEqual(
                {x.name: x.shape for x in model.inputs},
                {"source": (None, source), "target": (None, target)},
            )
            self.assertEqual(model.output.shape, (None, target, 11))
        fixed.set_weights(free.get_weights())
        self.assertAllClose(fixed(batch()), free(batch()))

    @parameterized.parameters(
        ({"num_layers": 0}, "`num_layers` must be positive"),
        ({"dim": 15}, "`dim` must be even"),
        ({"logit_clip": 0.0}, "`logit_clip` must be positive"),
    )
    def test_arguments_that_do_not_fit(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            transformer_nmt(**{**SMALL, **arguments})


def log_probs_of_next(model, source, prefixes):
    """Returns log probabilities of the next token; padding is impossible."""
    target = np.array([[START, *prefix] for prefix in prefixes])
    logits = model({"source": source, "target": target})[:, -1]
    log_probs = tf.nn.log_softmax(logits).numpy()
    log_probs[:, 0] = -np.inf
    return log_probs


def score(log_prob, length, length_penalty):
    return log_prob / ((5 + length) / 6) ** length_penalty


def padded(hypotheses, length):
    return [list(x) + [0] * (length - len(x)) for x in hypotheses]


def greedy_search(model, source, max_length, end_token=END):
    found = [[] for _ in source]
    for _ in range(max_length):
        # Sequences that have ended are extended, too, and cut off below.
        last = log_probs_of_next(model, source, found).argmax(axis=1)
        found = [[*x, int(token)] for x, token in zip(found, last, strict=True)]
    found = [x[: [*x, end_token].index(end_token) + 1] for x in found]
    return padded(found, max_length)


def beam_search(model, source, max_length, beam_size, length_penalty):
    def by_score(candidate):
        log_prob, hypothesis = candidate
        return score(log_prob, len(hypothesis), length_penalty)

    beams = [[(0.0, [])] for _ in source]
    for _ in range(max_length):
        alive = [
            (row, log_prob, hypothesis)
            for row, beam in enumerate(beams)
            for log_prob, hypothesis in beam
            if END not in hypothesis
        ]
        next_log_probs = log_probs_of_next(
            model, source[[row for row, _, _ in alive]], [x[2] for x in alive]
        )
        beams = [[x for x in beam if END in x[1]] for beam in beams]
        for (row, log_prob, hypothesis), more in zip(
            alive, next_log_probs, strict=True
        ):
            beams[row] += [
                (log_prob + more[token], [*hypothesis, token])
                for token in range(1, len(more))
            ]
        beams = [
            sorted(beam, key=by_score, reverse=True)[:beam_size]
            for beam in beams
        ]
    return padded([beam[0][1] for beam in beams], max_length)


def exhaustive_search(model, source, vocabulary, max_length, length_penalty):
    """Returns the sequence with the best score among all there are."""
    sequences = np.array(
        list(itertools.product(range(1, vocabulary), repeat=max_length))
    )
    target = np.pad(sequences[:, :-1], [(0, 0), (1, 0)], constant_values=START)
    found = []
    for row in source:
        logits = model(
            {"source": np.tile(row, (len(target), 1)), "target": target}
        )
        log_probs = tf.nn.log_softmax(logits).numpy()
        best = (-np.inf, None)
        for i, sequence in enumerate(sequences.tolist()):
            length = [*sequence, END].index(END) + 1
            hypothesis = sequence[:length]
            log_prob = sum(
                log_probs[i, j, token] for j, token in enumerate(hypothesis)
            )
            found_score = score(log_prob, len(hypothesis), length_penalty)
            best = max(best, (found_score, hypothesis))
        found.append(best[1])
    return padded(found, max_length)


class DecodingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(END, 7)
    def test_greedy_search(self, end_token):
        model = random_model(tie_weights=False)
        source = batch()["source"]
        decoded = decode(model, source, START, end_token, 7).numpy()
        expected = greedy_search(model, source, 7, end_token)
        self.assertAllEqual(decoded, expected)
        # Some sequences end early with the end token 7.
        self.assertEqual((decoded == 0).any(), end_token == 7)

    # In the last case, hypotheses that have not ended overtake one that has.
    @parameterized.parameters((2, 0.0, 5), (3, 0.6, 5), (4, 3.0, 3))
    @pytest.mark.slow_after(1)
    def test_beam_search(self, beam_size, length_penalty, seed):
        model = random_model(seed, tie_weights=False)
        source = batch()["source"]
        arguments = (5, beam_size, length_penalty)
        decoded = decode(model, source, START, END, *arguments)
        self.assertAllEqual(decoded, beam_search(model, source, *arguments))
        self.assertNotAllEqual(decoded, greedy_search(model, source, 5))

    @parameterized.parameters(0.0, 0.6, 2.0)
    def test_wide_beam_is_exhaustive(self, length_penalty):
        model = random_model(vocabulary=5, tie_weights=False)
        source = batch()["source"] % 5
        # A beam of 13 holds all hypotheses after two tokens: 1 + 3 that have
        # ended, and 3 * 3 others.
        decoded = decode(model, source, START, END, 3, 13, length_penalty)
        self.assertAllEqual(
            decoded, exhaustive_search(model, source, 5, 3, length_penalty)
        )

    @pytest.mark.slow
    def test_padding_of_the_source(self):
        model = random_model(tie_weights=False)
        source = batch()["source"]
        decoded = decode(model, source, START, END, 5, 2)
        # The second call compiles for any shape, the third uses that.
        for padding in (2, 3):
            longer = np.pad(source, [(0, 0), (0, padding)])
            self.assertAllEqual(
                decode(model, longer[1:], START, END, 5, 2), decoded[1:]
            )

    @pytest.mark.slow
    def test_other_models(self):
        class Translator(keras.Model):
            pass

        model = random_model(tie_weights=False)
        source = batch()["source"]
        expected = greedy_search(model, source, 5)
        other = Translator(model.inputs, model.outputs)
        self.assertAllEqual(decode(other, source, START, END, 5), expected)
        path = pathlib.Path(self.get_temp_dir(), "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        self.assertAllEqual(decode(loaded, source, START, END, 5), expected)
        # The compiled search sees weights that change.
        loaded.set_weights(random_model(1, tie_weights=False).get_weights())
        decoded = decode(loaded, source, START, END, 5)
        self.assertNotAllEqual(decoded, expected)
        self.assertAllEqual(decoded, greedy_search(loaded, source, 5))

    @pytest.mark.slow
    def test_pipeline_that_is_cut_anew(self):
        options = {"num_layers": 1, "tie_weights": False}
        model = tf_gpipe.PipelinedModel.from_model(
            random_model(**options), num_stages=2
        )
        source = batch()["source"]
        before = decode(model, source, START, END, 4)
        count = sum(len(stage.nodes) for stage in model.stages)
        model.rebalance([1, count - 1])
        # The weights that the first search reads are no longer the model's.
        other = random_model(1, **options)
        model.set_weights(other.get_weights())
        decoded = decode(model, source, START, END, 4)
        self.assertAllEqual(decoded, greedy_search(other, source, 4))
        self.assertNotAllEqual(decoded, before)

    def test_models_are_not_kept(self):
        model = random_model(num_layers=1)
        decode(model, batch()["source"], START, END, 2)
        found = [weakref.ref(model), weakref.ref(model.get_layer("decoder_1"))]
        del model
        gc.collect()
        self.assertEqual([x() for x in found], [None, None])

    @parameterized.parameters(
        ({"start_token": 0}, "must be positive: token 0 is padding"),
        ({"end_token": 0}, "must be positive: token 0 is padding"),
        ({"max_length": 0}, "`max_length` and `beam_size` must be positive"),
        ({"beam_size": 0}, "`max_length` and `beam_size` must be positive"),
        ({"length_penalty": -1.0}, "must not be negative"),
        ({"source": [3, 4]}, r"Received: shape \(2,\), dtype int32"),
        ({"source": [[3.0]]}, r"Received: shape \(1, 1\), dtype float32"),
    )
    def test_arguments_that_do_not_fit(self, arguments, message):
        arguments = {
            "model": None,
            "source": [[3, 4]],
            "start_token": START,
            "end_token": END,
            "max_length": 3,
            **arguments,
        }
        with self.assertRaisesRegex(ValueError, message):
            decode(**arguments)

    def test_models_without_the_layers(self):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        with self.assertRaisesRegex(ValueError, "No such layer: embedding"):
            decode(model, [[3, 4]], START, END, 3)


if __name__ == "__main__":
    tf.test.main()
