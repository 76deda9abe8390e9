"""Measured seconds of the forward and backward passes of layer calls."""

import time
import timeit
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe.partition import balanced
from tf_gpipe.partition import layer_costs
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.layer_times import Line


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
    nothing = _call_overhead(device)

    def visit(node, specs) -> tuple[Any, Any]:
        found = None
        if time.monotonic() < until:
            contents = [specs[value] for value in node.inputs]
            try:
                with tf.device(device):
                    forward = balanced.seconds(node, contents, backward=False)
                    whole = balanced.seconds(node, contents)
                forward = max(forward - nothing, 0.0)
                found = forward, max(whole - nothing - forward, 0.0)
            except ValueError:
                pass  # `LayerTimes` estimates calls that are not measured.
        return found, balanced.specs_of(node, specs)[1]

    times = {
        count: layer_costs.walk(layers.graph, visit, count)[0] for count in rows
    }
    lines = {}
    for i in range(len(layers.names)):
        points = {count: found[i] for count, found in times.items()}
        if all(x is not None for x in points.values()):
            lines[i] = (
                Line.through({r: x[0] for r, x in points.items()}),
                Line.through({r: x[1] for r, x in points.items()}),
            )
    return lines


def _call_overhead(device: str) -> float:
    """Returns the overhead in seconds: a `tf.function` that does nothing."""
    with tf.device(device):
        x = tf.zeros(())

        @tf.function(autograph=False)
        def run():
            return tf.identity(x)

        run().numpy()
        return min(timeit.repeat(lambda: run().numpy(), number=1, repeat=5))
