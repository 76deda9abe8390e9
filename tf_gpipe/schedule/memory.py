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
    """

    fixed: float = 0
    inputs: float = 1
    stored: float = 0
    passing: float = 0


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
        _, inputs, stored, passing = sizes[task.stage]
        if task.kind == FORWARD:
            backward = task._replace(kind=BACKWARD)
            again = schedule.recomputes(backward, remat)
            held += inputs if again else inputs + stored
        elif task.kind == RECOMPUTE:
            held += stored
        most = max(most, held + (passing if task.kind == BACKWARD else 0))
        if task.kind == last:
            held -= inputs + stored
    return most


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
