"""Messages of the home automation Home Assistant, as a TFDS dataset."""

import collections
import json
import re

import tensorflow_datasets as tfds

from trainers.datasets import message_pairs
from trainers.datasets import packages

# Such as `homeassistant/components/moon/translations/sensor.pt-BR.json`.
_FILE = re.compile(r"(.*/translations/(?:\w+\.)?)([\w-]+)\.json")


class HomeAssistant(message_pairs.MessagePairs):
    """309,903 pairs of 13,411 English messages and their translations.

    In 57 languages: 263,812 pairs in `train`, 15,152 in `validation`, 30,939 in
    `test`. They are read from Home Assistant's wheel, Apache-2.0, in which a
    message and its translation have the same key.

    Prepare it with `python -m tools.prepare_data home_assistant`. See
    `MessagePairs` for features and splits.

    Example:

    ```python
    from trainers import datasets  # Registers the dataset.

    train = tfds.load("home_assistant", split="train")
    ```
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Home Assistant 2024.3.3."}
    MANUAL_DOWNLOAD_INSTRUCTIONS = "python -m tools.prepare_data home_assistant"
    PACKAGE = packages.wheel(
        "homeassistant",
        "2024.3.3",
        "Apache-2.0",
        "6e1ec2c07441d63fdcfb8acd2c4bbb6f68bc97330855784d3623d10c38fe3577",
    )

    def _info(self):
        return self._message_info(
            description="Messages of the home automation Home Assistant in "
            "English and other languages.",
            homepage="https://www.home-assistant.io",
        )

    def _messages(self, archive):
        groups = collections.defaultdict(dict)
        for name in archive.namelist():
            if match := _FILE.fullmatch(name):
                groups[match[1]][match[2]] = name
        for group in groups.values():
            if "en" not in group:
                continue
            sources = _strings(archive.read(group.pop("en")))
            for language, name in group.items():
                for key, target in _strings(archive.read(name)).items():
                    if key in sources:
                        yield language, sources[key], target


def _strings(text):
    """Returns the strings in nested JSON objects, by their tuple of keys."""
    strings = {}
    remaining = [((), json.loads(text))]
    while remaining:
        path, value = remaining.pop()
        if isinstance(value, str):
            strings[path] = value
        elif isinstance(value, dict):
            remaining += [((*path, key), x) for key, x in value.items()]
    return strings
