"""Small datasets of sentence pairs in invented languages."""

import numpy as np
import tensorflow_datasets as tfds

from trainers.vocabulary import Vocabulary

WORDS = "save continue delete user page group add change view name".split()
# Training pairs of each language. All begin with the same English texts.
NUM_TRAIN = {"xx": 60, "yy": 30, "zz": 9}
SPLITS = {"train": NUM_TRAIN, "test": {"xx": 8, "yy": 8, "zz": 3}}


def sources(count, seed):
    """Returns different texts of one to five words."""
    random = np.random.default_rng(seed)
    found = {}
    while len(found) < count:
        words = random.choice(WORDS, random.integers(1, 6))
        found.setdefault(" ".join(words))
    return list(found)


def translated(text, language):
    words = text.split()
    return {
        "xx": " ".join(words[::-1]),
        "yy": text.upper(),
        "zz": " ".join(2 * word for word in words),
    }[language]


class TinyMessages(tfds.core.GeneratorBasedBuilder):
    """Pairs with a language each, in splits train and test."""

    VERSION = tfds.core.Version("1.0.0")
    SPLITS = SPLITS

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "language": tfds.features.Text(),
                    "source": tfds.features.Text(),
                    "target": tfds.features.Text(),
                }
            ),
        )

    def _split_generators(self, dl_manager):
        return {
            split: self._generate_examples(seed, counts)
            for seed, (split, counts) in enumerate(self.SPLITS.items())
        }

    def _generate_examples(self, seed, counts):
        for language, count in counts.items():
            for text in sources(count, seed):
                yield (
                    f"{language} {text}",
                    {
                        "language": language,
                        "source": text,
                        "target": translated(text, language),
                    },
                )


class TinyEmptyMessages(TinyMessages):
    """No pairs to train with: all texts are white space."""

    SPLITS = {"train": {}, "test": {}}

    def _generate_examples(self, seed, counts):
        yield "0", {"language": "xx", "source": " ", "target": "save"}


class TinyUnprepared(TinyMessages):
    """Cannot be prepared: it needs a file that is not there."""

    MANUAL_DOWNLOAD_INSTRUCTIONS = "python -m tools.prepare_data tiny"


class TinyTranslation(tfds.core.GeneratorBasedBuilder):
    """Texts in English and one other language, in one split."""

    VERSION = tfds.core.Version("1.0.0")
    LANGUAGES = ("xx", "en")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.Translation(self.LANGUAGES),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for text in sources(200, 0):
            yield text, {"en": text, "xx": translated(text, "xx")}


class TinyTranslationWithoutEnglish(TinyTranslation):
    LANGUAGES = ("xx", "yy")

    def _generate_examples(self):
        yield "0", {"xx": "save", "yy": "SAVE"}


def vocabulary(path, languages=("en", *NUM_TRAIN), size=340):
    """Trains a vocabulary of the words, with bytes for all others."""
    texts = [
        text
        for source in sources(300, 0)
        for text in (source, *(translated(source, x) for x in NUM_TRAIN))
    ]
    return Vocabulary.train(texts, size, languages, path)
