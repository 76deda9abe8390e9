"""Replaces placeholders in messages of programs, which translations keep.

The names in `"%(count)s of {total}"` must be repeated letter by letter, and do
not matter to a translation. The model gets one token for each instead, as is
usual in translating the messages of programs:

    source          %(count)s of {total}    ->  A of B
    translation     A von B                 ->  %(count)s von {total}

where `A` and `B` stand for symbols: characters that occur in no text.
"""

import re

# The most placeholders of a text that are replaced.
NUM_SYMBOLS = 16

# Characters of Unicode's private use area.
SYMBOLS = tuple(chr(0xE000 + index) for index in range(NUM_SYMBOLS))

_PLACEHOLDER = re.compile(
    # Python's % and printf: %(name)s, %s, %d, %1$s.
    # Not `\b`: in languages without spaces, a letter may follow.
    r"%(?:\(\w+\)|\d+\$)?[sdif](?![A-Za-z0-9_])"
    # Format strings: {name}, {0}, {}.
    r"|\{[^{}\s]*\}"
    # HTML tags.
    r"|</?[a-zA-Z][^<>]*>"
)
_SYMBOL = re.compile(f"[{SYMBOLS[0]}-{SYMBOLS[-1]}]")


def find(source):
    """Returns the different placeholders of a source.

    Args:
        source: String.

    Returns:
        List of at most `NUM_SYMBOLS` strings, in the order of the source.
    """
    return list(dict.fromkeys(_PLACEHOLDER.findall(source)))[:NUM_SYMBOLS]


def replace(text, placeholders):
    """Returns a text with its placeholders replaced by symbols.

    Args:
        text: String, a source or its translation.
        placeholders: List that `find` returns for the source.

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
    """Returns a text with its symbols replaced by placeholders.

    Args:
        text: String, a translation with symbols. Symbols that the source does
            not have are dropped.
        placeholders: List that `find` returns for the source.
    """

    def placeholder(match):
        index = SYMBOLS.index(match[0])
        return placeholders[index] if index < len(placeholders) else ""

    return _SYMBOL.sub(placeholder, text)
