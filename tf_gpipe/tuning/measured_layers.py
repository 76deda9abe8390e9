"""Measured seconds of the forward and backward passes of layer calls."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe.partition import balanced
from tf_gpipe.partition import layer_costs
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.layer_times import Line
from tf_gpipe.tuning.measured_speeds import call_overhead


def measured(
    layers: KnownLayers, rows: Sequence[int], device: str, until: float
) -> dict[int, tuple[Line, Line]]:
    """Measures layer calls, each of equal calls once.

    Args:
        layers: `KnownLayers`.
        rows: List of one or two sizes of a micro-batch, in rows.
        device: String.
        until: Float, the value of `time.monotonic` after which no further call
            is measured.

    Returns:
        Dictionary from the indices of calls to the `Line`s of their forward and
        backward pass, without the calls that could not be measured.
    """
    nothing = call_overhead(device)
    specs = {
        count: layer_costs.walk(layers.graph, balanced.specs_of, count)[1]
        for count in rows
    }

    def seconds(node, count) -> tuple[float, float]:
        contents = [specs[count][value] for value in node.inputs]
        with tf.device(device):
            forward = balanced.seconds(node, contents, backward=False)
            whole = balanced.seconds(node, contents)
        forward = max(forward - nothing, 0.0)
        return forward, max(whole - nothing - forward, 0.0)

    def visit(node, own) -> tuple[Any, Any]:
        found = None
        # `LayerTimes` estimates calls that are not measured.
        with contextlib.suppress(ValueError):
            if time.monotonic() < until:
                points = {count: seconds(node, count) for count in rows}
                found = (
                    Line.through({r: x[0] for r, x in points.items()}),
                    Line.through({r: x[1] for r, x in points.items()}),
                )
        return found, balanced.specs_of(node, own)[1]

    lines, _ = layer_costs.walk(layers.graph, visit, rows[0])
    return {i: x for i, x in enumerate(lines) if x is not None}
