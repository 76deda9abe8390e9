"""Placeholders in messages of programs, which a translation has to keep.

In `"%(count)s of {total}"` the names tell a translation nothing, and are to be
repeated letter by letter. A model is given one token for each instead, as is
usual where the messages of programs are translated:

    source          %(count)s of {total}    ->  A of B
    translation     A von B                 ->  %(count)s von {total}

where `A` and `B` stand for characters that no text has.
"""

import re

# How many different ones of a text are replaced.
NUM_SYMBOLS = 16

# Of Unicode's private use area.
SYMBOLS = tuple(chr(0xE000 + index) for index in range(NUM_SYMBOLS))

_PLACEHOLDER = re.compile(
    # Of Python's % and of printf: %(name)s, %s, %d, %1$s.
    # Not `\b`: where languages have no spaces, a letter may follow.
    r"%(?:\(\w+\)|\d+\$)?[sdif](?![A-Za-z0-9_])"
    # Of format strings: {name}, {0}, {}.
    r"|\{[^{}\s]*\}"
    # Tags of HTML.
    r"|</?[a-zA-Z][^<>]*>"
)
_SYMBOL = re.compile(f"[{SYMBOLS[0]}-{SYMBOLS[-1]}]")


def find(source):
    """Returns the placeholders of a source, each once.

    Args:
        source: String.

    Returns:
        List of at most `NUM_SYMBOLS` strings, in the order of the source.
    """
    return list(dict.fromkeys(_PLACEHOLDER.findall(source)))[:NUM_SYMBOLS]


def replace(text, placeholders):
    """Returns a text with symbols for placeholders.

    Args:
        text: String, a source or its translation.
        placeholders: What `find` returns of the source.

    Example:

    ```python
    found = find("%(count)s of {total}")  # ["%(count)s", "{total}"]
    masked = replace("{total}, %(count)s", found)  # Symbols 1 and 0.
    restore(masked, found)  # "{total}, %(count)s"
    ```
    """
    numbers = {x: index for index, x in enumerate(placeholders)}

    def symbol(match):
        index = numbers.get(match[0])
        return match[0] if index is None else SYMBOLS[index]

    return _PLACEHOLDER.sub(symbol, text)


def restore(text, placeholders):
    """Returns a text with placeholders for symbols.

    Args:
        text: String, a translation of a source with symbols. Symbols that the
            source does not have are left out.
        placeholders: What `find` returns of the source.
    """

    def placeholder(match):
        index = SYMBOLS.index(match[0])
        return placeholders[index] if index < len(placeholders) else ""

    return _SYMBOL.sub(placeholder, text)
