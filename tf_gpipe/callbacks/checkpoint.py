"""`Checkpoint`: writes checkpoints, and resumes a run to the same bits."""

import math
import os
import pathlib
import time
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe import random_numbers
from tf_gpipe import upstream
from tf_gpipe.callbacks import monitors
from tf_gpipe.callbacks import resumable
from tf_gpipe.callbacks.snapshots import Snapshot
from tf_gpipe.callbacks.snapshots import Snapshots
from tf_gpipe.checkpoints import data
from tf_gpipe.checkpoints import model_variables
from tf_gpipe.checkpoints import state
from tf_gpipe.checkpoints.store import Position
from tf_gpipe.checkpoints.store import Saved
from tf_gpipe.checkpoints.writer import Writer
from tf_gpipe.checkpoints.writer import tell
from tf_gpipe.devices import worker_lost
from tf_gpipe.models.training import PipelinedTraining
from tf_gpipe.models.training import Run


class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints, from which the same program goes on exactly.

    Like `keras.callbacks.BackupAndRestore`, it restores as `fit` begins: run
    the program again, and it trains from the newest checkpoint to the weights
    that it would have had without the stop, bit by bit. It writes at the end of
    each epoch and, if asked to, within it: weights, optimizer, seeds, metrics,
    what `EarlyStopping` and its like remember, and the place in the data. The
    last checkpoint stays when training is done: the same `fit` trains no more
    then.

    It writes in a thread, from a copy, while the next steps run. The copy is
    in the memory of the host that has the variables; the client has some
    megabytes at a time. A checkpoint has its name when all of it is on the
    disk. Each file has a checksum: if one is damaged, `fit` says so and takes
    the checkpoint before. None is written while a trainable weight is infinite
    or not a number. This callback is called after all others, wherever it is
    in the list; if one of them fails between two epochs, the steps of the epoch
    are saved nevertheless.

    The data must be the same each time: arrays, a `keras.utils.PyDataset`, or
    a `tf.data.Dataset` with seeds. `fit` draws them from `initial_epoch` on,
    and drops the batches already trained on.

    Args:
        workdir: Path of the directory of the checkpoints of this run alone.
        every_steps: Positive integer, steps between two checkpoints within an
            epoch. Defaults to `None`: only at its end.
        every_seconds: Positive float, seconds between two checkpoints within
            an epoch, instead or in addition.
        keep: Positive integer, how many checkpoints to keep. Defaults to `2`:
            if one is damaged, the one before it is there.

    Raises:
        TypeError, ValueError: If an argument is not valid; in `fit`, if the
            data cannot be taken up again, another process trains there, the
            checkpoints are of another model or all damaged, or an optimizer
            of the model trains variables that are not of the model.
        OSError: In `fit`, if a checkpoint cannot be written or read.

    Example:

    >>> model = tf_gpipe.PipelinedSequential(
    ...     [keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)],
    ...     num_stages=2,
    ...     devices=["CPU:0", "CPU:0"],
    ... )
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((16, 8), "float32")
    >>> checkpoint = tf_gpipe.callbacks.Checkpoint("run", every_steps=100)
    >>> fitted = model.fit(x, x[:, :1], verbose=0, callbacks=[checkpoint])
    >>> checkpoint.newest().name
    'epoch_00001'
    """

    # Makes `fit` call it after the others: what they do as an epoch ends is in
    # the checkpoint.
    comes_last = True

    def __init__(
        self,
        workdir: str | os.PathLike,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 2,
    ):
        super().__init__()
        directory = checks.directory("workdir", workdir)
        if every_steps is not None:
            every_steps = checks.positive_integer("every_steps", every_steps)
        if every_seconds is not None:
            every_seconds = checks.number(
                "every_seconds", every_seconds, "a positive number", above=True
            )
        keep = checks.positive_integer("keep", keep)
        self._every_steps, self._every_seconds = every_steps, every_seconds
        # Absolute: a program may change its directory while it trains.
        self._writer = Writer(directory.absolute(), keep)

    def newest(self) -> pathlib.Path | None:
        """Returns the path of the newest checkpoint, or `None`."""
        return self._writer.newest()

    def restore(self, model: keras.Model) -> Position:
        """Gives a model the weights and optimizer of the newest checkpoint.

        `fit` does so by itself. It is for a program that only evaluates. The
        weights are those from which training goes on. Where `fit` ends with
        others, as with averages (`use_ema`) or the best ones of
        `EarlyStopping(restore_best_weights=True)`, call the same `fit` in its
        place: it trains no more, and ends with them.

        Args:
            model: A pipeline that is built. If it is compiled, its optimizer
                is restored, too.

        Returns:
            A tuple `(epochs, steps)`: the epochs that were done, and the steps
            of the next one. It is `(0, 0)` if there is no checkpoint.

        Raises:
            ValueError: If `model` is no pipeline, the newest checkpoint is one
                of another model or optimizer, or all are damaged.
        """
        _check_model(model)
        for saved in iter(self._writer.read, None):
            try:
                _restore(model, saved, model_variables.MODEL)
            except FileNotFoundError:
                # A process that trains deletes those before a newer one.
                if saved.path == self._writer.newest():
                    raise
                continue
            return saved.position
        return Position()

    def set_model(self, model):
        """Refuses models that are no pipelines; `fit` calls it."""
        _check_model(model)
        super().set_model(model)

    def on_train_begin(self, logs=None):
        run = self.model._training_run
        self._unsaved: Snapshot | None = None
        run.at_end.append(self._end)
        resumable.check_alone(run.callbacks, Checkpoint)
        self._data = data.check(
            run.epochs, run.initial_epoch, run.validation_data, run.draws
        )
        if not self.model.built:
            raise ValueError(
                "The Checkpoint callback needs a model that is built. Give it "
                "an `Input`, or call `model.build(input_shape)` before `fit`."
            )
        strategy = upstream.strategy_of(self.model)
        self._writes = strategy is None or strategy.extended.should_checkpoint
        if self._every_seconds is not None and isinstance(
            strategy, tf.distribute.MultiWorkerMirroredStrategy
        ):
            raise ValueError(
                "Several hosts write at the same step. Use `every_steps` in "
                f"place of every_seconds={self._every_seconds}."
            )
        if self._writes:
            self._writer.lock()
        self._snapshots = Snapshots(
            self.model, run.callbacks, self.params, self._data
        )
        # The steps done: in this epoch, in all, in all at the last checkpoint.
        self._steps = self._total = self._total_saved = 0
        self._time_saved = time.monotonic()
        self._epoch_ended = self._stopped = False
        self._resumed: Saved | None = self._writer.read()
        if self._resumed is not None:
            self._resume(self._resumed, run)
        else:
            self._writer.check()
        upstream.call_after_epochs(run.epochs, self._steps_done)

    def _resume(self, saved: Saved, run: Run) -> None:
        """Makes `fit` start at the epoch and step of a checkpoint.

        Restores the model, and skips the data that was trained on already.
        """
        epochs, content = run.epochs, saved.content
        position, start = saved.position, saved.position.epochs
        resumable.check(
            saved, run, self.params, self._data, data_is_own=self._writes
        )
        _restore(self.model, saved, model_variables.MODEL)
        self._total = self._total_saved = content["total"]
        # Now, as these swap back when the epoch begins.
        monitors.restore(self._snapshots.swaps, saved)
        tell(f"Going on from {saved.path}: {position} are done.")
        if content["ended"]:
            tell("A callback has ended this run: it is not trained further.")
            start = self.params["epochs"]
        self._passed = position.steps
        upstream.start_at_epoch(self.model, start)
        if start >= self.params["epochs"]:
            return
        self._writer.check()
        data.skip_epochs(epochs, position.epochs - run.initial_epoch)
        if data.may_be_in_another_order(epochs, content["random"]):
            tell(
                "The random states of Python and NumPy are not those that the "
                "first run had here: a PyDataset that shuffles by them as an "
                "epoch ends comes in another order. Call "
                "`keras.utils.set_random_seed(1)` before it is made, or let it "
                "have a generator of its own."
            )
        if position.steps:
            data.skip_steps(epochs, position.steps, self._last_step)

    def _last_step(self, batches: Any) -> None:
        """Runs the last step before the checkpoint again, then restores all.

        In its first step Keras makes variables that do not exist yet, such as
        those of metrics; only then can their values be restored.
        """
        saved: Any = self._resumed
        self.model.train_function(batches)
        _restore(self.model, saved, model_variables.KINDS)
        run = self.model._training_run
        run.logs.update(self.model.get_metrics_result())
        if not any(saved.content.get(x) for x in ("begun", "all_steps")):
            self._resumed = None

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._steps = epoch, 0
        saved = self._resumed
        if saved is not None:
            # Not in `on_train_begin`: the random states were saved after what
            # callbacks had done as the epoch began.
            self._go_on(saved)
            if not self._passed and saved.content.get("begun"):
                # What the callbacks before this one do as an epoch begins, such
                # as setting the learning rate, was done when it was written.
                _restore(self.model, saved, model_variables.MODEL)
        self._random = random_numbers.states()
        if self._epoch_ended:
            self._save(Position(epoch), begun=True)
        self._epoch_ended = False
        upstream.start_at_epoch(self.model, None)

    def _go_on(self, saved: Saved) -> None:
        monitors.restore(self._snapshots.monitors, saved)
        random_numbers.set_states(saved.content["random"])
        self._steps = self._passed
        if not self._steps:
            self._resumed = None

    def on_train_batch_begin(self, batch, logs=None):
        self._snapshots.drop_moved()
        if self._resumed is not None:
            # As in `on_epoch_begin`, for what callbacks do as a step begins.
            _restore(self.model, self._resumed, model_variables.KINDS)
            if not self._resumed.content.get("all_steps"):
                self._resumed = None
        # Before a step, not after one: the checkpoint at the end of an epoch
        # is written elsewhere.
        if batch and self._is_due():
            self._save(Position(self._epoch, batch), begun=True)

    def on_train_batch_end(self, batch, logs=None):
        self._total += batch + 1 - self._steps
        self._steps = batch + 1
        if self.model.stop_training:
            self._stopped = not self._all_steps_done()
            # Saved at once: a long validation may come before the epoch's end.
            self._save(Position(self._epoch, self._steps))

    def _steps_done(self) -> None:
        """Keeps what `_end` writes if `fit` fails before the next checkpoint.

        `fit` calls it after the last step of an epoch, before its validation.
        What callbacks do from then on, the resumed run does again.
        """
        if self._resumed is not None:
            # Where nobody knows the number of steps, one more has been begun,
            # which draws random numbers until the data turns out to have ended.
            _restore(self.model, self._resumed, model_variables.KINDS)
            self._resumed = None
        if self._total > self._total_saved:
            self._unsaved = self._snapshot(
                Position(self._epoch, self._steps), all_steps=True
            )

    def _end(self) -> None:
        """Writes the steps of an epoch after which `fit` has failed, if any."""
        snapshot, self._unsaved = self._unsaved, None
        try:
            if snapshot is not None and self._writes:
                self._write(snapshot)
        except Exception as error:
            # It would hide the one by which `fit` has failed.
            tell(f"{error}")
        finally:
            self._writer.end()

    def on_epoch_end(self, epoch, logs=None):
        stops = self.model.stop_training
        within = self._stopped or not self._all_steps_done(unknown=True)
        if stops and within:
            return
        if not stops and epoch + 1 < self.params["epochs"]:
            self._epoch_ended = True
            return
        # At once: as training ends, a callback may fail, and weights may be
        # replaced, by averages or the best ones, from which it cannot go on.
        self._random = random_numbers.states()
        self._save(
            Position(epoch + 1),
            ended=monitors.have_ended(self._snapshots.monitors),
        )

    def on_train_end(self, logs=None):
        if self._resumed is not None:
            # No epoch was left to train: the callbacks end the run with the
            # state that they had at its first end.
            self._go_on(self._resumed)
            for monitor in self._snapshots.monitors:
                monitor.on_train_end(logs)
        self._writer.wait()

    def _all_steps_done(self, unknown: bool = False) -> bool:
        """Returns whether no step of the epoch is left; or `unknown`."""
        steps = self.params["steps"]
        # The last call of the step function may have more steps than are left.
        return self._steps >= steps if steps else unknown

    def _is_due(self) -> bool:
        steps = self._every_steps or math.inf
        seconds = self._every_seconds or math.inf
        # Not before a first step: a resumed run would replace its checkpoint.
        return self._total > self._total_saved and (
            self._total // steps > self._total_saved // steps
            or time.monotonic() - self._time_saved >= seconds
            # If the last write has failed, the next one raises its error now.
            or self._writer.has_failed()
        )

    def _save(self, position: Position, **how: bool) -> None:
        self._total_saved, self._unsaved = self._total, None
        self._writer.wait()
        snapshot = self._snapshot(position, **how)
        self._time_saved = time.monotonic()
        if self._writes:
            self._write(snapshot)

    def _snapshot(self, position: Position, **how: bool) -> Snapshot:
        return self._snapshots.take(
            position, total=self._total, random=self._random, **how
        )

    def _write(self, snapshot: Snapshot) -> None:
        model = self.model
        self._writer.write(
            *snapshot, lambda path: worker_lost.note_checkpoint(model, path)
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, PipelinedTraining):
        raise ValueError(
            "The Checkpoint callback is for models of tf_gpipe, such as "
            "`PipelinedSequential`. Plain ones have "
            f"`keras.callbacks.BackupAndRestore`. Received: {model}"
        )


@worker_lost.naming_failures
def _restore(model: Any, saved: Saved, kinds: tuple[str, ...]) -> None:
    model_variables.build_optimizers(model, saved)
    state.restore(model, saved, kinds)
    worker_lost.note_checkpoint(model, saved.path)
