"""Datasets read from packages: their pairs, and the pairs of each split."""

import collections
import dataclasses
import gzip
import hashlib
import pathlib
import struct
import tempfile
import zipfile
from unittest import mock

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl.testing import parameterized

from tests.trainers import message_wheels
from tests.trainers import tiny_messages
from trainers import datasets
from trainers import images
from trainers.command_line import UserError
from trainers.datasets import fashion_mnist
from trainers.datasets import message_pairs
from trainers.datasets import packages
from trainers.sentence_pairs import SentencePairs


class TestCase(tf.test.TestCase, parameterized.TestCase):
    def make_directory(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

    def prepare(self, builder_class, wheel, data_dir=None):
        """Returns the builder, prepared from a wheel in a directory."""
        package = message_wheels.package_of(builder_class, wheel)
        with mock.patch.object(builder_class, "PACKAGE", package):
            builder = builder_class(data_dir=data_dir or self.make_directory())
            builder.download_and_prepare(
                download_dir=self.make_directory(),
                download_config=tfds.download.DownloadConfig(
                    manual_dir=wheel.parent
                ),
            )
        return builder

    def pairs(self, builder_class, wheel):
        """Returns all pairs of a wheel, as they go into the splits."""
        builder = builder_class(data_dir=self.make_directory())
        with zipfile.ZipFile(wheel) as archive:
            return message_pairs.clean(builder._messages(archive))

    def examples(self, builder, split="all"):
        """Returns tuples `(language, source, target)`, in their order."""
        data = builder.as_dataset(split=split)
        keys = ("language", "source", "target")
        return [
            tuple(example[key].decode() for key in keys)
            for example in data.as_numpy_iterator()
        ]


class SeveralProgramsTest(TestCase):
    @parameterized.parameters(
        (
            datasets.Digits,
            lambda data_dir: len(images.load("digits", data_dir).train),
            1442,
        ),
        (
            tiny_messages.TinyMessages,
            lambda data_dir: len(
                SentencePairs(["tiny_messages"], data_dir).held_out(9)
            ),
            3,
        ),
    )
    def test_another_one_prepares_it_at_the_same_time(self, kind, load, count):
        data_dir = str(self.make_directory())
        generators, others = kind._split_generators, []

        def meanwhile(builder, manager):
            if not others:
                others.append(kind(data_dir=data_dir))
                others[0].download_and_prepare()
            return generators(builder, manager)

        with mock.patch.object(kind, "_split_generators", meanwhile):
            self.assertEqual(load(data_dir), count)
        self.assertNotEmpty(others)

    def test_what_cannot_be_prepared(self):
        error = mock.patch.object(
            datasets.Digits, "_split_generators", side_effect=OSError("no")
        )
        with error, self.assertRaisesRegex(UserError, "'digits': .*no"):
            images.load("digits", str(self.make_directory()))


class DjangoMessagesTest(TestCase):
    def pairs(self, **catalogues):
        wheel = message_wheels.write_django(self.make_directory(), catalogues)
        return super().pairs(datasets.DjangoMessages, wheel)

    def test_messages(self):
        pairs = self.pairs(
            en={"Save": "Save!"},
            de={
                "Save": "Sichern",
                "Name": "Name",
                " Log out\n": "\nAbmelden ",
                "Close": "",
                # The same letter in one character, and in two.
                "Cafe\u0301": "Kaffee\u0308",
            },
            pt_BR={"Save": "Salvar"},
            sr_Latn={"Save": "Sačuvaj"},
        )
        self.assertEqual(
            pairs,
            [
                ("de", "Caf\u00e9", "Kaffe\u00eb"),
                ("de", "Log out", "Abmelden"),
                ("de", "Save", "Sichern"),
                ("pt-BR", "Save", "Salvar"),
                ("sr-Latn", "Save", "Sačuvaj"),
            ],
        )

    def test_contexts(self):
        pairs = self.pairs(
            de={
                "month\4May": "Mai",
                "May": "Mai",
                "verb\4May": "darf",
                "verb\4%d may\0%d may": "%d darf\0%d dürfen",
            }
        )
        self.assertEqual(
            pairs,
            [
                ("de", "%d may", "%d darf"),
                ("de", "%d may", "%d dürfen"),
                ("de", "May", "Mai"),
                ("de", "May", "darf"),
            ],
        )

    def test_plurals(self):
        days = "%d day\0%d days"
        pairs = self.pairs(
            de={days: "%d Tag\0%d Tage"},
            ja={days: "%d日"},
            ru={days: "%d день\0%d дня\0%d дней"},
        )
        self.assertEqual(
            pairs,
            [
                ("de", "%d day", "%d Tag"),
                ("de", "%d days", "%d Tage"),
                ("ja", "%d day", "%d日"),
                ("ja", "%d days", "%d日"),
                ("ru", "%d day", "%d день"),
                ("ru", "%d days", "%d дней"),
            ],
        )


class HomeAssistantTest(TestCase):
    def test_messages(self):
        wheel = message_wheels.write_home_assistant(
            self.make_directory(),
            {
                "sun/en": {
                    "title": "Sun",
                    "config": {"abort": {"a": "Done", "b": "Failed"}},
                    "empty": "",
                    "kind": {"a": "Star"},
                },
                "sun/de": {
                    "title": "Sonne",
                    # One at another place than "Failed"; then one that English
                    # lacks.
                    "config": {"abort": {"a": "Fertig"}, "b": "Fehler"},
                    "gone": "Weg",
                    "empty": "Leer",
                    "kind": "Stern",
                },
                "sun/zh-Hans": {"title": "太阳", "kind": {"a": 1}},
                "moon/sensor.en": {"title": "Full moon"},
                "moon/sensor.es-419": {"title": "Luna llena"},
                "moon/de": {"title": "Mond"},
            },
        )
        self.assertEqual(
            self.pairs(datasets.HomeAssistant, wheel),
            [
                ("de", "Done", "Fertig"),
                ("de", "Sun", "Sonne"),
                ("es-419", "Full moon", "Luna llena"),
                ("zh-Hans", "Sun", "太阳"),
            ],
        )


class SplitsTest(TestCase):
    # Each message, and another way to write it.
    SOURCES = {
        f"The {noun} of {number}": f"THE  {noun.upper()}\nof {number}"
        for noun in ("Straße", "house", "İzmir")
        for number in range(200)
    }

    def wheel(self):
        """Each language lacks some messages, and writes some the other way."""
        variants = list(enumerate(self.SOURCES.items()))
        return message_wheels.write_django(
            self.make_directory(),
            {
                locale: {
                    texts[(index + language) % 2]: f"{locale} {index}"
                    for index, texts in variants
                    if (index + language) % 5
                }
                for language, locale in enumerate(("de", "pt_BR", "ja"))
            },
        )

    def test_no_source_is_in_two_splits(self):
        builder = self.prepare(datasets.DjangoMessages, self.wheel())
        sources, languages = {}, {}
        for split in ("train", "validation", "test"):
            examples = self.examples(builder, split)
            # The other way to write a message makes no other source.
            sources[split] = {
                " ".join(source.casefold().split()) for _, source, _ in examples
            }
            languages[split] = {language for language, _, _ in examples}
        self.assertEmpty(sources["train"] & sources["test"])
        self.assertEmpty(sources["train"] & sources["validation"])
        self.assertEmpty(sources["validation"] & sources["test"])
        # Shows that the comparisons above are of all sources.
        self.assertEqual(len(set().union(*sources.values())), len(self.SOURCES))
        self.assertEqual(languages["train"], {"de", "pt-BR", "ja"})
        self.assertEqual(languages["test"], {"de", "pt-BR", "ja"})
        self.assertBetween(len(sources["train"]), 450, 550)
        self.assertBetween(len(sources["test"]), 30, 90)
        self.assertBetween(len(sources["validation"]), 10, 60)

    def test_split_follows_from_the_source_alone(self):
        # It is the same in any dataset and version: a change would leak pairs
        # that models have been trained on into the test.
        counts = collections.Counter(
            message_pairs.split_of(f"message {i}") for i in range(10_000)
        )
        self.assertBetween(counts["test"], 900, 1100)
        self.assertBetween(counts["validation"], 400, 600)
        self.assertEqual(
            [message_pairs.split_of(f"message {i}") for i in (3, 4, 16)],
            ["train", "validation", "test"],
        )

    def test_same_package_same_dataset(self):
        wheel = self.wheel()
        first = self.prepare(datasets.DjangoMessages, wheel)
        second = self.prepare(datasets.DjangoMessages, wheel)
        self.assertEqual(self.examples(first), self.examples(second))
        self.assertLen(self.examples(first), 3 * 600 * 4 // 5)


class PackageTest(TestCase):
    def setUp(self):
        super().setUp()
        self.data_dir = self.make_directory()
        self.wheel = message_wheels.write_django(
            self.make_directory(),
            {
                locale: {f"message {i}": f"{locale} {i}" for i in range(40)}
                for locale in ("de", "zh_Hans")
            },
        )

    def assert_nothing_prepared(self):
        self.assertEmpty(list(self.data_dir.rglob("*.*")))

    def test_damaged(self):
        package = message_wheels.package_of(datasets.DjangoMessages, self.wheel)
        content = bytearray(self.wheel.read_bytes())
        content[len(content) // 2] ^= 1
        self.wheel.write_bytes(content)
        builder = datasets.DjangoMessages(data_dir=self.data_dir)
        with mock.patch.object(datasets.DjangoMessages, "PACKAGE", package):
            with self.assertRaisesRegex(
                UserError,
                "damaged or of another version. Expected: SHA-256 .* Received: "
                ".* pip download .* django==",
            ):
                builder.download_and_prepare(
                    download_dir=self.make_directory(),
                    download_config=tfds.download.DownloadConfig(
                        manual_dir=self.wheel.parent
                    ),
                )
        self.assert_nothing_prepared()

    def test_missing(self):
        with self.assertRaisesRegex(UserError, "no file .* pip download"):
            datasets.DjangoMessages.PACKAGE.check(self.make_directory())
        # A trainer tells this if nothing has been prepared.
        with self.assertRaisesRegex(
            AssertionError, "python -m tools.prepare_data django_messages"
        ):
            tfds.load("django_messages", data_dir=self.data_dir)
        self.assert_nothing_prepared()

    def test_compression_does_not_matter(self):
        directory = self.make_directory()
        digest = hashlib.sha256(b"content").hexdigest()
        package = packages.Package("a", "1", "MIT", "get a", {"a.gz": digest})
        for level in (1, 9):
            (directory / "a.gz").write_bytes(gzip.compress(b"content", level))
            package.check(directory)
        for damaged in (b"", b"content", gzip.compress(b"content")[:-9]):
            (directory / "a.gz").write_bytes(damaged)
            with self.assertRaisesRegex(UserError, "a.gz.* get a$"):
                package.check(directory)

    def test_recorded(self):
        self.prepare(datasets.DjangoMessages, self.wheel, self.data_dir)
        # The prepared data alone tells this.
        info = tfds.builder("django_messages", data_dir=self.data_dir).info
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.assertEqual(
            dict(info.metadata),
            {
                "package": "django",
                "version": "5.2.19",
                "license": "BSD-3-Clause",
                "sha256": {self.wheel.name: digest},
                "languages": ["de", "zh-Hans"],
            },
        )
        self.assertEqual(info.redistribution_info.license, "BSD-3-Clause")


class FashionMNISTTest(TestCase):
    def test_tfds_reads_it(self):
        numbers = {"train": 20, "test": 7}
        manual_dir, sha256, expected = self.make_directory(), {}, {}
        for split, file in (("train", "train"), ("test", "t10k")):
            count = numbers[split]
            random = np.random.default_rng(count)
            images = random.integers(0, 256, (count, 28, 28), np.uint8)
            labels = np.arange(count, dtype=np.uint8) % 10
            expected[split] = sorted(
                zip(map(np.ndarray.tobytes, images), labels, strict=True)
            )
            for name, head, array in (
                ("images-idx3", (2051, count, 28, 28), images),
                ("labels-idx1", (2049, count), labels),
            ):
                content = struct.pack(f">{len(head)}I", *head)
                content += array.tobytes()
                name = f"{file}-{name}-ubyte.gz"
                sha256[name] = hashlib.sha256(content).hexdigest()
                (manual_dir / name).write_bytes(gzip.compress(content))
        data_dir = self.make_directory()
        package = dataclasses.replace(
            fashion_mnist.FashionMNIST.PACKAGE, sha256=sha256
        )
        with mock.patch.multiple(
            fashion_mnist.FashionMNIST, PACKAGE=package, NUM_EXAMPLES=numbers
        ):
            fashion_mnist.FashionMNIST(data_dir=data_dir).download_and_prepare(
                download_dir=self.make_directory(),
                download_config=tfds.download.DownloadConfig(
                    manual_dir=manual_dir
                ),
            )
        splits, info = tfds.load(
            "fashion_mnist",
            data_dir=data_dir,
            as_supervised=True,
            with_info=True,
            download=False,
        )
        for split, examples in splits.items():
            found = sorted((x.tobytes(), y) for x, y in tfds.as_numpy(examples))
            self.assertEqual(found, expected[split])
        self.assertEqual(info.features["label"].int2str(9), "Ankle boot")
        self.assertEqual(info.metadata["license"], "MIT")


if __name__ == "__main__":
    tf.test.main()
