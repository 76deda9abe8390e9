"""The state of Keras's callbacks that have some, in checkpoints.

Those that monitor a metric are `EarlyStopping`, `ReduceLROnPlateau` and
`ModelCheckpoint`. `SwapEMAWeights` remembers whether it has swapped.
"""

import collections
from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_gpipe.checkpoints.store import Array
from tf_gpipe.checkpoints.store import Saved

# The attribute of SwapEMAWeights.
_SWAPPED = "_ema_weights_in_model"
# The attributes that change during training; the others are arguments.
_NUMBERS = (
    "best",
    "best_epoch",
    "cooldown_counter",
    "stopped_epoch",
    "wait",
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
    _SWAPPED,
)
# The attribute of EarlyStopping(restore_best_weights=True).
_WEIGHTS = "best_weights"


def states(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict]:
    """Returns the state of callbacks for JSON, without weights.

    List of dicts with the `class` of each callback and its `numbers`.
    """
    return [
        {
            "class": type(x).__name__,
            "numbers": {
                name: getattr(x, name) for name in _NUMBERS if hasattr(x, name)
            },
        }
        for x in callbacks
    ]


def arrays(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[tuple[Array, tf.Tensor]]:
    """Returns the best weights kept by callbacks, as arrays of a checkpoint."""
    with tf.device("CPU:0"):
        return [
            (
                Array(_kind(i), k, str(k), x.shape, tf.as_dtype(x.dtype).name),
                tf.convert_to_tensor(x),
            )
            for i, callback in enumerate(callbacks)
            for k, x in enumerate(getattr(callback, _WEIGHTS, None) or [])
        ]


def restore(
    callbacks: Sequence[keras.callbacks.Callback], saved: Saved
) -> None:
    """Restores the state of callbacks from a checkpoint.

    A callback gets the state of a saved one of its class, in order. If fewer
    were saved, the rest of that class are unchanged.

    Args:
        callbacks: List of callbacks.
        saved: A checkpoint with the results of `states` and `arrays`.
    """
    states = saved.content["monitors"]
    waiting = collections.defaultdict(list)
    for i, state in enumerate(states):
        waiting[state["class"]].append(i)
    for callback in callbacks:
        if not waiting[type(callback).__name__]:
            continue
        i = waiting[type(callback).__name__].pop(0)
        for name, value in states[i]["numbers"].items():
            setattr(callback, name, value)
        weights = [
            saved.value(k)
            for k, array in enumerate(saved.arrays)
            if array.kind == _kind(i)
        ]
        if weights:
            setattr(callback, _WEIGHTS, weights)


def have_ended(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Returns whether one of the callbacks has ended training for good.

    Such as `EarlyStopping`. Any other callback that stops it, as at a signal,
    may do so for a time.
    """
    return any(getattr(x, "stopped_epoch", 0) for x in callbacks)


def have_swapped(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Returns whether the model has averages for weights, by a callback."""
    return any(getattr(x, _SWAPPED, False) for x in callbacks)


def _kind(i: int) -> str:
    return f"best weights of callback {i}"
