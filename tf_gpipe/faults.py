"""Failures of worker processes, told by stage and address."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_gpipe import cluster


def named(method: Callable) -> Callable:
    """Returns a method of a pipelined model that names workers that fail.

    TensorFlow tells of a worker that has been killed or started again by one
    of several errors, which name a connection or an operation.

    Args:
        method: Method of a `keras.Model`, such as `fit`.

    Returns:
        The method. Its errors become `tf.errors.UnavailableError`s, if the
        worker of a stage no longer answers or has forgotten the model.
    """

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except tf.errors.OpError as error:
            message = _diagnosis(self, error)
            if message is None:
                raise
            raise tf.errors.UnavailableError(None, None, message) from error

    return wrapper


def _diagnosis(model: Any, error: tf.errors.OpError) -> str | None:
    """Returns which worker failed, or `None` if none did."""
    if model._pipeline is None:
        return None
    stages: dict[str, list[str]] = {}
    for stage in model._pipeline.stages:
        for device in stage.devices:
            address = cluster.address(device)
            if address is not None:
                stages.setdefault(address, []).append(str(stage.index))
    # What a worker that was started again says to a client of the old one.
    again = "Unable to find a context_id" in error.message
    broken = isinstance(error, tf.errors.UnavailableError) and not again
    gone = cluster.unreachable(stages, broken)
    if not gone and not again:
        return None
    lines = [
        f"Stage {', '.join(stages[address])} has failed: its worker at "
        f"{address} no longer answers."
        for address in gone
    ] or ["A worker has been started again and no longer has its stage."]
    return "\n".join(
        [
            *lines,
            "The weights of its stage are lost. Start it again, with `python "
            "-m tf_gpipe.worker --port=PORT`, then this program, and resume "
            "from the newest checkpoint.",
        ]
    )
