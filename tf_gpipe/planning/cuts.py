"""Cuts into stages of nearly equal time, each of which fits its device.

This module imports no TensorFlow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Room(NamedTuple):
    """The memory limit of a stage, and the micro-batches that it holds.

    Attributes:
        limit: Float, bytes.
        kept: Float, the most micro-batches whose activations it holds at once.
        received: Float, the most micro-batches whose inputs it holds at once.
    """

    limit: float
    kept: float
    received: float


def within(
    seconds: Sequence[Sequence[float]],
    fixed: Sequence[float],
    stored: Sequence[float],
    received: Sequence[float],
    rooms: Sequence[Room],
) -> list[int] | None:
    """Returns the cut whose slowest stage is fastest, of those that fit.

    By dynamic programming over the end of each stage; O(K n^2).

    Args:
        seconds: For each of K stages, the times of n layers there.
        fixed: n numbers, bytes that a layer holds throughout.
        stored: n numbers, bytes that a layer keeps of a micro-batch.
        received: n numbers, bytes that a stage receives of a micro-batch if it
            begins with the layer.
        rooms: K `Room`s.

    Returns:
        List of K positive integers, the layers of each stage; `None` if no cut
        fits.

    Example:

    >>> rooms = [Room(3, 1, 1), Room(9, 1, 1)]
    >>> within([[1] * 4] * 2, [2] * 4, [0] * 4, [1] * 4, rooms)
    [1, 3]
    """
    n = len(fixed)
    ends = np.arange(n + 1)
    weights, kept = (
        np.concatenate([[0.0], np.cumsum(np.asarray(x, float))])
        for x in (fixed, stored)
    )
    given = np.concatenate([np.asarray(received, float), [0.0]])
    # Row i, column j: whether layers i to j - 1 are a stage, not empty.
    proper = ends[:, None] < ends[None, :]
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    choices = []
    for times, room in zip(seconds, rooms, strict=True):
        sums = np.concatenate([[0.0], np.cumsum(np.asarray(times, float))])
        held = (
            (weights[None, :] - weights[:, None])
            + room.kept * (kept[None, :] - kept[:, None])
            + room.received * given[:, None]
        )
        worst = np.maximum(best[:, None], sums[None, :] - sums[:, None])
        worst = np.where(proper & (held <= room.limit), worst, np.inf)
        choices.append(np.argmin(worst, axis=0))
        best = np.min(worst, axis=0)
    if best[n] == np.inf:
        return None
    bounds = [n]
    for choice in reversed(choices):
        bounds.insert(0, int(choice[bounds[0]]))
    return np.diff(bounds).tolist()
