"""The command prepares datasets and vocabularies, wholly or not at all."""

import contextlib
import io
import os
import pathlib
import re
import tempfile
from unittest import mock

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from absl.testing import parameterized

from tests.trainers import message_wheels
from tests.trainers import tiny_messages  # noqa: F401
from tools import prepare_data as command
from trainers import datasets
from trainers.datasets import message_pairs
from trainers.vocabulary import Vocabulary
from trainers.vocabulary import vocabulary_path

SIZE = 320
VERBS = ("Save", "Open", "Close", "Delete", "Find", "Edit", "Print")
NOUNS = ("page", "file", "user", "group", "field", "model", "house", "lamp")


def message(index):
    """Returns an English message and its translation."""
    verb, noun = VERBS[index % 7], NOUNS[index % 8]
    return f"{verb} the {noun} {index}", f"{noun} {verb.lower()}n {index}"


class TranslationPairs(tfds.core.GeneratorBasedBuilder):
    """Has only a split to train on."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.Translation(["de", "en"]),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for index in range(200):
            source, target = message(index)
            yield index, {"en": source, "de": target}


class PrepareDataTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.data_dir = self.make_directory()
        self.wheel = message_wheels.write_django(
            self.make_directory(),
            {
                locale: dict(map(message, range(200)))
                for locale in ("de", "pt_BR")
            },
        )
        package = message_wheels.package_of(datasets.DjangoMessages, self.wheel)
        self.enterContext(
            mock.patch.object(datasets.DjangoMessages, "PACKAGE", package)
        )

    def make_directory(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

    def run_command(self, *args, data_dir=None, size=SIZE):
        """Returns what it prints."""
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            command.main(
                [
                    *args,
                    f"--data_dir={data_dir or self.data_dir}",
                    f"--vocabulary_size={size}",
                ]
            )
        return stdout.getvalue()

    def prepare_django(self, **kwargs):
        return self.run_command(
            "django_messages", f"--package={self.wheel}", **kwargs
        )

    def error(self, *args, **kwargs):
        """Returns the error that the command ends with, a single line."""
        with self.assertRaises(SystemExit) as caught:
            self.run_command(*args, **kwargs)
        # Python prints it and exits with status 1.
        self.assertIsInstance(caught.exception.code, str)
        self.assertStartsWith(caught.exception.code, "Error: ")
        self.assertNotIn("\n", caught.exception.code)
        return caught.exception.code

    def files(self, data_dir=None):
        """Returns paths of files, without directories."""
        paths = (data_dir or self.data_dir).rglob("*")
        return [path for path in paths if path.is_file()]

    def test_data_and_vocabulary(self):
        printed = self.prepare_django()
        self.assertRegex(
            printed, r"django_messages: train \d+, validation \d+, test \d+, in"
        )
        self.assertRegex(printed, "vocabulary: 320 word pieces, 3 languages")
        data = tfds.load("django_messages", data_dir=self.data_dir)
        self.assertEqual(sum(map(len, data.values())), 400)
        path = self.data_dir / "vocabularies" / "django_messages_320.model"
        self.assertEqual(
            path, vocabulary_path(["django_messages"], SIZE, self.data_dir)
        )
        vocabulary = Vocabulary.load(path)
        # A language can also be translated into English.
        self.assertEqual(vocabulary.languages, ["de", "en", "pt-BR"])
        # It is trained on both sides: neither falls into letters.
        for text in (message(0)[0], message(1)[1]):
            self.assertLess(len(vocabulary.encode([text])[0]), len(text))

    @parameterized.parameters(
        ("django_messages", {"train"}, 2),
        # Trainers test with a part of its only split.
        ("translation_pairs", {"train", "validation"}, 1),
    )
    def test_vocabulary_is_not_of_the_test(self, name, splits, num_languages):
        if name == "django_messages":
            self.prepare_django()
        else:
            self.run_command(name)
        expected = set()
        for source, target in map(message, range(200)):
            if message_pairs.split_of(source) in splits:
                expected |= {source, target}
        builder = tfds.builder(name, data_dir=self.data_dir)
        sentences = list(command._sentences(builder, max_examples=1000))
        self.assertEqual(set(sentences), expected)
        self.assertLen(sentences, num_languages * len(expected))
        # With the test split there would have been more.
        self.assertLess(len(expected), 390)
        few = list(command._sentences(builder, max_examples=9))
        self.assertEqual(few, sentences[: len(few)])
        self.assertBetween(len(few), 2, 18)

    def test_shared_vocabulary(self):
        self.prepare_django()
        # In any order, and with a dataset that is no translation.
        names = ["translation_pairs", "django_messages"]
        printed = self.run_command("digits", *names)
        self.assertIn("digits: train 1,442, test 355", printed)
        path = vocabulary_path(names, SIZE, self.data_dir)
        self.assertIn(f"3 languages, in {path}", printed)
        self.assertEqual(Vocabulary.load(path).size, SIZE)
        # Existing files are left as they are.
        stamps = {path: path.stat().st_mtime_ns for path in self.files()}
        self.run_command(*names[::-1], "digits")
        self.assertEqual(
            stamps, {path: path.stat().st_mtime_ns for path in self.files()}
        )
        # Unless it is damaged.
        path.write_bytes(path.read_bytes()[:1000])
        self.run_command(*names)
        self.assertEqual(Vocabulary.load(path).size, SIZE)

    def test_languages_that_only_the_examples_tell(self):
        printed = self.run_command("tiny_messages")
        self.assertIn("320 word pieces, 4 languages", printed)

    def test_same_package_same_vocabulary(self):
        models = []
        for _ in range(2):
            data_dir = self.make_directory()
            self.prepare_django(data_dir=data_dir)
            path = vocabulary_path(["django_messages"], SIZE, data_dir)
            models.append(path.read_bytes())
        self.assertEqual(models[0], models[1])

    def test_damaged_package(self):
        content = bytearray(self.wheel.read_bytes())
        content[100] ^= 1
        self.wheel.write_bytes(content)
        error = self.error("django_messages", f"--package={self.wheel}")
        self.assertRegex(error, "damaged .* Expected: .* Received: .* pip down")
        self.wheel.write_bytes(content[:100])
        error = self.error("django_messages", f"--package={self.wheel}")
        self.assertIn(f"{self.wheel} is damaged", error)
        self.assertEmpty(self.files())

    def test_missing_package(self):
        error = self.error("django_messages", "--package=/nonsuch/a.whl")
        self.assertRegex(
            error, r"must be the file django-.*whl. Received: /non"
        )
        missing = self.make_directory() / self.wheel.name
        error = self.error("django_messages", f"--package={missing}")
        self.assertRegex(error, f"no file {missing}.* pip download")
        error = self.error("fashion_mnist", f"--package={missing}")
        self.assertRegex(error, "Cannot read the package .* apt-get download")
        self.assertEmpty(self.files())

    def test_cannot_download(self):
        # pip then asks no package index.
        with mock.patch.dict(os.environ, PIP_NO_INDEX="1"):
            error = self.error("django_messages")
        self.assertRegex(
            error,
            "Cannot download the package django: ERROR: No matching .*"
            "--package=FILE.$",
        )
        self.assertEmpty(self.files())

    def test_interrupted(self):
        generate = datasets.DjangoMessages._generate_examples

        def interrupted(self, pairs):
            yield from list(generate(self, pairs))[:10]
            raise KeyboardInterrupt

        with mock.patch.object(
            datasets.DjangoMessages, "_generate_examples", interrupted
        ):
            with self.assertRaisesRegex(SystemExit, "^Interrupted"):
                self.prepare_django()
        self.assertEmpty(self.files())
        self.prepare_django()
        data = tfds.load("django_messages", data_dir=self.data_dir)
        self.assertEqual(sum(map(len, data.values())), 400)

    def test_incomplete(self):
        self.prepare_django()
        for path in self.data_dir.rglob("dataset_info.json"):
            path.unlink()
        error = self.error("django_messages")
        self.assertRegex(error, "incomplete. Delete .*django_messages")

    @parameterized.parameters(
        ("nonsuch", SIZE, "no dataset 'nonsuch'"),
        ("translation_pairs", 10, "size 10 "),
    )
    def test_cannot_prepare(self, name, size, message):
        self.assertIn(message, self.error(name, size=size))

    def test_package_is_of_one_dataset(self):
        for names in (["digits"], ["django_messages", "home_assistant"]):
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                with self.assertRaises(SystemExit):
                    self.run_command(*names, "--package=a.whl")
            self.assertIn("--package is for one of: django_", stderr.getvalue())


class DownloadTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_django_messages(self):
        data_dir = self.get_temp_dir()
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            command.main(["django_messages", f"--data_dir={data_dir}"])
        self.assertIn("8,000 word pieces, 98 languages", stdout.getvalue())
        splits, info = tfds.load(
            "django_messages", data_dir=data_dir, with_info=True
        )
        counts = {name: len(data) for name, data in splits.items()}
        self.assertEqual(
            counts, {"train": 55_581, "validation": 3_182, "test": 6_680}
        )
        self.assertLen(info.metadata["languages"], 97)
        sources = {
            name: {
                re.sub(r"\s+", " ", x["source"].decode().casefold())
                for x in tfds.as_numpy(data)
            }
            for name, data in splits.items()
        }
        self.assertEmpty(sources["train"] & sources["test"])
        self.assertEmpty(sources["train"] & sources["validation"])
        self.assertEmpty(sources["validation"] & sources["test"])


if __name__ == "__main__":
    tf.test.main()
