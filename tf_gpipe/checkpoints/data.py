"""The data of a resumed run: checks that it repeats, and skips used batches.

The batches of an epoch may depend on the epochs before it, as where a data set
is shuffled anew in each. So the batches of the steps that are done are drawn
again, in order, and dropped.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import random_numbers
from tf_gpipe import upstream
from tf_gpipe.checkpoints.store import CheckpointError
from tf_gpipe.checkpoints.store import Saved

_ENDED = (
    "The data has ended before the place where training was: it must have the "
    "same batches as when the checkpoint was written."
)
_OWN_SEED = "seed of the generators that a PyDataset has,"


def check(
    epochs: Any, first: int, validation_data: Any, draws: Mapping[str, str]
) -> dict[str, Any]:
    """Refuses data that would not come in the same order again.

    Args:
        epochs: Keras's iterator over the epochs of `fit`.
        first: Integer, the epoch with which the data begins.
        validation_data: The argument of `fit`.
        draws: Where batches draw random numbers from, and the digest of its
            state as `fit` began, as of `random_numbers.watched`.

    Returns:
        Dictionary of what makes the batches those that they are, for JSON: the
        seeds, the batch sizes, and the numbers of rows that are batched, as far
        as they are known.

    Raises:
        ValueError: If the data is given once, as by a generator, is drawn
            without a seed, or in an order that validations change.
    """
    kind = upstream.kind_of_data(epochs)
    if kind is None:
        adapter = type(epochs.data_adapter).__name__
        raise ValueError(
            "Training can be taken up again where the data can: arrays, a "
            "keras.utils.PyDataset, or a tf.data.Dataset. What a generator or "
            "a loader of another library has given is gone, or comes in "
            "another order. Make it a PyDataset, or use "
            f"keras.callbacks.BackupAndRestore. Received: data for a {adapter}"
        )
    if kind == upstream.ARRAYS:
        shuffles = upstream.shuffles_arrays(epochs)
        seed = upstream.global_seed() if shuffles else None
        if shuffles and seed is None:
            raise ValueError(
                "Arrays are shuffled in an order that nothing tells again: no "
                "seed has been set. Call `keras.utils.set_random_seed(1)` "
                "before the model is made, or `fit` with shuffle=False."
            )
        rows, size = upstream.rows_of_arrays(epochs)
        return {"seed": seed, "batch size": [size], "number of rows": [rows]}
    if kind == upstream.TF_DATA:
        dataset = upstream.dataset_of(epochs)
        found = _check_dataset(dataset, first)
        _check_apart(dataset, validation_data)
        return found
    _check_apart(epochs.data_adapter.py_dataset, validation_data)
    _check_py_dataset(epochs, draws)
    if random_numbers.OWN not in draws:
        return {}
    return {_since(_OWN_SEED, first): draws[random_numbers.OWN]}


def _since(what: str, first: int) -> str:
    # Data that begins with another epoch may have other seeds and rows.
    return f"{what} of the data since epoch {first}"


def _check_apart(dataset: Any, validation_data: Any) -> None:
    """Refuses validation data whose random numbers are also the dataset's."""
    states = _lasting_states(dataset)
    for key, name in _lasting_states(validation_data).items():
        if key in states:
            raise ValueError(
                "The validation data draws from the same random numbers as "
                f"the training data ({name}), so that each validation changes "
                "the order of the epochs after it, and puts rows that were "
                "trained on into the validation. Give the `shuffle` before "
                "`take` and `skip` reshuffle_each_iteration=False, and what "
                "else draws numbers a generator or layers of its own."
            )


def _lasting_states(dataset: Any) -> dict[int, str]:
    """Returns the random states that iterators pass on, as for `tf.data`."""
    if isinstance(dataset, tf.data.Dataset):
        return upstream.lasting_states(dataset)
    if not isinstance(dataset, keras.utils.PyDataset):
        return {}
    found = random_numbers.attributes(dataset)
    if upstream.changes_between_epochs(dataset):
        found.append(dataset)
    return {id(x): type(dataset).__name__ for x in found}


def _check_py_dataset(epochs: Any, draws: Mapping[str, str]) -> None:
    """Refuses a `PyDataset` whose batches depend on when they are drawn."""
    dataset = epochs.data_adapter.py_dataset
    name = type(dataset).__name__
    if upstream.changes_between_epochs(dataset):
        _check_whole_epochs(
            epochs,
            f"changes between epochs, as {name} does by its `on_epoch_begin` "
            "or `on_epoch_end`",
        )
    if random_numbers.SHARED in draws:
        _check_whole_epochs(
            epochs,
            f"draws from `np.random` or `random`, as {name} does for its "
            "batches",
        )
    if draws and dataset.workers > 1:
        raise ValueError(
            f"The batches of {name} are drawn from a generator of random "
            "numbers by several workers: which batch gets which numbers is "
            "left to chance. Draw from `np.random.default_rng(index)` for "
            "each, or leave `workers` out. Received: "
            f"workers={dataset.workers}"
        )


def _check_whole_epochs(epochs: Any, what: str) -> None:
    """Refuses a `PyDataset` whose next epoch may be drawn ahead.

    Args:
        epochs: As of `check`.
        what: String, what the dataset does that an epoch must not share with
            the next one.
    """
    steps, data = epochs.steps_per_epoch, epochs.data_adapter
    if steps and (data.num_batches is None or steps < data.num_batches):
        raise ValueError(
            f"A PyDataset that {what}, must end with each epoch: where the "
            "next epoch goes on with it, some of its batches may be drawn "
            "before the epoch ends or after it, as it happens. Leave out "
            "`steps_per_epoch`, and let its length be that of an epoch; or "
            "let it draw all from a generator of its own, in `__getitem__` "
            f"alone. Received: steps_per_epoch={steps}, "
            f"{data.num_batches or 'endless'} batches"
        )


def _check_dataset(dataset: Any, first: int) -> dict[str, Any]:
    """As `check`, for a `tf.data.Dataset`."""
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "Training can be taken up again where the data can. Give `fit` the "
            "tf.data.Dataset itself, which Keras distributes. Received: "
            f"{type(dataset).__name__}"
        )
    within = upstream.datasets_within(dataset)
    if dataset.options().deterministic is False or any(
        map(upstream.has_open_order, within)
    ):
        raise ValueError(
            "A tf.data.Dataset with deterministic=False comes in another order "
            "each time. Leave the option out."
        )
    seeds = []
    for x in within:
        name = type(x).__name__.strip("_")
        own = upstream.seeds_of(x)
        if (0, 0) in own:
            raise ValueError(
                f"A tf.data.Dataset draws numbers without a seed ({name}), "
                "which come out otherwise each time. Give `shuffle` and the "
                "like a `seed`, or call `keras.utils.set_random_seed(1)` "
                "before the data set is made."
            )
        if upstream.draws_in_parallel(x):
            raise ValueError(
                f"A tf.data.Dataset draws numbers in parallel calls ({name}): "
                "which call gets which number is another each time. Leave "
                "`num_parallel_calls` out there, draw by "
                "`tf.random.stateless_uniform` or `tf.image.stateless_*`, or "
                "call `tf.config.experimental.enable_op_determinism()`."
            )
        # The order of functions within a function is not always the same.
        seeds += [list(each) for each in sorted(own)]
    return {
        _since("seed", first): seeds,
        "batch size": [s for x in within for s in upstream.batch_sizes_of(x)],
        _since("number of rows", first): [
            n for x in within for n in upstream.rows_of(x)
        ],
    }


def check_same(
    saved: Saved, found: dict[str, Any], within_epoch: bool, own: bool
) -> None:
    """Refuses other data than that with which a checkpoint was written.

    With another seed or epoch length, steps would get other batches.

    Args:
        saved: `Saved`.
        found: What `check` returns, and the steps of an epoch.
        within_epoch: Boolean, whether it was written within an epoch.
        own: Boolean, whether generators that the data has must be as they were
            when training began.

    Raises:
        CheckpointError: If it is other data.
    """
    written = {
        "steps of an epoch": saved.content["steps_per_epoch"],
        **saved.content.get("data", {}),
    }
    for name, now in found.items():
        before = written.get(name, now)
        if name.startswith(_OWN_SEED) and not own:
            continue
        if before != now and (within_epoch or name.startswith("seed")):
            raise CheckpointError(
                f"The checkpoint {saved.path} was written with another "
                f"{name}: {before}, and now it is {now}. Use the data, batch "
                "size and seed that it was written with."
            )


def may_be_in_another_order(epochs: Any, states: list) -> bool:
    """Returns whether batches may come in another order than in the first run.

    A `PyDataset` that shuffles as an epoch ends may have drawn from other
    random states than it did then.

    Args:
        epochs: As of `check`.
        states: The random states of the first run at the same place.
    """
    return (
        upstream.kind_of_data(epochs) == upstream.PY_DATASET
        and upstream.changes_between_epochs(epochs.data_adapter.py_dataset)
        and random_numbers.states() != states
    )


def skip_epochs(epochs: Any, count: int) -> None:
    """Draws and drops the batches of whole epochs, as `fit` would draw them.

    Args:
        epochs: As of `check`.
        count: Integer, the number of epochs.
    """
    fresh = epochs.steps_per_epoch is None
    if fresh and upstream.kind_of_data(epochs) == upstream.ARRAYS:
        # The order of each epoch depends on the seed alone.
        return
    for _ in range(count):
        with epochs.catch_stop_iteration():
            for _, _, batches in epochs:
                _draw(batches, epochs.steps_per_execution)


def skip_steps(epochs: Any, count: int, last: Callable[[Any], None]) -> None:
    """Makes the next epoch start after some steps, whose batches are dropped.

    Args:
        epochs: As of `check`.
        count: Positive integer, the number of steps.
        last: Function that is called with the iterator of batches and draws
            those of the last call of the step function.
    """

    def rest(executions: Iterator) -> Iterator:
        for begin, end, batches in executions:
            if begin >= count:
                yield begin, end, batches
                continue
            try:
                if end + 1 < count:
                    _draw(batches, epochs.steps_per_execution)
                else:
                    last(batches)
            except (StopIteration, tf.errors.OutOfRangeError) as error:
                raise ValueError(_ENDED) from error

    upstream.replace_next_epoch(epochs, rest)


def _draw(batches: Iterator, count: int) -> None:
    """Draws the batches that one call of the step function would."""
    for i in range(count):
        try:
            next(batches)
        except StopIteration:
            if not i:
                raise
            return
