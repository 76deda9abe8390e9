"""What a stage's activations need at their peak.

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
    """Returns the most bytes that a stage holds beside weights and the like.

    What is there for the micro-batches 0 and 1 of `1f1b`'s first stage of
    two, of which remat recomputes all but the last one (1 here):

        task     F0        F1             B0                       B1
        holds    inputs    + inputs,      + stored 0, passing;     passing;
                           stored 1       then - 0                 then - 1

    Args:
        given: The bytes of a micro-batch that the stage gets from the
            model's inputs. It holds all micro-batches' throughout.
        inputs: The bytes of a micro-batch that it gets from other stages.
        stored: The bytes that the backward pass of a micro-batch needs beside
            them.
        passing: The bytes that it needs at a time.
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
