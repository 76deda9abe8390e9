"""The order in which Keras calls the callbacks of `fit`."""

from typing import Any

import keras


def measuring_first(callbacks: Any) -> Any:
    """Returns callbacks with those first that add to the logs.

    So that the others have what these add, wherever they are in the list:
    `keras.callbacks.TensorBoard` and `EarlyStopping`, say. Such a callback has
    a true attribute `adds_to_logs`.

    Args:
        callbacks: What `fit` is given: `None`, callbacks in any nested
            structure, or a `keras.callbacks.CallbackList`.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks.sort(key=_place)
        return callbacks
    found = keras.tree.flatten(callbacks) if callbacks else []
    # What is no such list Keras refuses in its own words.
    return sorted(found, key=_place) if any(map(_adds, found)) else callbacks


def _adds(callback: Any) -> bool:
    return bool(getattr(callback, "adds_to_logs", False))


def _place(callback: Any) -> int:
    return 0 if _adds(callback) else 1
