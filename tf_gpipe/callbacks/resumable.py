"""Whether `fit` can go on from a checkpoint."""

from collections.abc import Mapping
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.checkpoints import data
from tf_gpipe.checkpoints.store import CheckpointError
from tf_gpipe.checkpoints.store import Saved
from tf_gpipe.models.training import Run


def check_alone(callbacks: Any, kind: type) -> None:
    """Refuses two or more callbacks that would restore a run.

    Args:
        callbacks: The argument of `fit`.
        kind: The class of the callback that restores runs of tf_gpipe.
    """
    kinds = (kind, keras.callbacks.BackupAndRestore)
    restoring = upstream.callbacks_of(kinds, callbacks)
    if len(restoring) > 1:
        raise ValueError(
            "A run goes on from one checkpoint, and there are two or more "
            "callbacks that would restore one. Use one `Checkpoint`, whose "
            "`keep` and `every_steps` say what it keeps. Received: "
            f"{[type(x).__name__ for x in restoring]}"
        )


def check(
    saved: Saved,
    run: Run,
    params: Mapping[str, Any],
    found: Mapping[str, Any],
    data_is_own: bool,
) -> None:
    """Refuses a checkpoint of a place to which this `fit` does not come.

    Args:
        saved: `Saved`.
        run: The `Run` of this `fit`.
        params: Dictionary with the `epochs` and `steps` of this `fit`.
        found: What `data.check` has returned.
        data_is_own: Boolean, whether this host has the data of the host that
            has written the checkpoint.

    Raises:
        CheckpointError: If training cannot go on from it.
    """
    position, content = saved.position, saved.content
    if position.epochs < run.initial_epoch:
        raise CheckpointError(
            f"The checkpoint {saved.path} has {position}, and `fit` is to "
            f"begin after {run.initial_epoch}. Received: "
            f"initial_epoch={run.initial_epoch}"
        )
    data.check_same(
        saved,
        {"steps of an epoch": params["steps"], **found},
        within_epoch=position.steps > 0,
        # Other hosts have other rows. A run that has ended draws none.
        own=data_is_own
        and not content["ended"]
        and position.epochs < params["epochs"],
    )
    at_once = run.epochs.steps_per_execution
    if position.steps and position.steps % at_once:
        raise CheckpointError(
            f"The checkpoint {saved.path} was written after "
            f"{position.steps} steps of an epoch, which is no multiple of "
            f"steps_per_execution={at_once}."
        )
    if content.get("averages") and position.epochs < params["epochs"]:
        raise CheckpointError(
            f"The checkpoint {saved.path} is of the end of a run in which "
            "SwapEMAWeights(swap_on_epoch=True) has replaced the weights "
            "by their averages, from which training cannot go on to "
            f"epochs={params['epochs']}. Delete it, to go on from the "
            "one before. SwapEMAWeights() replaces them in evaluations "
            "alone."
        )
