"""The `memory_limit` of a device: bytes, or a share of the activations."""

import dataclasses
import numbers
from typing import Any

from tf_gpipe.partition import sizes


class TooLittleMemoryError(ValueError):
    """A stage exceeds the memory limit even where it recomputes all it can.

    Attributes:
        least: The least limit in bytes that its device would need.
        stages: List of the indices of the stages on that device.
    """

    def __init__(self, message: str, least: float, stages: list[int]):
        super().__init__(message)
        self.least = least
        self.stages = stages


@dataclasses.dataclass(frozen=True)
class MemoryLimit:
    """How much memory the stages of one device may use.

    Attributes:
        value: Bytes; or a share, above 0 and up to 1, of the activation bytes
            of the fullest device without recomputation.
        is_share: Whether `value` is a share.
        given: The user's argument, without the number types of NumPy.
    """

    value: float
    is_share: bool
    given: Any

    @classmethod
    def of(cls, given: Any) -> "MemoryLimit":
        """Returns the limit for a user's argument `memory_limit`.

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
            return cls(float(given), True, float(given))
        size = sizes.to_bytes(given, "memory_limit")
        return cls(size, False, given if isinstance(given, str) else size)
