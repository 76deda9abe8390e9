"""The order in which Keras calls the callbacks of `fit`."""

from typing import Any

import keras


def in_order(callbacks: Any) -> Any:
    """Sorts callbacks: those that add to the logs first, `Checkpoint` last.

    The others, such as `keras.callbacks.TensorBoard` and `EarlyStopping`, then
    find the entries wherever the user put them in the list, and what they do is
    in the checkpoint. A callback that adds to the logs has a true attribute
    `adds_to_logs`, one that is called after all others `comes_last`.

    Args:
        callbacks: The argument of `fit`: `None`, callbacks in any nested
            structure, or a `keras.callbacks.CallbackList`.

    Returns:
        A sorted list, or `callbacks` where there is nothing to sort; a
        `CallbackList` is sorted in place.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks.sort(key=_place)
        return callbacks
    found = keras.tree.flatten(callbacks) if callbacks else []
    # Keras refuses values that are no callbacks, with its own message.
    return sorted(found, key=_place) if any(map(_place, found)) else callbacks


def _place(callback: Any) -> int:
    first = bool(getattr(callback, "adds_to_logs", False))
    last = bool(getattr(callback, "comes_last", False))
    return last - first
