"""How long layers take on a device that is there."""

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
    """Returns the lines of forward and backward passes, by the call.

    Of calls that do the same only one is measured. What is not measured in
    time, or cannot be, is left out.

    Args:
        layers: `KnownLayers`.
        rows: List of one or two numbers of rows of a micro-batch.
        device: String.
        until: Float, of `time.monotonic`.
    """
    nothing = _nothing(device)

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
                pass  # Then it is reckoned.
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


def _nothing(device: str) -> float:
    """Returns the seconds of a function that does nothing there."""
    with tf.device(device):
        x = tf.zeros(())

        @tf.function(autograph=False)
        def run():
            return tf.identity(x)

        run().numpy()
        return min(timeit.repeat(lambda: run().numpy(), number=1, repeat=5))
