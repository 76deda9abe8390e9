"""Sentence pairs from TFDS, as tokens, and as batches to train with."""

import itertools
import pathlib
import tempfile
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tf_gpipe
from model_zoo.transformer_nmt import transformer_nmt
from model_zoo.transformer_nmt_layers import EncoderBlock
from tests.trainers import tiny_messages
from tests.trainers.tiny_messages import NUM_TRAIN
from trainers import token_batches
from trainers import token_pairs
from trainers.command_line import UserError
from trainers.datasets import message_pairs
from trainers.sentence_pairs import Direction
from trainers.sentence_pairs import SentencePairs
from trainers.sentence_pairs import chunks
from trainers.token_batches import TokenBatches
from trainers.token_losses import SmoothedCrossentropy
from trainers.token_losses import token_metrics
from trainers.token_pairs import TokenPairs


class TestCase(tf.test.TestCase, parameterized.TestCase):
    """Has a directory for datasets, which are prepared once."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.data_dir = directory.name
        cls.vocabulary = tiny_messages.vocabulary(
            pathlib.Path(directory.name) / "v.model"
        )

    def make_directory(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

    def pairs(self, *datasets, **kwargs):
        return SentencePairs(
            list(datasets) or ["tiny_messages"], self.data_dir, **kwargs
        )

    def tokens(self, max_length=None, **kwargs):
        return token_pairs.tokenise(
            self.vocabulary, self.pairs(**kwargs).texts("train"), max_length
        )


class SentencePairsTest(TestCase):
    @parameterized.parameters(
        ("en-x", ["en > xx", "en > yy", "en > zz"]),
        ("x-en", ["xx > en", "yy > en", "zz > en"]),
        (
            "both",
            ["en > xx", "en > yy", "en > zz", "xx > en", "yy > en", "zz > en"],
        ),
    )
    def test_directions(self, directions, expected):
        held_out = self.pairs(directions=directions).held_out(5)
        self.assertEqual(list(map(str, held_out)), expected)
        for direction, pairs in held_out.items():
            for pair in pairs:
                texts = dict(zip(direction, pair, strict=True))
                self.assertEqual(
                    texts[direction.other],
                    tiny_messages.translated(texts["en"], direction.other),
                )

    def test_languages(self):
        held_out = self.pairs(languages=["zz", "xx"]).held_out(5)
        self.assertEqual([x.target for x in held_out], ["xx", "zz"])

    def test_same_texts_in_all_languages(self):
        held_out = self.pairs(directions="both").held_out(3)
        english = {
            frozenset(pair[direction.index("en")] for pair in pairs)
            for direction, pairs in held_out.items()
            if "zz" not in direction
        }
        self.assertLen(english, 1)
        # A larger number only adds pairs.
        more = self.pairs().held_out(5)
        for direction in more:
            self.assertEqual(more[direction][:3], held_out[direction][:3])

    def test_several_datasets(self):
        counts = dict.fromkeys(NUM_TRAIN, 0)
        names = ["tiny_messages", "tiny_translation"]
        for direction, sources, _ in self.pairs(*names).texts("train"):
            counts[direction.target] += len(sources)
        only = self.pairs("tiny_translation").texts("train")
        more = sum(len(sources) for _, sources, _ in only)
        self.assertGreater(more, 100)
        self.assertEqual(counts, {**NUM_TRAIN, "xx": NUM_TRAIN["xx"] + more})

    def test_one_split(self):
        pairs = self.pairs("tiny_translation")
        found = {
            split: {
                text for _, sources, _ in pairs.texts(split) for text in sources
            }
            for split in ("train", "validation", "test")
        }
        for split, texts in found.items():
            self.assertNotEmpty(texts)
            for text in texts:
                self.assertEqual(message_pairs.split_of(text), split)
        self.assertLen(set.union(*found.values()), 200)

    @parameterized.parameters(
        ({"datasets": ["nonsuch"]}, "no dataset 'nonsuch'"),
        (
            {"datasets": ["tiny_unprepared"]},
            "tiny_unprepared.*Prepare it with: python -m tools.prepare_data "
            "tiny --data_dir=",
        ),
        ({"datasets": ["digits"]}, "Expected the features 'language'"),
        (
            {"datasets": ["tiny_translation_without_english"]},
            "English, 'en', and one other language. Received: xx, yy",
        ),
        ({"datasets": ["tiny_empty_messages"]}, "has no train pairs"),
        (
            {"languages": ["xx", "de"]},
            "no train pairs in de. It has: xx, yy, zz. Received: "
            "--languages=xx,de",
        ),
    )
    def test_unusable(self, arguments, message):
        pairs = SentencePairs(
            **{
                "datasets": ["tiny_messages"],
                "data_dir": self.data_dir,
                **arguments,
            }
        )
        with self.assertRaisesRegex(UserError, message):
            list(pairs.texts("train"))

    def test_damaged(self):
        directory = self.make_directory()
        pairs = SentencePairs(["tiny_messages"], directory)
        list(pairs.texts("train"))
        (path,) = directory.glob("**/*train.tfrecord*")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(content)
        with self.assertRaisesRegex(UserError, "prepare it again"):
            list(pairs.texts("train"))


class TokenPairsTest(TestCase):
    def test_batch(self):
        texts = {
            Direction("en", "zz"): [("save", "savesave"), ("add user", "é")],
            Direction("en", "xx"): [("a b c", "")],
        }
        vocabulary = self.vocabulary
        pairs = token_pairs.tokenise(vocabulary, chunks(texts))
        self.assertEqual(
            pairs.directions,
            {
                Direction("en", "xx"): range(1),
                Direction("en", "zz"): range(1, 3),
            },
        )
        for direction in pairs.directions:
            indices = pairs.indices(direction)
            inputs, labels = pairs.batch(indices)
            lengths = pairs.lengths(indices)
            self.assertEqual(
                (*inputs["source"].shape, *inputs["target"].shape),
                (len(indices), lengths[:, 0].max())
                + (len(indices), lengths[:, 1].max()),
            )
            for row, (source, target) in enumerate(texts[direction]):
                source, target = vocabulary.encode([source, target])
                token = vocabulary.language_token(direction.target)
                for tokens, expected in (
                    (inputs["source"], [token, *source, vocabulary.end]),
                    (inputs["target"], [vocabulary.start, *target]),
                    (labels, [*target, vocabulary.end]),
                ):
                    padding = tokens.shape[1] - len(expected)
                    self.assertAllEqual(tokens[row], expected + [0] * padding)

    def test_too_long(self):
        everything = self.tokens()
        lengths = everything.lengths(everything.indices())
        limit = int(np.median(lengths.max(axis=1)))
        fits = (lengths <= limit).all(axis=1)
        pairs = self.tokens(max_length=limit)
        self.assertLen(pairs, fits.sum())
        self.assertEqual(pairs.num_dropped, (~fits).sum())
        self.assertAllEqual(pairs.lengths(pairs.indices()), lengths[fits])
        with self.assertRaisesRegex(UserError, "All 99 pairs.*--max_length"):
            self.tokens(max_length=2)

    def test_memory(self):
        pairs = self.tokens()
        self.assertEqual(pairs.tokens.itemsize, 2)
        stored = pairs.lengths(pairs.indices()).sum() + len(pairs)
        self.assertEqual(pairs.nbytes, 2 * stored + 8 * (2 * len(pairs) + 1))

    def test_language_that_the_vocabulary_lacks(self):
        vocabulary = tiny_messages.vocabulary(
            self.make_directory() / "v.model",
            languages=["en", "xx"],
        )
        with self.assertRaisesRegex(UserError, "no language 'yy'"):
            token_pairs.tokenise(vocabulary, self.pairs().texts("train"))


def random_pairs(counts=(16_000,), seed=0):
    """Returns pairs of realistic lengths, `counts` of them per direction."""
    random = np.random.default_rng(seed)
    source = np.clip(random.lognormal(2, 0.8, sum(counts)), 2, 60)
    target = np.clip(source * random.lognormal(0.2, 0.3, len(source)), 2, 60)
    # The target has one more token, for its start and end.
    lengths = np.stack([source, target + 1], axis=1).astype(int)
    ends = np.cumsum(counts)
    return TokenPairs(
        tokens=random.integers(4, 100, lengths.sum(), dtype=np.uint16),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        directions={
            Direction("en", f"l{index}"): range(end - count, end)
            for index, (end, count) in enumerate(zip(ends, counts, strict=True))
        },
        num_dropped=0,
    )


def first(iterator, count):
    return list(itertools.islice(iterator, count))


class TokenBatchesTest(TestCase):
    def assert_same(self, a, b):
        a, b = ([tf.nest.flatten(x) for x in y] for y in (a, b))
        self.assertLen(a, len(b))
        for x, y in zip(a, b, strict=True):
            for tokens, others in zip(x, y, strict=True):
                self.assertAllEqual(tokens, others)

    @parameterized.parameters(1, 4)
    def test_batches_are_full(self, num_replicas):
        pairs = random_pairs()
        batches = TokenBatches(pairs, 1000, num_replicas=num_replicas)
        sizes = []
        for rows in first(batches.indices(0), 200):
            self.assertEqual(len(rows) % num_replicas, 0)
            inputs, labels = pairs.batch(rows)
            self.assertEqual(labels.shape, inputs["target"].shape)
            sizes.append(inputs["source"].size + inputs["target"].size)
        self.assertLessEqual(max(sizes), 1000)
        self.assertGreater(np.mean(sizes), 900)

    def test_little_is_padding(self):
        pairs = random_pairs()
        batches = TokenBatches(pairs, 1000)
        self.assertLess(batches.padding(), 0.06)
        # `padding` tells the share of padding in what a model is fed.
        fed = padding = 0
        for rows in first(batches.indices(1), 100):
            inputs, _ = pairs.batch(rows)
            for tokens in inputs.values():
                fed += tokens.size
                padding += np.sum(tokens == 0)
        self.assertAllClose(padding / fed, batches.padding(), atol=0.02)
        lengths = pairs.lengths(pairs.indices())
        self.assertGreater(1 - lengths.mean() / lengths.max(), 0.7)

    @parameterized.parameters(
        (1.0, [0.5, 0.4, 0.1]),
        (2.0, [5**0.5, 4**0.5, 1]),
        (5.0, [5**0.2, 4**0.2, 1]),
        (float("inf"), [1, 1, 1]),
    )
    def test_shares(self, temperature, expected):
        expected = np.array(expected) / sum(expected)
        pairs = random_pairs([1000, 800, 200])
        batches = TokenBatches(pairs, 1000, temperature)
        self.assertAllClose(list(batches.shares().values()), expected)
        drawn = np.concatenate(first(batches.indices(0), 300))
        counts = np.histogram(drawn, [0, 1000, 1800, 2000])[0]
        self.assertAllClose(counts / len(drawn), expected, atol=0.02)

    def test_none_again_before_all(self):
        batches = TokenBatches(random_pairs([3000, 50]), 1000)
        drawn = np.concatenate(first(batches.indices(0), 300))
        counts = np.bincount(drawn, minlength=3050)
        for part in (counts[:3000], counts[3000:]):
            # The pool's last batches may not be among these.
            self.assertLessEqual(part.max() - np.median(part), 1)

    def test_many_times_as_many_as_there_are(self):
        """In a time that is proportional to their number."""
        stream = token_batches._Shuffled(range(5, 8), np.random.default_rng(0))
        taken = np.concatenate([stream.take(4), stream.take(3 * 10**5 - 4)])
        rounds = np.sort(taken.reshape(-1, 3))
        self.assertAllEqual(rounds, np.broadcast_to([5, 6, 7], rounds.shape))

    def test_directions_are_mixed(self):
        pairs = random_pairs([2000, 2000])
        for rows in first(TokenBatches(pairs, 1000).indices(0), 50):
            if len(rows) >= 20:
                self.assertBetween(np.mean(rows < 2000), 0.1, 0.9)

    def test_epochs_follow_from_seed_and_number(self):
        pairs = random_pairs()

        def epochs(start, stop, seed=0):
            batches = TokenBatches(pairs, 1000, seed=seed)
            found = batches.epochs(start, stop, steps_per_epoch=4)
            self.assertEqual(found.cardinality(), 4 * (stop - start))
            return found

        whole = list(epochs(0, 3).as_numpy_iterator())
        self.assertLen(whole, 12)
        self.assert_same(whole, epochs(0, 3))
        self.assert_same(whole[4:], epochs(1, 3))
        # Starts within an epoch.
        self.assert_same(whole[6:8], epochs(1, 2).skip(2))
        others = [whole[4:8], epochs(0, 1, seed=1).as_numpy_iterator()]
        for other in others:
            with self.assertRaises(AssertionError):
                self.assert_same(whole[:4], list(other))

    @parameterized.parameters(1, 3)
    def test_each_once(self, num_replicas):
        pairs = random_pairs([70, 30])
        indices = np.arange(20, 97)
        batches = list(
            token_batches.each_once(
                pairs, indices, 200, num_replicas
            ).as_numpy_iterator()
        )
        self.assertGreater(len(batches), 3)
        found = []
        for inputs, _ in batches:
            self.assertEqual(len(inputs["source"]) % num_replicas, 0)
            found += [tuple(row[row > 0]) for row in inputs["source"]]
        found = sorted(row for row in found if row)
        expected, _ = pairs.batch(indices)
        expected = [tuple(row[row > 0]) for row in expected["source"]]
        self.assertEqual(found, sorted(expected))

    def test_batches_that_hold_no_pair(self):
        with self.assertRaisesRegex(
            UserError, r"--batch_tokens=100.*--max_len"
        ):
            TokenBatches(random_pairs(), 100)

    @parameterized.parameters(500, 2000, 8000, 40_000)
    def test_few_pairs_are_in_a_batch_twice(self, batch_tokens):
        pairs = random_pairs([700] * 6)
        batches = TokenBatches(pairs, batch_tokens, temperature=5.0)
        found = first(batches.indices(0), 30)
        different = sum(len(np.unique(rows)) for rows in found)
        self.assertGreater(different / sum(map(len, found)), 0.85)

    @parameterized.parameters(1, 2**32 - 1)
    def test_batches_of_more_than_all_pairs(self, more):
        pairs = random_pairs([40, 20])
        tokens = int(pairs.lengths(pairs.indices()).sum())
        with self.assertRaisesRegex(
            UserError, f"{tokens}, .* 60 training .*={tokens + more}"
        ):
            TokenBatches(pairs, tokens + more)
        rows, *_ = first(TokenBatches(pairs, tokens).indices(0), 1)
        self.assertLessEqual(len(rows), 60)

    def test_replicas_share_a_batch(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        pairs = random_pairs()
        batches = TokenBatches(pairs, 1000, num_replicas=2)
        expected = first(batches.epochs(0, 1, 3).as_numpy_iterator(), 3)
        shared = strategy.experimental_distribute_dataset(
            batches.epochs(0, 1, 3)
        )
        found = []
        for batch in shared:
            parts = [
                strategy.experimental_local_results(x)
                for x in tf.nest.flatten(batch)
            ]
            self.assertLen({len(x) for part in parts for x in part}, 1)
            found.append([np.concatenate(part) for part in parts])
        self.assert_same(expected, found)

    @pytest.mark.slow
    def test_pipeline_is_traced_once(self):
        call = self.enterContext(
            mock.patch.object(
                EncoderBlock,
                "call",
                autospec=True,
                side_effect=EncoderBlock.call,
            )
        )
        model = tf_gpipe.PipelinedModel.from_model(
            transformer_nmt(
                1, ffn_dim=8, num_heads=2, dim=8, vocabulary=100, head_size=4
            ),
            num_stages=2,
            num_micro_batches=2,
        )
        model.compile(
            "adam", SmoothedCrossentropy(0.1), metrics=token_metrics()
        )
        batches = TokenBatches(random_pairs(), 300)
        shapes = {
            tf.nest.map_structure(np.shape, x[0]["source"])
            for x in batches.epochs(0, 3, 4).as_numpy_iterator()
        }
        self.assertGreater(len(shapes), 5)
        counts = []
        for epoch in range(3):
            model.fit(
                batches.epochs(epoch, epoch + 1, 4),
                steps_per_epoch=4,
                shuffle=False,
                verbose=0,
            )
            counts.append(call.call_count)
        self.assertGreater(counts[0], 0)
        self.assertEqual(counts[0], counts[2])


if __name__ == "__main__":
    absltest.main()
