"""The peak memory of stages and devices under a schedule.

This module imports no TensorFlow.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.schedule.tasks import Schedule


class Sizes(NamedTuple):
    """The memory of a stage, in bytes or any other unit.

    Attributes:
        fixed: Held throughout the step, such as weights.
        inputs: Activations received from other stages for one micro-batch.
        stored: Activations, beside `inputs`, that the backward pass of one
            micro-batch reads.
        temporary: Held only while a backward pass runs.
        kept: The part of `stored` that is kept from the forward pass on if a
            micro-batch is recomputed.
        adds_at_a_time: The most that a recomputation adds to `kept` at a time;
            `None` for the rest of `stored`, all at once.
        slices: Sparse gradients that a backward pass leaves until the end of
            the step, when those of all micro-batches are concatenated.
        arriving: The part of `inputs` that is sent as soon as it is computed:
            that of the stage's next forward pass waits on its device.

    Example:

    >>> Sizes(fixed=10, inputs=1, stored=4).added  # by a recomputation
    4
    """

    fixed: float = 0
    inputs: float = 1
    stored: float = 0
    temporary: float = 0
    kept: float = 0
    adds_at_a_time: float | None = None
    slices: float = 0
    arriving: float = 0

    @property
    def added(self) -> float:
        """Float, the most that a recomputation adds to `kept`."""
        if self.adds_at_a_time is None:
            return self.stored - self.kept
        return self.adds_at_a_time

    def waiting(self, stage: int, devices: Sequence[int]) -> float:
        """Returns the memory of inputs that wait for their forward pass.

        The stage before sends them ahead of it, if it runs ahead. On the same
        device they are counted with that stage.

        Args:
            stage: Integer, the number of the stage.
            devices: List of the number of the device of each stage.
        """
        if stage and devices[stage - 1] != devices[stage]:
            return self.arriving
        return 0

    def left(self, recomputed: bool) -> float:
        """Returns the memory that a forward pass of one micro-batch leaves.

        Args:
            recomputed: Boolean, whether the micro-batch is recomputed.
        """
        return self.inputs + (self.kept if recomputed else self.stored)


def peak_activations(
    schedule: Schedule, remat: str, sizes: Mapping[int, Sizes]
) -> float:
    """Returns the peak memory of some stages of one device together.

    For example, the memory of the first of two stages for micro-batches 0 and
    1 under `1f1b` with `remat="except_last"`, which recomputes 0 and not 1:

        task     F0        F1             B0                       B1
        holds    inputs    + inputs,      + stored 0, temporary;     temporary;
                           stored 1       then - 0                 then - 1

    Args:
        schedule: A `Schedule`.
        remat: The remat mode.
        sizes: Dictionary from stages, all of one device, to their `Sizes`.
    """
    return _peaks(schedule, remat, sizes, dict.fromkeys(sizes, 0)).get(0, 0)


def stage_peaks(
    schedule: Schedule, remat: str, sizes: Sequence[Sizes]
) -> list[float]:
    """Returns the peak memory of each stage.

    Args:
        schedule: A `Schedule`.
        remat: The remat mode.
        sizes: The `Sizes` of each stage.
    """
    stages = range(schedule.num_stages)
    own = dict(zip(stages, sizes, strict=True))
    found = _peaks(schedule, remat, own, dict(zip(stages, stages, strict=True)))
    return [found[stage] for stage in stages]


def device_peaks(
    schedule: Schedule, remat: str, sizes: Sequence[Sizes]
) -> list[float]:
    """Returns the peak memory of each device.

    With several stages on a device it may be less than the sum of their peaks,
    which are at different times.

    Args:
        schedule: A `Schedule`.
        remat: The remat mode.
        sizes: The `Sizes` of each stage.
    """
    own = dict(enumerate(sizes))
    found = _peaks(schedule, remat, own, dict(enumerate(schedule.devices)))
    return [found.get(device, 0) for device in range(len(schedule.tasks))]


def _peaks(
    schedule: Schedule,
    remat: str,
    sizes: Mapping[int, Sizes],
    holders: Mapping[int, int],
) -> dict[int, float]:
    """Returns the peak memory of each holder: a device or a stage.

    All in one walk over the tasks, since there may be very many. Recomputation
    is taken to come right before its backward pass.

    Args:
        schedule: A `Schedule`.
        remat: The remat mode.
        sizes: Dictionary from stages to their `Sizes`.
        holders: Dictionary from the same stages to their holders.
    """
    held: dict[int, float] = dict.fromkeys(holders.values(), 0)
    together = dict(held)
    number = schedule.num_micro_batches
    for stage, own in sizes.items():
        held[holders[stage]] += own.fixed
        held[holders[stage]] += own.waiting(stage, schedule.devices)
        together[holders[stage]] += number * own.slices
    left = dict.fromkeys(sizes, number)  # forward passes
    most = dict(held)
    rows = {schedule.devices[stage] for stage in sizes}
    alone = len(rows) == 1
    for task in schedule.tasks[rows.pop()] if alone else schedule.order:
        if task.stage not in sizes:
            continue
        own, holder = sizes[task.stage], holders[task.stage]
        recomputed = schedule.recomputes(task._replace(kind=BACKWARD), remat)
        temporary = 0.0
        if task.kind == FORWARD:
            held[holder] += own.left(recomputed)
            left[task.stage] -= 1
            if not left[task.stage]:
                held[holder] -= own.waiting(task.stage, schedule.devices)
        elif task.kind == BACKWARD:
            held[holder] += own.added if recomputed else 0
            temporary = own.temporary
        most[holder] = max(most[holder], held[holder] + temporary)
        if task.kind == WEIGHTS or (
            task.kind == BACKWARD and task not in schedule.split
        ):
            held[holder] -= own.left(recomputed) + (
                own.added if recomputed else 0
            )
            held[holder] += own.slices
    if number == 1:
        return most
    return {x: max(most[x], held[x] + together[x]) for x in most}
