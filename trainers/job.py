"""A training run: hardware, model, resumption, and how it may end."""

import contextlib
import dataclasses
import errno
import math
import pathlib
import re

import keras
import tensorflow as tf

import model_zoo
from tf_gpipe.commands import models
from trainers import devices
from trainers.checkpoints import Checkpoints
from trainers.checkpoints import Position
from trainers.checkpoints import newest
from trainers.command_line import UserError
from trainers.interruption import StopOnSignal
from trainers.interruption import Stopped
from trainers.loss_log import LossLog
from trainers.weight_averages import SwapAverages
from trainers.weight_averages import averaged
from trainers.weight_averages import has_averages
from trainers.weight_averages import inner_optimizer

DTYPE_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")

# In the working directory.
_CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """What can be chosen for any training run.

    Attributes:
        num_stages: As of `tf_gpipe.PipelinedSequential`, and so are
            `num_micro_batches`, `balance`, `schedule` and `remat`.
        num_micro_batches: See `num_stages`.
        balance: See `num_stages`.
        schedule: See `num_stages`.
        remat: See `num_stages`.
        strategy: As of `devices.start`, and so are `num_replicas`, `workers`,
            `worker_timeout` and `tpu`.
        num_replicas: See `strategy`.
        workers: See `strategy`.
        worker_timeout: See `strategy`.
        tpu: See `strategy`.
        dtype_policy: String, one of `DTYPE_POLICIES`, of all layers.
        num_epochs: Integer, epochs in all, those of earlier runs included.
        validate_every: Integer, epochs between two evaluations while
            training; `0` for none.
        seed: Integer, of the weights and of the order of the data.
        workdir: Directory for checkpoints, losses and logs; `None` to keep
            nothing.
        verbose: `0`, `1` or `2`, as of `keras.Model.fit`.
        flags: String, what flags.txt in `workdir` holds once training starts;
            `None` for no such file.
    """

    num_stages: int = 2
    num_micro_batches: int = 8
    balance: str | list[int] = "parameters"
    schedule: str = "1f1b"
    remat: str = "always"
    strategy: str = "none"
    num_replicas: int | None = None
    workers: list[str] | None = None
    worker_timeout: float = 30.0
    tpu: str | None = None
    dtype_policy: str = "float32"
    num_epochs: int = 20
    validate_every: int = 0
    seed: int = 0
    workdir: str | pathlib.Path | None = None
    verbose: int = 1
    flags: str | None = None


class Job:
    """A training run, from the start of the hardware to the last evaluation.

    It is made first of all: TensorFlow's devices are fixed once it has
    started.

    Args:
        config: `JobConfig`.

    Attributes:
        config: `JobConfig`.
        hardware: `devices.Hardware`.
        workdir: `pathlib.Path` or `None`.

    Raises:
        UserError: If the configuration does not fit the machine, or a worker
            process does not answer.

    Example:

    ```python
    job = Job(JobConfig(num_stages=2))
    keras.utils.set_random_seed(job.config.seed)

    def make():
        model = job.pipelined("resnet_small", {"num_classes": 10})
        model.compile("adam", keras.losses.CategoricalCrossentropy())
        return model

    model = job.build(make)
    job.fit(model, make_batches, steps_per_epoch=100)
    job.evaluate(model, test_batches)
    ```
    """

    def __init__(self, config):
        self.config = config
        self.workdir = config.workdir and pathlib.Path(config.workdir)
        self._checkpoints = None
        self._position = Position()
        with self._told_in_one_line():
            self.hardware = devices.start(
                config.num_stages,
                config.strategy,
                config.num_replicas,
                config.workers,
                config.worker_timeout,
                config.tpu,
            )

    def pipelined(self, name, hyper_parameters):
        """Returns a model of the zoo as the configuration's pipeline."""
        return models.pipelined(
            model_zoo.get(name, **hyper_parameters),
            num_stages=self.config.num_stages,
            num_micro_batches=self.config.num_micro_batches,
            balance=self.config.balance,
            schedule=self.config.schedule,
            remat=self.config.remat,
            devices=self.hardware.devices,
        )

    def build(self, make):
        """Makes the model, and restores its newest checkpoint if there is one.

        Args:
            make: Function without arguments that returns a built and compiled
                pipeline. It is called in the scope of the strategy and of the
                dtype policy.

        Returns:
            The model.

        Raises:
            UserError: If the model cannot be made as configured, the
                checkpoint is not one of this model, or hosts do not see the
                same one.
        """
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.config.dtype_policy)
        try:
            with self.hardware.strategy.scope():
                model = make()
                if self.workdir:
                    self._restore(model)
        # A TypeError is a hyper-parameter that the model does not have.
        except (TypeError, ValueError) as error:
            raise UserError(error) from error
        finally:
            keras.config.set_dtype_policy(before)
        return model

    def _restore(self, model):
        try:
            self._checkpoints = Checkpoints(
                self.workdir / _CHECKPOINTS, self.hardware.is_chief
            )
        except OSError as error:
            raise UserError(f"Cannot write to --workdir: {error}") from error
        self._position = self._checkpoints.position()
        if not all(map(self.hardware.agree, self._position)):
            raise UserError(
                "All hosts must resume from the same checkpoint: --workdir "
                "must be a directory that they share. Received: "
                f"workdir={self.workdir}"
            )
        self._checkpoints.restore(model)

    def fit(
        self,
        model,
        make_batches,
        steps_per_epoch,
        batch="",
        callbacks=(),
        validation_batches=None,
    ):
        """Trains from where the last run stopped to the last epoch.

        Args:
            model: What `build` returned.
            make_batches: Function of two integers, `first` and `last`, that
                returns a `tf.data.Dataset` of the batches of epochs `first`
                to `last - 1`, `steps_per_epoch` of each. Those of an epoch
                must not depend on `first`.
            steps_per_epoch: Positive integer.
            batch: String for the log, what a batch is: `"128 images"`.
            callbacks: List of `keras.callbacks.Callback`.
            validation_batches: `tf.data.Dataset` for `validate_every`.

        Raises:
            Stopped: If Ctrl-C or SIGTERM has stopped training.
            UserError: If a worker fails, the data is damaged, the disk is
                full, or the loss is not a number.
        """
        config = self.config
        first, skipped = self._position
        # A run may have been stopped after the last step of an epoch.
        first += skipped // steps_per_epoch
        skipped %= steps_per_epoch
        if self.hardware.is_chief:
            model.summary()
            print(_what_runs_where(model, config, batch))
        if self._position > (0, 0):
            print(
                f"Resuming: {self._position} of {config.num_epochs} are done."
            )
        if first >= config.num_epochs:
            print("Only testing.")
            return
        stop = StopOnSignal()
        callbacks = [
            *callbacks,
            _NotANumber(self._newest),
            *([SwapAverages()] if has_averages(model) else []),
            stop,
            *self._records(steps_per_epoch, Position(first, skipped)),
        ]

        def fit(first, last, skipped=0, callbacks=callbacks):
            batches = make_batches(first, last)
            model.fit(
                batches.skip(skipped) if skipped else batches,
                initial_epoch=first,
                epochs=last,
                steps_per_epoch=steps_per_epoch - skipped,
                callbacks=callbacks,
                verbose=config.verbose if self.hardware.is_chief else 0,
                # Keras warns otherwise that it does not shuffle a dataset.
                shuffle=False,
                validation_data=validation_batches
                if config.validate_every
                else None,
                validation_freq=config.validate_every or 1,
            )

        with self._told_in_one_line(), stop:
            if self.workdir and config.flags and self.hardware.is_chief:
                (self.workdir / "flags.txt").write_text(config.flags)
            if skipped:
                with _weights_are_kept(model) as callback:
                    fit(first, first + 1, skipped, [*callbacks, callback])
                first += 1
            if first < config.num_epochs and not stop.signal:
                fit(first, config.num_epochs)
        if stop.signal:
            kept = "Without --workdir nothing is kept."
            if self.workdir:
                kept = (
                    f"The newest checkpoint is {self._newest()}. The same "
                    "command goes on from there."
                )
            raise Stopped(stop.signal, f"Stopped. {kept}")

    def evaluate(self, model, batches):
        """Returns what `model.evaluate` tells of `batches`, as a dictionary."""
        with self._told_in_one_line():
            with averaged(model):
                return model.evaluate(batches, verbose=0, return_dict=True)

    def _records(self, steps_per_epoch, position):
        if not self.workdir:
            return []
        records = []
        if self.hardware.is_chief:
            records = [
                LossLog(self.workdir / "losses.csv", steps_per_epoch, position),
                keras.callbacks.TensorBoard(
                    self.workdir / "logs", write_graph=False
                ),
            ]
        # Last, so that what it saves is also in the other files.
        return [*records, self._checkpoints]

    def _newest(self):
        found = self.workdir and newest(self.workdir / _CHECKPOINTS)
        return found or "none: there is no --workdir, or no epoch is done"

    @contextlib.contextmanager
    def _told_in_one_line(self):
        """Turns errors that the user can mend into a `UserError`."""
        try:
            yield
        except tf.errors.UnavailableError as error:
            raise UserError(
                f"{error.message} The newest checkpoint is {self._newest()}."
            ) from error
        except tf.errors.ResourceExhaustedError as error:
            raise UserError(
                "A device is out of memory. More micro-batches "
                "(--num_micro_batches), --remat=always, more stages "
                f"(--num_stages) or smaller batches need less: {error.message}"
            ) from error
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as e:
            if isinstance(e, tf.errors.DataLossError) or re.search(
                "IteratorGetNext|MakeIterator|Decode", str(e)
            ):
                raise UserError(
                    "The data set is damaged. Delete it from the directory of "
                    f"data sets and prepare it again: {e.message}"
                ) from e
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise UserError(
                f"Cannot write to {self.workdir}: {error}. The newest "
                f"checkpoint is {self._newest()}."
            ) from error


@contextlib.contextmanager
def _weights_are_kept(model):
    """Gives a callback that keeps `fit` from setting weights to averages.

    Keras does that at the end of each `fit`, of which there are two in a run
    that is resumed within an epoch.
    """
    optimizer = inner_optimizer(model)
    use_ema = optimizer.use_ema
    yield keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(optimizer, "use_ema", False)
    )
    optimizer.use_ema = use_ema


class _NotANumber(keras.callbacks.Callback):
    """Ends training before a loss that is not a number can be saved."""

    def __init__(self, newest):
        super().__init__()
        self._newest = newest

    def on_train_batch_end(self, batch, logs=None):
        if not math.isfinite(logs["loss"]):
            raise UserError(
                f"The loss is {logs['loss']}. A lower --learning_rate or a "
                "longer --warmup_steps may help. The newest checkpoint is "
                f"{self._newest()}."
            )


def _what_runs_where(model, config, batch):
    rows = zip(*(stage.devices for stage in model.stages), strict=True)
    names = "; ".join(
        ", ".join(device.removeprefix("/device:") for device in row)
        for row in rows
    )
    return (
        f"Training {len(model.stages)} stages on {names}, schedule "
        f"{config.schedule}, remat {config.remat}, {config.dtype_policy}: "
        f"batches of {batch}, {config.num_micro_batches} micro-batches a "
        "replica."
    )
