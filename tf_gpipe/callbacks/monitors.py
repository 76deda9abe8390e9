"""What Keras's callbacks that watch a metric remember of earlier epochs.

Those are `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint`.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

# What changes while they watch. All else is how the user has made them.
_NUMBERS = (
    "best",
    "best_epoch",
    "cooldown_counter",
    "stopped_epoch",
    "wait",
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
)
# Of EarlyStopping(restore_best_weights=True).
_WEIGHTS = "best_weights"


def states(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict]:
    """Returns what callbacks remember as JSON has it, but for weights."""
    return [
        {
            "class": type(x).__name__,
            "numbers": {
                name: _number(getattr(x, name))
                for name in _NUMBERS
                if hasattr(x, name)
            },
            "weights": len(weights(x)),
        }
        for x in callbacks
    ]


def weights(callback: keras.callbacks.Callback) -> list[np.ndarray]:
    """Returns the best weights that a callback has kept."""
    return getattr(callback, _WEIGHTS, None) or []


def restore(
    callbacks: Sequence[keras.callbacks.Callback],
    saved: Sequence[dict],
    weights_of: Callable[[int], list[np.ndarray]],
) -> None:
    """Has callbacks remember what others of their classes did.

    Those of a class that there were fewer of are left as they are.

    Args:
        callbacks: List of callbacks.
        saved: What `states` returned.
        weights_of: Function of a place in that list that returns the weights
            which that callback had kept.
    """
    waiting = collections.defaultdict(list)
    for i, state in enumerate(saved):
        waiting[state["class"]].append(i)
    for callback in callbacks:
        if not waiting[type(callback).__name__]:
            continue
        i = waiting[type(callback).__name__].pop(0)
        for name, value in saved[i]["numbers"].items():
            setattr(callback, name, value)
        if saved[i]["weights"]:
            setattr(callback, _WEIGHTS, weights_of(i))


def _number(value: Any) -> Any:
    return (
        value.item() if isinstance(value, (np.generic, np.ndarray)) else value
    )
