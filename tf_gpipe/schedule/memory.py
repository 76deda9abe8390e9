"""The memory that a stage's activations need at their peak.

This module imports no TensorFlow.
"""

from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import RECOMPUTE
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.schedule.tasks import Schedule


def peak_activations(
    stage: int,
    schedule: Schedule,
    remat: str,
    *,
    given: int,
    inputs: int,
    stored: int,
    passing: int,
) -> int:
    """Returns the most bytes of activations that a stage holds at a time.

    For example, what the first of two stages holds of the micro-batches 0 and
    1 under `1f1b` with `remat="except_last"`, which recomputes 0 and not 1:

        task     F0        F1             B0                       B1
        holds    inputs    + inputs,      + stored 0, passing;     passing;
                           stored 1       then - 0                 then - 1

    Args:
        given: Bytes of the model's inputs that the stage takes for one
            micro-batch. It holds those of all micro-batches throughout.
        inputs: Bytes that the stage receives from other stages for one
            micro-batch.
        stored: Bytes that the backward pass of one micro-batch needs beside
            `inputs`.
        passing: Bytes that a backward pass needs only while it runs.
    """
    held = most = schedule.num_micro_batches * given
    last = WEIGHTS if schedule.splits else BACKWARD
    for task in schedule.steps(remat):
        if task.stage != stage:
            continue
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
