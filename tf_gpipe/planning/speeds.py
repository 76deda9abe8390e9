"""The speed of devices and connections, and times that follow from it.

This module imports no TensorFlow.
"""

import collections
import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tf_gpipe import checks

# How many times as fast a device of another kind is, at least.
_UNEQUAL = 2.0
# FLOPs a second of an accelerator of unknown speed: of the times in its plans,
# only ratios have a meaning.
_NOMINAL_FLOPS = 1e13
# FLOPs in the time in which memory moves a byte, as on many processors.
_FLOPS_A_BYTE = 20


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of a device.

    The time of a pass is the sum of its arithmetic at `flops`, of the bytes
    that its operations read and write at `memory`, and of the launches of the
    operations and of the task: few operations overlap on a device.

    Attributes:
        flops: Float, floating-point operations a second.
        memory: Float, bytes a second, read or written.
        operation: Float, seconds that starting an operation takes.
        task: Float, seconds that starting a task of a schedule takes.
    """

    flops: float = _NOMINAL_FLOPS
    memory: float = _NOMINAL_FLOPS / _FLOPS_A_BYTE
    operation: float = 5e-6
    task: float = 2e-4

    @classmethod
    def of_flops(cls, flops: float) -> "Speed":
        """Returns the speed of a device of which only `flops` is known."""
        return cls(flops, flops / _FLOPS_A_BYTE)

    def seconds(self, flops: float, moved: float, operations: float) -> float:
        """Returns the seconds of operations, without the launch of a task."""
        return (
            flops / self.flops
            + moved / self.memory
            + operations * self.operation
        )


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that may get stages.

    Attributes:
        name: String; `None` for a device that is not on this machine.
        memory: Integer, its bytes; `None` if they are unknown.
        speed: Its `Speed`.
    """

    name: str | None = None
    memory: int | None = None
    speed: Speed = Speed()


def uses(names: Sequence[str | None]) -> float:
    """Returns how often devices are named on average; 1 if none is known.

    So much slower is each if all work at once, and nothing is measured.
    """
    known = [x for x in names if x is not None]
    return len(known) / len(set(known)) if known else 1.0


def any_twice(names: Sequence[str | None]) -> bool:
    """Returns whether a device is named more than once."""
    return uses(names) > 1


def memories(rows: Sequence[Sequence[Device]]) -> list[int | None]:
    """Returns the bytes that a pipeline has on each of its devices.

    Args:
        rows: List with a list of `Device`s for each replica.

    Returns:
        List of integers, or `None` where they are unknown. The smallest of a
        stage's replicas must do. A device that is named more than once has its
        memory once.
    """
    uses = collections.Counter(x.name for row in rows for x in row)
    uses[None] = 1
    return [
        min(
            (x.memory // uses[x.name] for x in column if x.memory), default=None
        )
        for column in zip(*rows, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices for a pipeline, and the connections between them.

    Attributes:
        devices: List of `Device`s.
        bandwidth: Float, bytes a second from device to device; `None`:
            transfers take no time.
        latency: Float, seconds that each transfer takes in addition.
        sharing: Float, the slowdown of each device when all work at once,
            because they share cores or memory; 1 if they share nothing.
        handling: Float, seconds by which each byte that a device sends to
            another process, or receives, delays its other work.
        replicates: Boolean, whether `tf.distribute` can have replicas there.
    """

    devices: list[Device]
    bandwidth: float | None = None
    latency: float = 0.0
    sharing: float = 1.0
    handling: float = 0.0
    replicates: bool = True

    @property
    def alike(self) -> bool:
        """Whether all devices are equally fast and large."""
        return len({(x.memory, x.speed) for x in self.devices}) == 1

    def with_equal_speeds(self) -> "Machine":
        """Returns a machine whose devices all have the speed of the slowest.

        Equal devices may measure unequal while others use them. Speeds that are
        further apart than `_UNEQUAL` are kept.
        """
        ordered = sorted((x.speed for x in self.devices), key=lambda x: x.flops)
        if ordered[-1].flops > _UNEQUAL * ordered[0].flops:
            return self
        return dataclasses.replace(
            self,
            devices=[
                dataclasses.replace(x, speed=ordered[0]) for x in self.devices
            ],
        )

    def with_less_memory(self, used: Mapping[str | None, int]) -> "Machine":
        """Returns a machine in which a pipeline that ran out of memory fails.

        Args:
            used: Dictionary from names of devices to the bytes that the
                pipeline needed there.
        """
        # Which device ran out is not known. It is taken to be the fullest by
        # its share: of 16 GB and 80 GB, with 14 GB and 60 GB in use, the first.
        # None gets a larger share than that one had, as what takes the rest of
        # the memory, such as fragmentation, takes a share of it, too. So
        # devices that were alike stay alike. All are, if nothing is known.
        known = {x.name: x.memory or 1 for x in self.devices}
        size, memory = max(
            ((size, known[name]) for name, size in used.items()),
            key=lambda pair: pair[0] / pair[1],
        )
        return dataclasses.replace(
            self,
            devices=[
                dataclasses.replace(x, memory=known[x.name] * size // memory)
                for x in self.devices
            ],
        )

    def slowdown(self, count: float) -> float:
        """Returns the slowdown of each device when `count` work at once.

        On average: `count` need not be whole.
        """
        others = len(self.devices) - 1
        return 1 + (self.sharing - 1) * (count - 1) / max(others, 1)

    def with_slowdown(self, count: float, slowdown: float) -> "Machine":
        """Returns a machine whose devices have this `slowdown`, at least 1.

        Args:
            count: Float above 1, the devices that work at once, on average.
            slowdown: Float.
        """
        each = max(slowdown - 1, 0.0) / (count - 1)
        return dataclasses.replace(
            self, sharing=1 + each * (len(self.devices) - 1)
        )


def flops(value: Any) -> float:
    """Returns the user's `device_flops`.

    It is 1 or more, so that seconds, of which it is a divisor, are finite.
    """
    return checks.number(
        "device_flops",
        value,
        "a positive number of operations a second, 1 or more",
        least=1.0,
    )


def connection(bandwidth: Any, latency: Any) -> dict[str, Any]:
    """Returns users' arguments, if they are given, as fields of `Machine`."""
    found = {}
    if bandwidth is not None:
        found["bandwidth"] = checks.number(
            "bandwidth",
            bandwidth,
            "a positive number of bytes a second, 1 or more",
            least=1.0,
        )
    if latency is not None:
        found["latency"] = checks.number(
            "latency", latency, "a number of seconds, 0 or more"
        )
    return found


def unmeasured(
    names: Sequence[str | None], memories: Sequence[int | None]
) -> Machine:
    """Returns a machine of devices of which only this is known."""
    return Machine(
        [Device(*x) for x in zip(names, memories, strict=True)],
        sharing=uses(names),
        replicates=replicate(names),
    )


def replicate(names: Sequence[str | None]) -> bool:
    """Returns whether devices may have replicas, of `tf.distribute`.

    Its strategies take only devices of this process.
    """
    return all("/job:worker" not in str(x) for x in names)
