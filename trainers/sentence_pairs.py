"""Sentences with their translations, from TFDS."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
from typing import NamedTuple

import tensorflow as tf
import tensorflow_datasets as tfds

from tf_gpipe.checks import near
from trainers import datasets
from trainers.command_line import UserError
from trainers.datasets import message_pairs

DIRECTIONS = ("en-x", "x-en", "both")

# The number of examples that are read and tokenised at a time.
_CHUNK = 4096


class Direction(NamedTuple):
    """The source and target language of a translation.

    Attributes:
        source: String, the code of the source's language.
        target: String, the code of the target's language.
    """

    source: str
    target: str

    @property
    def other(self):
        """The one of the two languages that is not English."""
        return self.target if self.source == "en" else self.source

    def __str__(self):
        return f"{self.source} > {self.target}"


@dataclasses.dataclass(frozen=True)
class SentencePairs:
    """A selection of sentence pairs, by datasets, directions and languages.

    A dataset has one of two forms. Either its features are `language`, the
    code of a language, `source`, an English text, and `target`, its
    translation; or they are those of `tfds.features.Translation`, as in
    `wmt16_translate/de-en`, where one of the two languages is English.

    Its splits are `train`, and `test` or `validation` or both. A dataset that
    has only `train` is split by its English texts, as those of
    `trainers.datasets` are: no English text is in both training and test,
    whatever language it is translated into.

    Attributes:
        datasets: List of strings, names of datasets in TFDS.
        data_dir: Directory of prepared datasets. Defaults to that of TFDS.
        directions: `"en-x"` to translate from English, `"x-en"` to translate
            into English, or `"both"`. Defaults to `"en-x"`.
        languages: List of strings, the languages other than English. Defaults
            to `None`, for all that there are.

    Example:

    ```python
    pairs = SentencePairs(["django_messages"], languages=["de"])
    test = pairs.held_out(num_pairs=10)
    test[Direction("en", "de")]  # List of 10 tuples of two texts.
    ```
    """

    datasets: list[str]
    data_dir: str | None = None
    directions: str = "en-x"
    languages: list[str] | None = None

    def check_names(self):
        """Checks that TFDS knows the datasets, and loads none of them.

        Raises:
            UserError: If it does not.
        """
        for name in self.datasets:
            with _as_user_errors(name):
                tfds.builder(name, data_dir=self.data_dir)

    def texts(self, split):
        """Yields the pairs of a split, in chunks of one direction each.

        Args:
            split: `"train"`, `"validation"` or `"test"`. If a dataset has only
                one of the latter two, it is used for both.

        Yields:
            Tuples of a `Direction`, a list of sources and one of targets.

        Raises:
            UserError: If a dataset cannot be loaded, there are no pairs, or a
                language has none to train with.
        """
        found = set()
        for name in self.datasets:
            for language, english, other in _read(name, self.data_dir, split):
                if self.languages and language not in self.languages:
                    continue
                found.add(language)
                if self.directions != "x-en":
                    yield Direction("en", language), english, other
                if self.directions != "en-x":
                    yield Direction(language, "en"), other, english
        self._check(found, split)

    def held_out(self, num_pairs, split="test"):
        """Returns pairs of a split that is not trained on.

        They are chosen by a hash of the English text: languages into which all
        texts of a dataset are translated are tested with the same texts.

        Args:
            num_pairs: Positive integer, the most pairs of each direction.
            split: `"test"` or `"validation"`. Defaults to `"test"`.

        Returns:
            Dictionary of lists of tuples `(source, target)` by `Direction`.

        Raises:
            UserError: As `texts`.
        """
        found = {}
        for direction, sources, targets in self.texts(split):
            pairs = found.setdefault(direction, [])
            pairs += zip(sources, targets, strict=True)
        chosen = {}
        for direction in sorted(found):
            english = direction.index("en")
            by_hash = sorted(
                (hashlib.sha256(pair[english].encode()).digest(), pair)
                for pair in found[direction]
            )
            chosen[direction] = [pair for _, pair in by_hash[:num_pairs]]
        return chosen

    def _check(self, found, split):
        """Raises an error if there are no pairs, or a language has none.

        Args:
            found: Set of strings, the languages that have pairs.
            split: The split that was read.
        """
        names = ",".join(self.datasets)
        missing = sorted(set(self.languages or ()) - found)
        # Not for test splits: a language with few pairs may have none there.
        if missing and (split == "train" or not found):
            present = {
                language
                for name in self.datasets
                for language, *_ in _read(name, self.data_dir, split)
            }
            raise UserError(
                f"Dataset {names} has no {split} pairs in "
                f"{', '.join(missing)}. It has: {', '.join(sorted(present))}. "
                f"Received: --languages={','.join(self.languages)}"
                f"{near(missing, present)}"
            )
        if not found:
            raise UserError(
                f"Dataset {names} has no {split} pairs. Prepare it again, or "
                "choose another --dataset."
            )


def chunks(pairs):
    """Yields the pairs returned by `held_out` in the form of `texts`."""
    for direction, found in pairs.items():
        yield direction, *map(list, zip(*found, strict=True))


def _read(name, data_dir, split):
    """Yields `(language, English texts, other texts)` of a dataset's split."""
    with _as_user_errors(name):
        examples, other, part = _load(name, data_dir, split)
        for chunk in tfds.as_numpy(examples.batch(_CHUNK)):
            if other:
                rows = [[other] * len(chunk["en"]), chunk["en"], chunk[other]]
            else:
                rows = [chunk[x] for x in ("language", "source", "target")]
            found = collections.defaultdict(lambda: ([], []))
            for row in zip(*rows, strict=True):
                language, english, text = (
                    message_pairs.normalized(tf.compat.as_text(x)) for x in row
                )
                if part and message_pairs.split_of(english) != part:
                    continue
                if english and text:
                    found[language][0].append(english)
                    found[language][1].append(text)
            for language, texts in found.items():
                yield language, *texts


@contextlib.contextmanager
def _as_user_errors(name):
    """Turns errors of loading a dataset into `UserError`s."""
    try:
        yield
    except tfds.core.DatasetNotFoundError as error:
        raise datasets.not_found(name) from error
    except UserError:
        raise
    # Any error of the dataset's own code, the network or the disk.
    except Exception as error:
        raise UserError(
            f"Cannot load dataset {name!r}: {error}. If its files are damaged, "
            "delete them and prepare it again."
        ) from error


def _load(name, data_dir, split):
    """Loads the examples of a split.

    Returns:
        Tuple of a `tf.data.Dataset`; the language other than English if
        examples are of `tfds.features.Translation`, else `None`; and `split` if
        the caller must select its examples by `message_pairs.split_of`, else
        `None`.
    """
    make = functools.partial(tfds.builder, name, data_dir=data_dir)
    builder = make()
    command = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
    if command and not builder.is_prepared():
        place = "" if data_dir is None else f" --data_dir={data_dir}"
        raise UserError(
            f"Dataset {name!r} is not in {builder.data_dir}. Prepare it with: "
            f"{command}{place}"
        )
    builder = datasets.prepare(make)
    features, other = builder.info.features, None
    if isinstance(features, tfds.features.Translation):
        other = (set(features) - {"en"}).pop()
        if set(features) != {"en", other}:
            raise UserError(
                f"Dataset {name!r} must be of English, 'en', and one other "
                f"language. Received: {', '.join(sorted(features))}"
            )
    elif not {"language", "source", "target"} <= set(features):
        raise UserError(
            f"Dataset {name!r} cannot be used. Expected the features "
            "'language', 'source' and 'target', or a "
            f"tfds.features.Translation. Received: features={features}"
        )
    available = builder.info.splits
    if "train" not in available:
        raise UserError(
            f"Dataset {name!r} has no split 'train'. It has: {list(available)}"
        )
    wanted = [split]
    if split != "train":
        wanted += [{"test": "validation", "validation": "test"}[split]]
    if set(available) & {"test", "validation"}:
        key = next(x for x in wanted if x in available)
        return builder.as_dataset(key), other, None
    return builder.as_dataset("train"), other, split
