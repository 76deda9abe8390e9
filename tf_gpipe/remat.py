"""Rematerialisation modes: which micro-batches are recomputed.

This module imports no TensorFlow.
"""

MODES = ("always", "except_last", "never")


def check(mode: str) -> None:
    """Raises a ValueError if there is no such mode."""
    if mode not in MODES:
        raise ValueError(
            f"`remat` must be one of {list(MODES)}. Received: remat={mode!r}"
        )


def recomputes(mode: str, micro_batch: int, num_micro_batches: int) -> bool:
    """Returns whether a mode recomputes a micro-batch's activations."""
    if mode == "except_last":
        return micro_batch < num_micro_batches - 1
    return mode == "always"
