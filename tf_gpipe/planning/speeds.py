"""How fast devices are, and how long passes take on them.

This module imports no TensorFlow.
"""

import dataclasses

# Of an accelerator of which nothing is known: plans for it tell shares of time.
_NOMINAL_FLOPS = 1e13
# Operations for each byte that memory moves meanwhile, as on many processors.
_FLOPS_A_BYTE = 20


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a device is.

    A pass takes its arithmetic at `flops`, the bytes that its operations read
    and write at `memory`, and a start of each operation and of the task. These
    are added: few operations overlap with others on a device.

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
        """Returns that of a device of which no more than this is known."""
        return cls(float(flops), float(flops) / _FLOPS_A_BYTE)

    def slower(self, factor: float) -> "Speed":
        """Returns that of a device that takes so many times as long."""
        return Speed(
            self.flops / factor,
            self.memory / factor,
            self.operation * factor,
            self.task * factor,
        )

    def seconds(self, flops: float, moved: float, operations: float) -> float:
        """Returns how long operations take, without the start of a task."""
        return (
            flops / self.flops
            + moved / self.memory
            + operations * self.operation
        )


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that may get stages.

    Attributes:
        name: String, or `None` of one that is not there.
        memory: Integer, its bytes; `None` where it is not known.
        speed: Its `Speed`.
    """

    name: str | None = None
    memory: int | None = None
    speed: Speed = Speed()


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices among which a pipeline is placed, and what is between them.

    Attributes:
        devices: List of `Device`s.
        bandwidth: Float, bytes a second from device to device; `None`:
            transfers take no time.
        latency: Float, seconds that a transfer takes besides.
        sharing: Float, how many times as long each device takes when all work
            at once as when it works alone; 1 where they share nothing.
        replicates: Boolean, whether `tf.distribute` can have replicas there.
    """

    devices: list[Device]
    bandwidth: float | None = None
    latency: float = 0.0
    sharing: float = 1.0
    replicates: bool = True

    @property
    def alike(self) -> bool:
        """Whether all devices are equally fast and large."""
        return len({(x.memory, x.speed) for x in self.devices}) == 1

    def slowdown(self, count: int) -> float:
        """Returns how many times as long each of so many devices takes."""
        others = len(self.devices) - 1
        return 1 + (self.sharing - 1) * (count - 1) / max(others, 1)
