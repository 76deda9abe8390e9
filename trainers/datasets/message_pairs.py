"""Base of datasets of a program's messages and their translations."""

import abc
import hashlib
import pathlib
import unicodedata
import zipfile

import tensorflow_datasets as tfds

# Shares of the English messages, not of the pairs. The same for all datasets,
# so that a message in two of them is in the same split of both. The share of
# the test is large because there are few messages.
_TEST = 0.10
_VALIDATION = 0.05


class MessagePairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Base class of datasets that are read from a wheel's translations.

    An example has three texts:

    - `language`: the code of the target's language as in BCP 47, such as
      `de`, `pt-BR` or `zh-Hans`.
    - `source`: the English message.
    - `target`: its translation.

    Texts are in Unicode's normal form NFC, without white space at the ends.
    Duplicates of all three are removed, and so are pairs whose target equals
    the source or where one of them is empty. A message with several
    translations into a language, for several contexts, has several pairs.

    The split of a pair is determined by a hash of its source, without case and
    white space: a source is in the same split for all languages, and in all
    datasets of this kind. `test` has about 10 % of the sources, `validation`
    5 %, `train` 85 %.

    The dataset's `info.metadata` has package, version, licence, SHA-256 and
    `languages`.

    Subclasses set `PACKAGE` and `MANUAL_DOWNLOAD_INSTRUCTIONS`, and override
    `_info`, by `self._message_info`, and `_messages`.
    """

    PACKAGE = None

    def _message_info(self, description, homepage):
        return tfds.core.DatasetInfo(
            builder=self,
            description=description,
            homepage=homepage,
            license=self.PACKAGE.license,
            features=tfds.features.FeaturesDict(
                {
                    "language": tfds.features.Text(),
                    "source": tfds.features.Text(),
                    "target": tfds.features.Text(),
                }
            ),
            metadata=tfds.core.MetadataDict(self.PACKAGE.metadata()),
        )

    @abc.abstractmethod
    def _messages(self, archive):
        """Yields `(language, source, target)` as they are in the wheel.

        Args:
            archive: `zipfile.ZipFile`, the wheel.
        """

    def _split_generators(self, dl_manager):
        self.PACKAGE.check(dl_manager.manual_dir)
        (name,) = self.PACKAGE.sha256
        path = pathlib.Path(dl_manager.manual_dir) / name
        with zipfile.ZipFile(path) as archive:
            pairs = clean(self._messages(archive))
        self.info.metadata["languages"] = sorted({pair[0] for pair in pairs})
        splits = {"train": [], "validation": [], "test": []}
        for pair in pairs:
            splits[split_of(pair[1])].append(pair)
        return {
            name: self._generate_examples(pairs)
            for name, pairs in splits.items()
        }

    def _generate_examples(self, pairs):
        for index, (language, source, target) in enumerate(pairs):
            yield (
                index,
                {"language": language, "source": source, "target": target},
            )


def clean(messages):
    """Normalises pairs, and drops duplicates and untranslated ones.

    Args:
        messages: Iterable of `(language, source, target)`.

    Returns:
        Sorted list of such tuples.
    """
    pairs = set()
    for language, source, target in messages:
        source, target = normalized(source), normalized(target)
        if source and target and source != target:
            pairs.add((language.replace("_", "-"), source, target))
    return sorted(pairs)


def normalized(text):
    """Returns a text in the form NFC, without white space at the ends."""
    return unicodedata.normalize("NFC", text).strip()


def split_of(source):
    """Returns the split of an English message.

    Args:
        source: String. Case and the amount of white space do not matter.

    Returns:
        `"train"`, `"validation"` or `"test"`.
    """
    text = " ".join(source.casefold().split())
    digest = hashlib.sha256(text.encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < _TEST:
        return "test"
    return "validation" if share < _TEST + _VALIDATION else "train"
