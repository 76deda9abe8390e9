"""Messages of the web framework Django, as a TFDS dataset."""

import gettext
import io
import re
import struct

import tensorflow_datasets as tfds

from trainers.datasets import message_pairs
from trainers.datasets import packages

_CATALOGUE = re.compile(r".*/locale/(\w+)/LC_MESSAGES/\w+\.mo")
# A number for which no language has a plural form of its own.
_MANY = 100


class DjangoMessages(message_pairs.MessagePairs):
    """65,443 pairs of 982 English messages and their translations.

    In 97 languages: 55,581 pairs in `train`, 3,182 in `validation`, 6,680 in
    `test`. They are read from Django's wheel, BSD-3-Clause. If a message has
    plural forms, the English singular is paired with the form for 1, and the
    English plural with the form for 100, that of large numbers.

    Prepare it with `python -m tools.prepare_data django_messages`. See
    `MessagePairs` for features and splits.

    Example:

    ```python
    from trainers import datasets  # Registers the dataset.

    train = tfds.load("django_messages", split="train")
    ```
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Django 5.2.19."}
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "python -m tools.prepare_data django_messages"
    )
    PACKAGE = packages.wheel(
        "django",
        "5.2.19",
        "BSD-3-Clause",
        "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
    )

    def _info(self):
        return self._message_info(
            description="Messages of the web framework Django in English and "
            "other languages.",
            homepage="https://www.djangoproject.com",
        )

    def _messages(self, archive):
        for name in archive.namelist():
            match = _CATALOGUE.fullmatch(name)
            # The English catalogue has no translations.
            if match and match[1] != "en":
                for source, target in _translations(archive.read(name)):
                    yield match[1], source, target


def _translations(catalogue):
    """Yields `(message, translation)` of a compiled catalogue's bytes."""
    translations = gettext.GNUTranslations(io.BytesIO(catalogue))
    for message in _message_ids(catalogue):
        # A context, such as "abbrev. month", stands before the message.
        source = message.rpartition("\4")[2]
        singular, *plural = source.split("\0")
        if not plural:
            # The empty message has the catalogue's header as translation.
            if message:
                yield source, translations.gettext(message)
            continue
        message = message.partition("\0")[0]
        for text, number in ((singular, 1), (plural[0], _MANY)):
            yield text, translations.ngettext(message, text, number)


def _message_ids(catalogue):
    """Yields the message ids of a catalogue, with their plurals.

    `gettext` offers no list of them, and drops the plurals.
    """
    order = "<" if catalogue.startswith(b"\xde\x12\x04\x95") else ">"
    # Magic number, version, number of messages, offset of their table.
    _, _, count, table = struct.unpack_from(f"{order}4I", catalogue)
    for index in range(count):
        length, start = struct.unpack_from(
            f"{order}2I", catalogue, table + 8 * index
        )
        yield catalogue[start : start + length].decode()
