"""What a device may take, as people say it."""

import dataclasses
import numbers
from typing import Any

from tf_gpipe.partition import sizes


class TooLittleMemoryError(ValueError):
    """A stage does not fit, whatever of it is recomputed.

    Attributes:
        least: The bytes that its device would have to have.
    """

    def __init__(self, message: str, least: float):
        super().__init__(message)
        self.least = least


@dataclasses.dataclass(frozen=True)
class MemoryLimit:
    """What a device may take.

    Attributes:
        value: Bytes; or a share of the activations that the fullest device
            takes without recomputation.
        is_share: Whether it is such a share.
        given: What the user gave.
    """

    value: float
    is_share: bool
    given: Any

    @classmethod
    def of(cls, given: Any) -> "MemoryLimit":
        """Returns the limit that a user means.

        Raises:
            TypeError: If it is neither a number nor a string.
            ValueError: If it is out of range.
        """
        if isinstance(given, numbers.Real) and not isinstance(
            given, (bool, numbers.Integral)
        ):
            if not 0 < float(given) <= 1:
                raise ValueError(
                    "`memory_limit` must be a share above 0 and up to 1, an "
                    "integer of bytes, or a size such as '8GB'. Received: "
                    f"memory_limit={given!r}"
                )
            return cls(float(given), True, given)
        return cls(sizes.to_bytes(given, "memory_limit"), False, given)
