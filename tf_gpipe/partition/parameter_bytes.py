"""Bytes of the weights of stages, and of what training adds for each weight."""

import collections
import dataclasses
import itertools
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence

import keras

from tf_gpipe.devices import slots
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.stage.graph import ranges


@dataclasses.dataclass(frozen=True)
class WeightBytes:
    """Bytes of one weight, or of all weights of a layer.

    Attributes:
        weight: Integer, of the weight itself.
        gradient: Integer, of the sum of its gradients.
        slots: Integer, of the optimizer's slots.
    """

    weight: int
    gradient: int = 0
    slots: int = 0


def bytes_of(
    weights: Sequence[keras.Variable], optimizer: keras.optimizers.Optimizer
) -> list[WeightBytes]:
    """Returns the bytes of each weight, with the slots that it would have."""
    trained = [x for x in weights if x.trainable]
    planned = slots.planned(optimizer, trained)
    more = {
        id(x): (size_in_bytes(x), size_in_bytes(own))
        for x, own in zip(trained, planned, strict=True)
    }
    return [
        WeightBytes(size_in_bytes(x), *more.get(id(x), ())) for x in weights
    ]


class ParameterBytes:
    """Bytes of weights, gradients and slots, for any cut into stages.

    A stage owns the weights that no earlier stage uses. A later stage that uses
    them, too, such as a language model's output layer that is tied to its
    embedding, has a sum of gradients of its own, and on another device a copy
    of the weight.

    Args:
        used: For each layer call, a mapping from any key of a weight to its
            `WeightBytes`.
    """

    def __init__(self, used: Sequence[Mapping[Hashable, WeightBytes]]):
        self._used = list(used)
        seen: set[Hashable] = set()
        # By call: the bytes of the weights that no earlier call uses.
        self.new: list[int] = []
        for own in self._used:
            self.new.append(
                sum(
                    x.weight + x.gradient + x.slots
                    for key, x in own.items()
                    if key not in seen
                )
            )
            seen.update(own)
        users = collections.Counter(itertools.chain.from_iterable(self._used))
        self._shared = {key for key, count in users.items() if count > 1}

    def of_stages(
        self, counts: Sequence[int], devices: Sequence[Hashable]
    ) -> list[int]:
        """Returns the bytes of each stage.

        Args:
            counts: List of the number of calls in each stage.
            devices: A name or number of the device of each stage.
        """
        found = []
        # From each shared weight to the devices that have its value.
        places: dict[Hashable, set] = collections.defaultdict(set)
        for device, own in zip(devices, ranges(counts), strict=True):
            size = sum(self.new[own])
            # Each shared weight that the stage uses, once.
            shared = {
                key: x
                for used in self._used[own]
                for key, x in used.items()
                if key in self._shared
            }
            for key, x in shared.items():
                if places[key]:
                    size += x.gradient
                    size += x.weight * (device not in places[key])
                places[key].add(device)
            found.append(size)
        return found
