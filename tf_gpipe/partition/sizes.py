"""Sizes in bytes, parsed from numbers or strings such as "16GB"."""

import math
import numbers
import re
from typing import Any


def to_bytes(value: Any, name: str = "size") -> int:
    """Returns a size as an integer of bytes.

    Args:
        value: Positive number, or a string such as `"16GB"`, `"512MB"` or
            `"16GiB"`.
        name: String, the name of the argument in errors.

    Raises:
        ValueError: If the number or string is no size of at least a byte.
        TypeError: If it is neither a number nor a string.

    Example:

    >>> to_bytes("1.5GB"), to_bytes("2KiB"), to_bytes(2**20)
    (1500000000, 2048, 1048576)
    """
    expected = (
        f"`{name}` must be a positive number of bytes, or a size such as "
        f"'16GB', '512MB' or '16GiB'. Received: {name}={value!r}"
    )
    size = 0.0
    if isinstance(value, str):
        match = re.fullmatch(
            r"\s*(\d+\.?\d*(?:E\+?\d+)?)\s*(?:([KMGT])(I?))?B?\s*",
            value.upper(),
        )
        if match:
            number, prefix, binary = match.groups()
            power = "KMGT".index(prefix) + 1 if prefix else 0
            size = float(number) * (1024 if binary else 1000) ** power
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        size = float(value)
    else:
        raise TypeError(expected)
    if not 1 <= size < math.inf:
        raise ValueError(expected)
    return int(size)
