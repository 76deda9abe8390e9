"""Seconds of the forward and backward pass of each layer call on a device."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.speeds import Speed


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds as a linear function of the rows: `start + rows * each`."""

    start: float
    each: float

    @classmethod
    def through(cls, points: Mapping[int, float]) -> "Line":
        """Returns the line through one or two points, from rows to seconds."""
        low, high = min(points), max(points)
        if low == high:
            return cls(0.0, points[low] / low)
        each = max(0.0, points[high] - points[low]) / (high - low)
        return cls(max(0.0, points[low] - low * each), each)

    def at(self, rows: int) -> float:
        return self.start + rows * self.each


class LayerTimes:
    """Times of forward and backward passes, measured or estimated.

    Args:
        layers: `KnownLayers`.
        measured: Dictionary from the indices of calls to the `Line`s of their
            forward and backward pass on a device of the speed `reference`.
            Other calls are estimated from their costs, and multiplied by the
            ratio of the measured times to their estimates.
        reference: `Speed`.
    """

    def __init__(
        self,
        layers: KnownLayers,
        measured: Mapping[int, tuple[Line, Line]] | None = None,
        reference: Speed | None = None,
    ):
        self._layers = layers
        self._measured = dict(measured or {})
        self._reference = reference
        self._found: dict[tuple[int, Speed], np.ndarray] = {}

    def of(self, rows: int, speed: Speed) -> np.ndarray:
        """Returns the seconds of n calls, an array of shape `(3, n)`.

        Of the forward pass, of the backward pass, and of its part for the
        gradients of weights.
        """
        key = rows, speed
        if key not in self._found:
            self._found[key] = self._of(rows, speed)
        return self._found[key]

    def _of(self, rows: int, speed: Speed) -> np.ndarray:
        costs, _ = self._layers.costs(rows)
        found = np.array(
            [
                [
                    speed.seconds(x.forward_flops, *x.forward),
                    speed.seconds(x.backward_flops, *x.backward),
                    speed.seconds(x.weight_flops, *x.by_weights),
                ]
                for x in costs
            ]
        ).T
        if not self._measured or self._reference is None:
            return found
        factor = self._reference.flops / speed.flops
        chosen = list(self._measured)
        times = np.array(
            [
                [factor * line.at(rows) for line in self._measured[i]]
                for i in chosen
            ]
        ).T
        # Layers are measured with their backward passes.
        times[1] *= [costs[i].differentiated for i in chosen]
        reckoned = found[:2, chosen].sum()
        off = times.sum() / reckoned if reckoned else 1.0
        share = np.divide(
            found[2],
            found[1],
            out=np.full_like(found[1], 0.5),
            where=found[1] > 0,
        )
        found *= off
        found[:2, chosen] = times
        found[2, chosen] = times[1] * share[chosen]
        return found
