"""The memory that activations need at their peak.

This module imports no TensorFlow.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import RECOMPUTE
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.schedule.tasks import Schedule


class Sizes(NamedTuple):
    """What a stage holds, in bytes or in any other unit.

    Attributes:
        fixed: What it holds throughout, such as its weights.
        inputs: What it receives from other stages for one micro-batch.
        stored: What the backward pass of one micro-batch needs beside
            `inputs`.
        passing: What a backward pass needs only while it runs.
        kept: What of `stored` is there from the forward pass on where a
            micro-batch is recomputed.
        again: What a recomputation adds to that at a time; `None` for the
            rest of `stored`, all at once.
        slices: What a backward pass leaves until the end of the step, where
            those of all micro-batches are put together.
    """

    fixed: float = 0
    inputs: float = 1
    stored: float = 0
    passing: float = 0
    kept: float = 0
    again: float | None = None
    slices: float = 0

    @property
    def added(self) -> float:
        """What a recomputation adds to what is kept."""
        return self.stored - self.kept if self.again is None else self.again

    def left(self, again: bool) -> float:
        """Returns what a forward pass leaves, to be computed `again` or not."""
        return self.inputs + (self.kept if again else self.stored)


def peak_activations(
    schedule: Schedule, remat: str, sizes: Mapping[int, Sizes]
) -> float:
    """Returns the most that some stages hold together at a time.

    For example, what the first of two stages holds of the micro-batches 0 and
    1 under `1f1b` with `remat="except_last"`, which recomputes 0 and not 1:

        task     F0        F1             B0                       B1
        holds    inputs    + inputs,      + stored 0, passing;     passing;
                           stored 1       then - 0                 then - 1

    Args:
        schedule: A `Schedule`.
        remat: The remat mode.
        sizes: Dictionary from stages, all of one device, to their `Sizes`.
    """
    held = most = sum(own.fixed for own in sizes.values())
    last = WEIGHTS if schedule.splits else BACKWARD
    for task in schedule.steps(remat):
        if task.stage not in sizes:
            continue
        own = sizes[task.stage]
        again = schedule.recomputes(task._replace(kind=BACKWARD), remat)
        if task.kind == FORWARD:
            held += own.left(again)
        elif task.kind == RECOMPUTE:
            held += own.added
        most = max(most, held + (own.passing if task.kind == BACKWARD else 0))
        if task.kind == last:
            held -= own.left(again) + (own.added if again else 0)
            held += own.slices
    number = schedule.num_micro_batches
    together = sum(number * own.slices for own in sizes.values())
    return max(most, held + (together if number > 1 else 0))


def device_peaks(
    schedule: Schedule, remat: str, sizes: Sequence[Sizes]
) -> list[float]:
    """Returns the most that each device holds at a time.

    Of several stages on a device that may be less than the sum of their peaks,
    which they reach at different times.

    Args:
        schedule: A `Schedule`.
        remat: The remat mode.
        sizes: The `Sizes` of each stage.
    """
    own: list[dict[int, Sizes]] = [{} for _ in schedule.tasks]
    for stage, device in enumerate(schedule.devices):
        own[device][stage] = sizes[stage]
    return [peak_activations(schedule, remat, x) for x in own]
