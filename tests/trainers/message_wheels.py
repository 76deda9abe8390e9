"""Wheels with a few messages, for tests of the datasets that read them."""

import dataclasses
import hashlib
import json
import pathlib
import struct
import zipfile

from trainers import datasets

# Japanese has one form, Russian has three.
PLURALS = {
    "de": "nplurals=2; plural=(n != 1);",
    "ja": "nplurals=1; plural=0;",
    "ru": "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 "
    "&& (n%100<10 || n%100>=20) ? 1 : 2);",
}


def write_django(directory, catalogues):
    """Writes a wheel like Django's.

    Args:
        directory: Path, made if it does not exist.
        catalogues: Dictionary from locales to dictionaries of messages and
            translations, as they are in a compiled catalogue.

    Returns:
        The wheel's path.
    """
    return _write(
        directory,
        datasets.DjangoMessages,
        {
            f"django/conf/locale/{locale}/LC_MESSAGES/django.mo": _compiled(
                locale, messages
            )
            for locale, messages in catalogues.items()
        },
    )


def write_home_assistant(directory, files):
    """Writes a wheel like Home Assistant's.

    Args:
        directory: Path, made if it does not exist.
        files: Dictionary from names, such as `"moon/sensor.de"`, to the content
            of the JSON file.

    Returns:
        The wheel's path.
    """
    entries = {}
    for name, content in files.items():
        component, _, name = name.partition("/")
        path = f"homeassistant/components/{component}/translations/{name}.json"
        entries[path] = json.dumps(content).encode()
    return _write(directory, datasets.HomeAssistant, entries)


def package_of(builder_class, wheel):
    """Returns the package of a dataset, with the checksum of this wheel."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return dataclasses.replace(
        builder_class.PACKAGE, sha256={wheel.name: digest}
    )


def _write(directory, builder_class, entries):
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (name,) = builder_class.PACKAGE.sha256
    with zipfile.ZipFile(directory / name, "w") as archive:
        # The same wheel whenever it is written.
        for path, content in {**entries, "x/METADATA": b"x"}.items():
            archive.writestr(zipfile.ZipInfo(path), content)
    return directory / name


def _compiled(locale, messages):
    """Returns a catalogue as `msgfmt` compiles it."""
    header = (
        "Content-Type: text/plain; charset=UTF-8\n"
        f"Plural-Forms: {PLURALS.get(locale, PLURALS['de'])}\n"
    )
    entries = sorted({"": header, **messages}.items())
    # The header of the file, then two tables, then the texts.
    size = 28 + 16 * len(entries)
    tables, texts = [], b""
    for column in (0, 1):
        for entry in entries:
            text = entry[column].encode()
            tables.append(struct.pack("<2I", len(text), size + len(texts)))
            texts += text + b"\0"
    head = struct.pack(
        "<7I", 0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0
    )
    return head + b"".join(tables) + texts
