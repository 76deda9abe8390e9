"""The vocabulary gives back every text, and keeps its tokens to itself."""

import pathlib
import tempfile

import numpy as np
import sentencepiece
import tensorflow as tf
import tensorflow_datasets as tfds
from absl.testing import parameterized

from trainers.command_line import UserError
from trainers.vocabulary import Vocabulary
from trainers.vocabulary import vocabulary_path

SIZE = 310
LANGUAGES = ["pt-BR", "de", "en"]


def sentences(seed=0):
    random = np.random.default_rng(seed)
    words = "save and continue speichern und weiter bearbeiten salvar é übrig"
    for _ in range(300):
        yield " ".join(random.choice(words.split(), 8))


class VocabularyTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.path = pathlib.Path(directory.name) / "vocabularies" / "a_290.model"
        cls.trained = Vocabulary.train(sentences(), SIZE, LANGUAGES, cls.path)

    def make_directory(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

    @parameterized.parameters(
        "",
        " ",
        "save",
        "  save  and ",
        "Übrig & é, 日本語 🙂\u200d🙂 \u05d0",
        "a\nb\t\tc\r\n",
        "%(name)s {count} <b>\0</b>",
        "<2de> <s> </s> <pad> <unk> <0x41>",
    )
    def test_text_comes_back(self, text):
        (ids,) = self.trained.encode([text])
        self.assertEqual(self.trained.decode([ids]), [text])
        # No part of a text is a special token or unknown.
        first = 4 + len(LANGUAGES)
        self.assertTrue(all(first <= index < SIZE for index in ids), ids)

    def test_mark_for_space_comes_back_as_space(self):
        (ids,) = self.trained.encode(["a\u2581b"])
        self.assertEqual(self.trained.decode([ids]), ["a b"])

    def test_ids(self):
        vocabulary = self.trained
        self.assertEqual(vocabulary.size, SIZE)
        self.assertEqual((vocabulary.start, vocabulary.end), (1, 2))
        self.assertEqual(vocabulary.languages, ["de", "en", "pt-BR"])
        tokens = [vocabulary.language_token(x) for x in vocabulary.languages]
        self.assertEqual(tokens, [4, 5, 6])
        # Tokens have several letters each.
        self.assertLess(len(vocabulary.encode(["save and continue"])[0]), 9)
        self.assertEqual(vocabulary.encode([]), [])

    def test_decode_ends(self):
        vocabulary = self.trained
        a, b = vocabulary.encode(["save", "und weiter"])
        row = [1, vocabulary.language_token("de"), *b, 2]
        width = len(row) + len(a) + 2
        ids = np.zeros((3, width), "int32")
        # What a model puts after the end is no part of the text.
        ids[0, : len(row) + len(a)] = row + a
        ids[1, : len(a)] = a
        self.assertEqual(vocabulary.decode(ids), ["und weiter", "save", ""])
        self.assertEqual(vocabulary.decode(tf.constant(ids))[0], "und weiter")
        self.assertEqual(vocabulary.decode([]), [])

    def test_language(self):
        with self.assertRaisesRegex(
            UserError, "no language 'pt'. It has: de, en, pt-BR$"
        ):
            self.trained.language_token("pt")

    def test_load(self):
        loaded = Vocabulary.load(self.path)
        self.assertEqual(loaded.fingerprint, self.trained.fingerprint)
        self.assertEqual(loaded.languages, self.trained.languages)
        texts = list(sentences(seed=1))
        self.assertEqual(loaded.encode(texts), self.trained.encode(texts))
        self.assertEqual([*self.path.parent.iterdir()], [self.path])

    def test_training_is_deterministic(self):
        path = self.make_directory() / "again.model"
        # The order in which languages are found does not matter.
        again = Vocabulary.train(sentences(), SIZE, LANGUAGES[::-1], path)
        self.assertEqual(path.read_bytes(), self.path.read_bytes())
        self.assertEqual(again.fingerprint, self.trained.fingerprint)
        other = Vocabulary.train(sentences(seed=1), SIZE, LANGUAGES, path)
        self.assertNotEqual(other.fingerprint, self.trained.fingerprint)

    @parameterized.parameters(
        ("too few ids", 100, "size 100 .* required_chars"),
        ("too many ids", 5000, "size 5000 .* value <= "),
        ("no sentences", SIZE, "size 310"),
    )
    def test_cannot_train(self, why, size, message):
        path = self.make_directory() / "a.model"
        texts = [] if why == "no sentences" else sentences()
        with self.assertRaisesRegex(UserError, message):
            Vocabulary.train(texts, size, LANGUAGES, path)
        self.assertEmpty(list(path.parent.iterdir()))

    def test_cannot_save(self):
        blocked = self.make_directory() / "file"
        blocked.write_text("")
        with self.assertRaisesRegex(UserError, f"Cannot save .* {blocked}/a"):
            Vocabulary.train(sentences(), SIZE, LANGUAGES, blocked / "a.model")

    def test_missing(self):
        data_dir = self.make_directory()
        names = ["wmt14_translate/de-en", "django_messages"]
        path = vocabulary_path(names, 4000, data_dir)
        with self.assertRaisesRegex(
            UserError,
            "no vocabulary .* python -m tools.prepare_data django_messages "
            f"wmt14_translate/de-en --vocabulary_size=4000 .*={data_dir}$",
        ):
            Vocabulary.load(path)
        with self.assertRaisesRegex(UserError, "tools.prepare_data DATASET "):
            Vocabulary.load(data_dir / "other.model")

    def test_damaged(self):
        whole = self.path.read_bytes()
        other = self.make_directory() / "other.model"
        with other.open("wb") as model:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=sentences(),
                model_writer=model,
                vocab_size=30,
                minloglevel=2,
            )
        for content in (
            b"",
            b"text",
            whole[: len(whole) // 2],
            # A valid SentencePiece model, whose special tokens have other ids.
            other.read_bytes(),
        ):
            other.write_bytes(content)
            with self.assertRaisesRegex(
                UserError, "cannot be used: .* python -m tools.prepare_data"
            ):
                Vocabulary.load(other)

    def test_path(self):
        self.assertEqual(
            vocabulary_path(["b", "a", "b"], 8000, "/data"),
            pathlib.Path("/data/vocabularies/a+b_8000.model"),
        )
        self.assertEqual(
            vocabulary_path(["a"], 8000),
            vocabulary_path(["a"], 8000, tfds.core.constants.DATA_DIR),
        )


if __name__ == "__main__":
    tf.test.main()
