"""The order in which Keras calls the callbacks of `fit`."""

from typing import Any

import keras


def measuring_first(callbacks: Any) -> Any:
    """Sorts callbacks: first those that add entries to the logs.

    The others, such as `keras.callbacks.TensorBoard` and `EarlyStopping`, then
    find these entries wherever the user put them in the list. A callback that
    adds to the logs has a true attribute `adds_to_logs`.

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
    return sorted(found, key=_place) if any(map(_adds, found)) else callbacks


def _adds(callback: Any) -> bool:
    return bool(getattr(callback, "adds_to_logs", False))


def _place(callback: Any) -> int:
    return 0 if _adds(callback) else 1
