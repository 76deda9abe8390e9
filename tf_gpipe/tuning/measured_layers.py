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
from typing import NamedTuple

import numpy as np

from tf_gpipe import progress
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import measured_calls
from tf_gpipe.partition import uncounted
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.layer_times import LayerTimes
from tf_gpipe.planning.layer_times import Line
from tf_gpipe.planning.speeds import Machine
from tf_gpipe.planning.speeds import Speed
from tf_gpipe.stage.graph import Graph

# Calls that are measured together are estimated to take at least this share of
# the model's time, and so many times as long as a call that does nothing.
_SHARE, _CALLS = 1 / 16, 20
# They are measured again in halves if they take so many times as long as
# estimated, beside others: how their time divides is not known then.
_UNLIKELY = 3


def on_machine(
    layers: KnownLayers, rows: Sequence[int], machine: Machine, until: float
) -> tuple[LayerTimes, Machine]:
    """Measures layer calls on the fastest devices of a machine.

    Args:
        layers: `KnownLayers`.
        rows: List of one or two sizes of a micro-batch, in rows.
        machine: `Machine`.
        until: Float, the value of `time.monotonic` after which no further calls
            are measured.

    Returns:
        `LayerTimes`, and the machine with the slowdown of its devices when all
        work at once: they may share memory or cores.
    """
    speed = max((x.speed for x in machine.devices), key=lambda x: x.flops)
    names = [str(x.name) for x in machine.devices if x.speed == speed]
    found = measured(layers, rows, names, speed, until)
    if found.slowdown is not None:
        machine = machine.with_slowdown(len(names), found.slowdown)
    return LayerTimes(layers, found.lines, speed), machine


class Measured(NamedTuple):
    """Measured times of a model's layers.

    Attributes:
        lines: Dictionary from the indices of calls to the `Line`s of their
            forward and backward pass, without the calls that could not be
            measured.
        slowdown: Float, how many times as long they take when all devices work
            at once; `None` for one device, or if nothing was measured.
    """

    lines: dict[int, tuple[Line, Line]]
    slowdown: float | None


def measured(
    layers: KnownLayers,
    rows: Sequence[int],
    devices: Sequence[str],
    speed: Speed,
    until: float,
) -> Measured:
    """Measures layer calls.

    Args:
        layers: `KnownLayers`.
        rows: List of one or two sizes of a micro-batch, in rows.
        devices: List of strings, devices that are alike.
        speed: Their `Speed`.
        until: As of `on_machine`.
    """
    sizes = {count: _Size(layers, count, devices, speed) for count in rows}
    waiting = sizes[min(rows)].neighbours()
    ratios: dict[range, float] = {}
    while waiting:
        for calls in progress.track(waiting, "measuring layers"):
            # The first are measured in any case: they tell the slowdown.
            if ratios and time.monotonic() >= until:
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


def _result(sizes: dict[int, "_Size"]) -> Measured:
    lines = {
        i: (
            Line.through({n: x.forward[i] for n, x in sizes.items()}),
            Line.through({n: x.backward[i] for n, x in sizes.items()}),
        )
        for i in set.intersection(*(set(x.forward) for x in sizes.values()))
    }
    alone = sum(x.alone for x in sizes.values())
    at_once = sum(x.at_once for x in sizes.values())
    return Measured(lines, at_once / alone if at_once and alone else None)


def _halves(calls: range) -> tuple[range, range]:
    middle = len(calls) // 2
    return calls[:middle], calls[middle:]


class _Seconds(NamedTuple):
    """Seconds of consecutive layer calls.

    Attributes:
        forward: Float, of their forward passes.
        both: Float, of their forward and backward passes.
        at_once: Float, of both on all devices at once; 0 with one device.
    """

    forward: float
    both: float
    at_once: float = 0.0


class _Size:
    """Times of layer calls for micro-batches of one size.

    The arguments are those of `measured`, but for one number of rows.

    Attributes:
        forward: Dictionary from the indices of the calls measured so far to
            the seconds of their forward passes.
        backward: Likewise, of their backward passes.
        alone: Float, the seconds of all that one device has measured.
        at_once: Float, the seconds of the same on all devices at once.
    """

    def __init__(self, layers, rows, devices, speed):
        self.forward: dict[int, float] = {}
        self.backward: dict[int, float] = {}
        self.alone = self.at_once = 0.0
        self._graph = layers.graph
        self._devices = list(devices)
        self._estimated = LayerTimes(layers).of(rows, speed)[:2]
        flags = self._graph.differentiated()
        nodes = zip(self._graph.nodes, flags, strict=True)
        self._differentiated = {x for node, y in nodes if y for x in node.made}
        _, self._specs = layer_costs.walk(
            self._graph, layer_costs.specs_of, rows
        )
        self._overhead = measured_calls.overhead(self._devices[:1])
        self._overhead_at_once = measured_calls.overhead(self._devices)
        # Equal calls in a row are measured once.
        self._found: dict[Hashable, _Seconds | None] = {}

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
        self.alone += seconds.both
        self.at_once += seconds.at_once
        estimated = self._estimated[:, calls.start : calls.stop]
        backward = max(seconds.both - seconds.forward, 0.0)
        for found, total, weights in zip(
            (self.forward, self.backward),
            (seconds.forward, backward),
            estimated,
            strict=True,
        ):
            if not weights.any():
                weights = np.ones_like(weights)
            own = total * weights / weights.sum()
            found.update(zip(calls, own, strict=True))
        return seconds.both / (estimated.sum() + self._overhead)

    def _seconds(self, part: Graph) -> "_Seconds | None":
        """Returns the seconds of a part, or `None` if it cannot be measured."""
        one, several = self._devices[:1], len(self._devices) > 1
        # `LayerTimes` estimates calls that are not measured.
        with contextlib.suppress(ValueError), uncounted.naming(part.nodes[0]):
            forward, both = (
                measured_calls.traced(
                    part, self._specs, self._differentiated, backward
                )
                for backward in (False, True)
            )
            seconds = [x(one) - self._overhead for x in (forward, both)]
            if several:
                seconds.append(both(self._devices) - self._overhead_at_once)
            return _Seconds(*(max(x, 0.0) for x in seconds))
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
