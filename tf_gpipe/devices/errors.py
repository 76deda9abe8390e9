"""Notes on errors of a stage's operations: the layer and the stage."""

import re
from typing import Any

import tensorflow as tf

_PLACE = re.compile(r"\bstage_(\d+)/([^/\s{}]+)")
# The name scope of layers that share a traced function with others, in place
# of `stage_N`.
ALIKE = "alike"
_PLACE_ALIKE = re.compile(rf"\b{ALIKE}/([^/\s{{}}]+)")
_CANCELLED = (
    "If nothing was cancelled on purpose, an operation of a stage has failed, "
    "of which TensorFlow tells only that others were cancelled. Run the batch "
    "again under `model.run_eagerly = True` to see which."
)


def add_place(error: tf.errors.OpError, pipeline: Any) -> None:
    """Adds a note to an error of a step: the layer and stage that raised it."""
    if getattr(error, "__notes__", ()):
        return
    found = [
        (pipeline.stages[int(index)], scope)
        for index, scope in _PLACE.findall(error.message)
        if int(index) < len(pipeline.stages)
    ]
    if not found:
        names = _PLACE_ALIKE.findall(error.message)
        if names:
            error.add_note(f"Raised by layer '{names[0]}', or one like it.")
        elif isinstance(error, tf.errors.CancelledError):
            error.add_note(_CANCELLED)
        return
    stage, _ = found[0]
    by = "an operation"
    for each, scope in found:
        layers = {x.layer.name: x.layer for x in each.nodes}
        # TensorFlow appends numbers to scopes of the same name.
        layer = layers.get(scope) or layers.get(re.sub(r"_\d+$", "", scope))
        if layer is not None:
            stage = each
            by = f"layer '{layer.name}' (of type {type(layer).__name__})"
            break
    error.add_note(f"Raised by {by} in stage {stage.index} on {stage.device}.")
