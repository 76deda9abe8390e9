"""Measured seconds of the forward and backward passes of a model's layers.

Short layers are measured together with their neighbours. Alone, they may take
less than the call that runs them, and they find in the processor's cache what
they have to fetch in a model.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Hashable
from collections.abc import Sequence

import numpy as np

from tf_gpipe import progress
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import measured_calls
from tf_gpipe.partition import uncounted
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.layer_times import LayerTimes
from tf_gpipe.planning.layer_times import Line
from tf_gpipe.planning.speeds import Speed
from tf_gpipe.stage.graph import Graph

# Calls that are measured together are estimated to take at least this share of
# the model's time, and so many times as long as a call that does nothing.
_SHARE, _CALLS = 1 / 16, 20
# They are measured again in halves if they take so many times as long as
# estimated, beside others: how their time divides is not known then.
_UNLIKELY = 3


def measured(
    layers: KnownLayers,
    rows: Sequence[int],
    device: str,
    speed: Speed,
    until: float,
) -> dict[int, tuple[Line, Line]]:
    """Measures layer calls.

    Args:
        layers: `KnownLayers`.
        rows: List of one or two sizes of a micro-batch, in rows.
        device: String.
        speed: Its `Speed`.
        until: Float, the value of `time.monotonic` after which no further calls
            are measured.

    Returns:
        Dictionary from the indices of calls to the `Line`s of their forward and
        backward pass, without the calls that could not be measured.
    """
    estimated = LayerTimes(layers)
    overhead = measured_calls.overhead(device)
    sizes = {
        count: _Size(
            layers.graph, count, device, estimated.of(count, speed), overhead
        )
        for count in rows
    }
    waiting = sizes[min(rows)].neighbours()
    ratios: dict[range, float] = {}
    while waiting:
        for calls in progress.track(waiting, "measuring layers"):
            if time.monotonic() >= until:
                return _result(sizes)
            ratios[calls] = max(x.measure(calls) for x in sizes.values())
        usual = [x for x in ratios.values() if x < math.inf]
        most = _UNLIKELY * statistics.median(usual or [0.0])
        waiting = [
            half
            for calls in waiting
            if ratios[calls] > most and len(calls) > 1
            for half in _halves(calls)
        ]
    return _result(sizes)


def _result(sizes: dict[int, "_Size"]) -> dict[int, tuple[Line, Line]]:
    return {
        i: (
            Line.through({n: x.forward[i] for n, x in sizes.items()}),
            Line.through({n: x.backward[i] for n, x in sizes.items()}),
        )
        for i in set.intersection(*(set(x.forward) for x in sizes.values()))
    }


def _halves(calls: range) -> tuple[range, range]:
    middle = len(calls) // 2
    return calls[:middle], calls[middle:]


class _Size:
    """Times of layer calls for micro-batches of one size.

    Args:
        graph: `Graph` of the layers.
        rows: Integer.
        device: String.
        estimated: What `LayerTimes.of` returns for this size.
        overhead: Float, the seconds of a call that does nothing.

    Attributes:
        forward: Dictionary from the indices of the calls measured so far to
            the seconds of their forward passes.
        backward: Likewise, of their backward passes.
    """

    def __init__(self, graph, rows, device, estimated, overhead):
        self.forward: dict[int, float] = {}
        self.backward: dict[int, float] = {}
        self._graph = graph
        self._device = device
        self._overhead = overhead
        # Of the forward and the backward pass of each call.
        self._estimated = estimated[:2]
        nodes = zip(graph.nodes, graph.differentiated(), strict=True)
        self._differentiated = {x for node, y in nodes if y for x in node.made}
        _, self._specs = layer_costs.walk(graph, layer_costs.specs_of, rows)
        # Equal calls in a row are measured once.
        self._found: dict[Hashable, tuple[float, float] | None] = {}

    def neighbours(self) -> list[range]:
        """Returns the indices of the calls that are measured together."""
        estimated = self._estimated.sum(axis=0)
        least = max(_SHARE * estimated.sum(), _CALLS * self._overhead)
        found, start = [], 0
        for end in range(1, len(estimated) + 1):
            if end == len(estimated) or estimated[start:end].sum() >= least:
                found.append(range(start, end))
                start = end
        return found

    def measure(self, calls: range) -> float:
        """Measures consecutive calls.

        Returns:
            Float, the ratio of measured to estimated seconds; infinite if they
            cannot be measured.
        """
        part = self._graph.part(calls.start, calls.stop)
        key = self._key(part)
        if key not in self._found:
            self._found[key] = self._seconds(part)
        seconds = self._found[key]
        if seconds is None:
            return math.inf
        forward, both = seconds
        estimated = self._estimated[:, calls.start : calls.stop]
        for found, total, weights in zip(
            (self.forward, self.backward),
            (forward, max(both - forward, 0.0)),
            estimated,
            strict=True,
        ):
            if not weights.any():
                weights = np.ones_like(weights)
            own = total * weights / weights.sum()
            found.update(zip(calls, own, strict=True))
        return both / (estimated.sum() + self._overhead)

    def _seconds(self, part: Graph) -> tuple[float, float] | None:
        """Returns the seconds of a part's forward pass, and of both passes.

        `None` if it cannot be measured.
        """
        # `LayerTimes` estimates calls that are not measured.
        with contextlib.suppress(ValueError), uncounted.naming(part.nodes[0]):
            forward, both = (
                measured_calls.traced(
                    part, self._specs, self._differentiated, backward
                )(self._device)
                for backward in (False, True)
            )
            return (
                max(forward - self._overhead, 0.0),
                max(both - self._overhead, 0.0),
            )
        return None

    def _key(self, part: Graph) -> Hashable:
        """Returns a key that is equal for parts that take the same time."""
        made = [x for node in part.nodes for x in node.made]
        numbers = {x: i for i, x in enumerate([*part.inputs, *made])}
        return (
            tuple(
                (
                    layer_costs.key(node, self._specs)[0],
                    tuple(numbers[x] for x in node.inputs),
                )
                for node in part.nodes
            ),
            tuple(x in self._differentiated for x in part.inputs),
            tuple(numbers[x] for x in part.returned),
        )
