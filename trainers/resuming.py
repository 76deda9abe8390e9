"""The checkpoint that a training run goes on from."""

from tf_gpipe.callbacks import Checkpoint
from tf_gpipe.checkpoints.store import CheckpointError
from tf_gpipe.checkpoints.store import Position
from tf_gpipe.checkpoints.store import Store
from trainers.command_line import UserError
from trainers.failures import checkpoints


def restored(model, workdir, hardware, every_steps, about, batches):
    """Restores the newest checkpoint of a run, if there is one.

    Args:
        model: A compiled pipeline.
        workdir: `Workdir`.
        hardware: `devices.Hardware`.
        every_steps: As of `Checkpoint`.
        about: Dictionary from names of flags to their values, of those that the
            model depends on.
        batches: Likewise, of those that determine the batches. `None` if
            nothing will be trained.

    Returns:
        Tuple of the `Checkpoint` of the run, and the `Position` of the newest.

    Raises:
        UserError: If hosts do not see the same checkpoint, it is of another
            model, or the rest of its epoch would be of other batches.
    """
    directory = checkpoints(workdir.path)
    if batches is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot write to --workdir: {error}") from error
    newest = [Position(), *Store(directory).positions()][-1]
    # Checked before variables are made, at which hosts wait for each other. All
    # numbers first: a host that left early would keep others waiting.
    found = list(map(hardware.of_all_hosts, newest))
    if any(len(set(numbers)) > 1 for numbers in found):
        raise UserError(
            "All hosts must resume from the same checkpoint: --workdir must be "
            "a directory that they share. Received: "
            f"workdir={workdir.path}"
        )
    checkpoint = Checkpoint(directory, every_steps=every_steps)
    try:
        position = checkpoint.restore(model)
    except CheckpointError as error:
        changed = workdir.changed(about)
        if not changed:
            raise
        raise UserError(
            f"{error} What differs: {'; '.join(changed)}."
        ) from error
    others = batches is not None and workdir.changed(batches)
    if others and position.steps:
        raise UserError(
            f"This run was stopped after {position}. The rest of the epoch "
            f"would be of other batches: {'; '.join(others)}. Go on with the "
            "same flags until the epoch is done, or choose another --workdir."
        )
    return checkpoint, position
