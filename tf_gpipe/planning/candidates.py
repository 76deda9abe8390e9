"""The combinations of arguments among which the best pipeline is searched.

This module imports no TensorFlow.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from collections.abc import Sequence

from tf_gpipe.planning.plans import Plan
from tf_gpipe.planning.plans import words
from tf_gpipe.planning.speeds import Device
from tf_gpipe.planning.speeds import Machine
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import REMAT_MODES

# More micro-batches a device hardly make the bubble smaller.
_MOST_A_DEVICE = 16
# With more devices, a pipeline is tried only over divisors of their number and
# over powers of two.
_FEW = 8


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The arguments that the user has fixed; `None` for those to choose."""

    num_stages: int | None = None
    num_micro_batches: int | None = None
    schedule: str | None = None
    remat: str | None = None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One combination of the arguments that are chosen.

    Attributes:
        num_devices: Integer, the devices of a replica.
        num_replicas: Integer.
        num_stages: Integer K.
        num_micro_batches: Integer M.
        schedule: String.
        remat: String.
    """

    num_devices: int
    num_replicas: int
    num_stages: int
    num_micro_batches: int
    schedule: str
    remat: str

    @property
    def alone(self) -> bool:
        """Whether it is the whole model on one device."""
        return self.num_devices * self.num_replicas == 1

    @property
    def key(self) -> tuple:
        """All fields but `remat`: the fastest choice is kept for each key."""
        return dataclasses.astuple(self)[:-1]

    def __str__(self) -> str:
        return words(*dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A candidate and its plan.

    Attributes:
        candidate: `Candidate`.
        plan: `Plan`, whose `step_seconds` include the optimizer's updates and
            the all-reduce of the replicas' gradients.
    """

    candidate: Candidate
    plan: Plan

    @property
    def seconds(self) -> float:
        return self.plan.step_seconds or 0.0

    @property
    def working(self) -> float:
        """The number of devices that work at once, on average, at least 1.

        While the busiest of a pipeline does; with those of all replicas.
        """
        busy = [1 - x for x in self.plan.device_idle]
        return self.candidate.num_replicas * working(busy)


def working(busy: Sequence[float]) -> float:
    """Returns the number of devices that work at once, on average.

    While the busiest does, given how long each works in a step.
    """
    return sum(busy) / max(busy) if any(busy) else 1.0


def candidates(
    num_devices: int,
    num_calls: int,
    rows: int,
    fixed: Fixed = Fixed(),  # noqa: B008
    replicates: bool = True,
) -> Iterator[Candidate]:
    """Yields each `Candidate` once; none has a searched order of tasks.

    Args:
        num_devices: Integer, all available devices.
        num_calls: Integer, the number of layer calls.
        rows: Integer, rows of the mini-batch.
        fixed: `Fixed`.
        replicates: Boolean, whether there may be several replicas.
    """
    names = [x for x in schedules.NAMES if x != schedules.AUTO]
    # The first of equally fast ones is kept: that which recomputes least.
    modes: tuple[str, ...] = REMAT_MODES[::-1]
    if fixed.schedule is not None:
        names = [fixed.schedule]
    if fixed.remat is not None:
        modes = (fixed.remat,)
    for count, copies in layouts(num_devices, replicates):
        sizes = micro_batches(count, rows // copies)
        if fixed.num_micro_batches is not None:
            sizes = [fixed.num_micro_batches]
        for name in names:
            if count == 1 and name != (fixed.schedule or "1f1b"):
                continue  # On one device, no order of tasks is faster.
            each = num_each(name, count, fixed.num_stages)
            num_stages = each * count
            if num_stages > num_calls or fixed.num_stages not in (
                None,
                num_stages,
            ):
                continue
            most = min(rows // copies, schedules.most_rows(num_stages))
            for number, mode in itertools.product(sizes, modes):
                if 1 <= number <= most:
                    yield Candidate(
                        count, copies, num_stages, number, name, mode
                    )


def placements(
    machine: Machine, candidate: Candidate
) -> list[list[list[Device]]]:
    """Returns the placements worth trying: a row of devices for each replica.

    If devices differ, the fastest or those with most memory are taken, sorted
    into rows of similar ones, each in several orders.
    """
    count, copies = candidate.num_devices, candidate.num_replicas
    if machine.alike:
        chosen = machine.devices[: count * copies]
        return [[chosen[r * count : (r + 1) * count] for r in range(copies)]]
    fastest = sorted(
        range(len(machine.devices)),
        key=lambda i: -machine.devices[i].speed.flops,
    )
    largest = sorted(
        range(len(machine.devices)),
        key=lambda i: -(machine.devices[i].memory or math.inf),
    )
    found: dict[tuple, list] = {}
    for order in (fastest, largest):
        chosen_rows = [
            order[r * count : (r + 1) * count] for r in range(copies)
        ]
        for arranged in (
            sorted,
            list,
            lambda row: row[::-1],
            lambda row: sorted(row, key=largest.index),
        ):
            rows = [arranged(row) for row in chosen_rows]
            found.setdefault(
                tuple(map(tuple, rows)),
                [[machine.devices[i] for i in row] for row in rows],
            )
    return list(found.values())


def layouts(num_devices: int, replicates: bool) -> list[tuple[int, int]]:
    """Returns pairs of the devices of a replica and the number of replicas."""
    counts = [
        x
        for x in range(1, num_devices + 1)
        if num_devices <= _FEW or not num_devices % x or not x & (x - 1)
    ]
    found = {(x, 1) for x in counts}
    if replicates:
        found |= {(x, num_devices // x) for x in counts}
    return sorted(found)


def micro_batches(num_devices: int, rows: int) -> list[int]:
    """Returns the numbers of micro-batches to try.

    Powers of two, and these times `num_devices`; if more than two of them
    divide the rows, so that micro-batches are equal, only those.
    """
    most = min(_MOST_A_DEVICE * num_devices, rows)
    if num_devices == 1:
        # More than one only saves memory.
        most = rows
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    times = [num_devices * x for x in powers if num_devices * x <= most]
    even = [x for x in {*powers, *times} if not rows % x]
    return sorted(even if len(even) > 2 else {*powers, *times})


def num_each(
    schedule: str, num_devices: int, num_stages: int | None = None
) -> int:
    """Returns how many stages each device has under a schedule.

    Args:
        schedule: String.
        num_devices: Integer.
        num_stages: Integer, those of all devices; `None` if it is not fixed.
    """
    if schedule in schedules.ANY_STAGES_A_DEVICE and num_devices > 1:
        return max(2, (num_stages or 0) // num_devices)
    return 2 if schedule in schedules.TWO_STAGES_A_DEVICE else 1
