"""Layers built without values for their variables.

That is how a model is counted that is too large for the machine, and how one
is built whose weights get their values where their stage is.
"""

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common import global_state


@contextlib.contextmanager
def no_values() -> Iterator[None]:
    """Variables that are made in this scope get no value, and no memory."""
    with keras.StatelessScope(initialize_variables=False):
        yield


def call(layers: Iterable[keras.Layer], inputs: Any) -> Any:
    """Returns what layers, called one after another, make of `inputs`."""
    for layer in layers:
        inputs = layer(inputs)
    return inputs


def forget(variables: Iterable[keras.Variable]) -> None:
    """Takes variables from Keras's list of those that wait for a value."""
    ids = {id(v) for v in variables}
    key = "uninitialized_variables"
    waiting = global_state.get_global_attribute(key, [])
    global_state.set_global_attribute(
        key, [v for v in waiting if id(v) not in ids]
    )
