"""`Job`: a training run with its hardware, model, checkpoints and errors."""

import contextlib
import pathlib

import keras

import model_zoo
import tf_gpipe
from tf_gpipe import progress
from tf_gpipe.callbacks import Timeline
from tf_gpipe.checkpoints.store import Position
from tf_gpipe.commands import models
from tf_gpipe.schedule import schedules
from tf_gpipe.whole_files import replacing
from trainers import devices
from trainers import tuned_plans
from trainers.command_line import UserError
from trainers.failures import NotANumber
from trainers.failures import as_user_errors
from trainers.failures import newest
from trainers.interruption import StopOnSignal
from trainers.interruption import Stopped
from trainers.loss_log import LossLog
from trainers.resuming import restored
from trainers.speed import Speed
from trainers.tuned_plans import TunedPlans
from trainers.weight_averages import SwapAverages
from trainers.weight_averages import averaged
from trainers.weight_averages import has_averages
from trainers.workdir import Workdir


class Job:
    """A training run, from the start of the hardware to the last evaluation.

    Make it before anything else uses TensorFlow, whose devices are fixed once
    it has started.

    Args:
        config: `JobConfig`.
        batches: Dictionary from names of flags to their values, of the flags
            that determine the batches, beside the seed. A run that was stopped
            within an epoch resumes only if they are unchanged. `num_replicas`
            is taken for the number that there are. Defaults to `None`: nothing
            is trained.
        about: Dictionary of the same kind, of the other flags that the model
            of a checkpoint depends on. Defaults to `None`: none.

    Attributes:
        config: `JobConfig`.
        hardware: `devices.Hardware`.
        workdir: `pathlib.Path` or `None`.

    Raises:
        UserError: If the configuration does not fit the machine, a worker
            process does not answer, or another one trains in `workdir`.

    Example:

    ```python
    job = Job(JobConfig(num_stages=2), batches={"batch_size": 128})
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

    def __init__(self, config, batches=None, about=None):
        self.config = config
        self.workdir = config.workdir and pathlib.Path(config.workdir)
        self._place = self.workdir and Workdir(self.workdir)
        self._checkpoint = None
        self._position = Position()
        for name in ("restarts", "checkpoint_every_steps"):
            if getattr(config, name) and not self.workdir:
                raise UserError(
                    f"--{name} needs a --workdir, to go on from a checkpoint "
                    f"there. Received: --{name}={getattr(config, name)}"
                )
        if config.dry_run and batches is None:
            raise UserError(
                "--dry_run shows what training will need: leave it or --mode "
                "out. Received: --dry_run"
            )
        if config.tune:
            tuned_plans.check(config)
        with as_user_errors(self.workdir):
            try:
                # With --tune, --num_stages is a number of devices.
                schedule = "1f1b" if config.tune else config.schedule
                num_devices = schedules.num_devices_of(
                    schedule, config.num_stages
                )
                self.hardware = devices.start(num_devices, config)
            except (TypeError, ValueError) as error:
                raise UserError(error) from error
        self._batches = {**(batches or {}), "seed": config.seed}
        if "num_replicas" in self._batches:
            self._batches["num_replicas"] = self.hardware.num_replicas
        self._about = {**self._batches, **(about or {})}
        self._tuned = TunedPlans(
            config, self._place, self._about, self.hardware.devices
        )
        self._trains = batches is not None and not config.dry_run
        if self._place and self._trains and self.hardware.is_chief:
            self._place.lock()

    def pipelined(
        self, name, hyper_parameters, optimizer="adam", rows=1, length=128
    ):
        """Makes the pipeline of a model of the zoo, as configured.

        Args:
            name: String, the name of the model.
            hyper_parameters: Dictionary of its arguments.
            optimizer: Keras optimizer or its name. This and the following ones
                are for `--tune`.
            rows: Integer, the rows of a mini-batch.
            length: Integer in place of sizes of inputs that are left open.
        """
        if self.config.tune:
            model = model_zoo.get(name, **hyper_parameters)
            plan = self._tuned.get(
                name, hyper_parameters, model, rows, length, optimizer, True
            )
            return models.pipelined(model, plan=plan)
        return models.pipelined(
            model_zoo.get(name, **hyper_parameters),
            devices=self.hardware.devices,
            **self.config.pipeline_arguments(),
        )

    def plan(self, name, hyper_parameters, optimizer, rows, length=None):
        """Plans a model of the zoo: memory and work of each stage.

        Args:
            name: String, the name of the model.
            hyper_parameters: Dictionary of its arguments.
            optimizer: Keras optimizer, or its name.
            rows: Positive integer, the rows of a replica's mini-batch.
            length: Positive integer in place of sizes of inputs that are left
                open. Defaults to `None`: there are none.

        Returns:
            A `tf_gpipe.Plan`.

        Raises:
            UserError: If there is no such plan.
        """
        try:
            with (
                models.dtype_policy(self.config.dtype_policy),
                as_user_errors(self.workdir),
            ):
                # The model is made without values for its weights.
                with keras.StatelessScope(initialize_variables=False):
                    model = model_zoo.get(name, **hyper_parameters)
                if self.config.tune:
                    return self._tuned.get(
                        name, hyper_parameters, model, rows, length, optimizer
                    )
                return tf_gpipe.plan(
                    model,
                    models.batch(model, rows, length),
                    optimizer=optimizer,
                    **self.config.pipeline_arguments(),
                )
        except (TypeError, ValueError) as error:
            raise UserError(error) from error

    def export(self, model):
        """Writes the plain Keras model as a SavedModel into `workdir`.

        Returns:
            The path of the SavedModel.

        Raises:
            UserError: If nothing has been trained, there are several hosts, or
                the disk is full.
        """
        self._check_result()
        path = self.workdir / "export"
        with (
            as_user_errors(self.workdir),
            averaged(model),
            replacing(path) as partial,
        ):
            model.to_keras().export(partial, verbose=False)
        return path

    def _check_result(self):
        if self.config.strategy == "multi_worker":
            raise UserError(
                "Several hosts would all write the same file. Use one, without "
                "--strategy. Received: --strategy=multi_worker"
            )
        if self._position == (0, 0):
            raise UserError(
                "There is no checkpoint in --workdir: train first. Received: "
                f"workdir={self.workdir}"
            )

    @progress.shown(after=progress.PATIENCE)
    def predict(self, model, batches):
        """Returns the trained model's predictions for `batches`, an array.

        Raises:
            UserError: If nothing has been trained, or there are several hosts.
        """
        self._check_result()
        with (
            progress.doing("predicting"),
            as_user_errors(self.workdir),
            averaged(model),
        ):
            return model.predict(batches, verbose=0)

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
        try:
            with (
                models.dtype_policy(self.config.dtype_policy),
                as_user_errors(self.workdir),
                self.hardware.strategy.scope(),
            ):
                model = make()
                if self.workdir:
                    self._checkpoint, self._position = restored(
                        model,
                        self._place,
                        self.hardware,
                        self.config.checkpoint_every_steps or None,
                        self._about,
                        self._batches if self._trains else None,
                    )
        # A TypeError is a hyper-parameter that the model does not have.
        except (TypeError, ValueError) as error:
            raise UserError(error) from error
        return model

    def fit(
        self,
        model,
        make_batches,
        steps_per_epoch,
        batch="",
        callbacks=(),
        validation_batches=None,
        batch_size=None,
    ):
        """Trains from where the last run stopped to the last epoch.

        Args:
            model: The model that `build` returned.
            make_batches: Function of two integers, `first` and `last`, that
                returns a `tf.data.Dataset` of the batches of epochs `first`
                to `last - 1`, `steps_per_epoch` of each. Those of an epoch
                must not depend on `first`.
            steps_per_epoch: Positive integer.
            batch: String for the log that describes a batch: `"128 images"`.
            callbacks: List of `keras.callbacks.Callback`.
            validation_batches: `tf.data.Dataset` for `validate_every`.
            batch_size: Positive integer, samples of a batch, for the logs.
                Defaults to `None`: batches differ.

        Raises:
            Stopped: If Ctrl-C or SIGTERM has stopped training.
            UserError: If a worker fails, the data is damaged, the disk is
                full, or the loss is not a number.
        """
        config = self.config
        first = self._position.epochs
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
        stop = StopOnSignal(self.hardware.of_all_hosts)
        callbacks = [
            *callbacks,
            NotANumber(self.workdir),
            *([SwapAverages()] if has_averages(model) else []),
            Speed(batch_size),
            *self._timeline(),
            stop,
            *self._records(steps_per_epoch),
        ]
        with (
            as_user_errors(self.workdir),
            contextlib.ExitStack() as at_end,
            stop,
        ):
            if self._place:
                at_end.callback(self._place.unlock)
            if self.workdir and self.hardware.is_chief:
                if config.flags:
                    with replacing(self.workdir / "flags.txt") as path:
                        path.write_text(config.flags)
                self._place.keep(self._about)
            model.fit(
                make_batches(first, config.num_epochs),
                initial_epoch=first,
                epochs=config.num_epochs,
                steps_per_epoch=steps_per_epoch,
                callbacks=callbacks,
                verbose=config.verbose if self.hardware.is_chief else 0,
                # With True, Keras warns that it does not shuffle a dataset.
                shuffle=False,
                validation_data=validation_batches
                if config.validate_every
                else None,
                validation_freq=config.validate_every or 1,
            )
            # It may have come while the last checkpoint was written.
            stopped = stop.is_stopped()
        if stopped:
            kept = "Without --workdir nothing is kept."
            if self.workdir:
                kept = (
                    f"The newest checkpoint is {newest(self.workdir)}. The "
                    "same command goes on from there."
                )
            raise Stopped(stop.signal, f"Stopped. {kept}")

    @progress.shown(after=progress.PATIENCE)
    def evaluate(self, model, batches):
        """Returns the loss and metrics of `model.evaluate`, as a dictionary."""
        with (
            progress.doing("testing"),
            as_user_errors(self.workdir),
            averaged(model),
        ):
            return model.evaluate(batches, verbose=0, return_dict=True)

    def _timeline(self):
        if self.config.timeline is None:
            return []
        try:
            return [Timeline(html=self.config.timeline)]
        except (ImportError, TypeError, ValueError) as error:
            raise UserError(error) from error

    def _records(self, steps_per_epoch):
        if not self.workdir:
            return []
        records = []
        if self.hardware.is_chief:
            records = [
                LossLog(self.workdir / "losses.csv", steps_per_epoch),
                keras.callbacks.TensorBoard(
                    self.workdir / "logs", write_graph=False
                ),
            ]
        # The checkpoint last: the steps that it saves are then already in the
        # other files.
        return [*records, self._checkpoint]


def _what_runs_where(model, config, batch):
    schedule = getattr(model.schedule, "name", model.schedule)
    rows = zip(*(stage.devices for stage in model.stages), strict=True)
    names = "; ".join(
        ", ".join(device.removeprefix("/device:") for device in row)
        for row in rows
    )
    return (
        f"Training {len(model.stages)} stages on {names}, schedule "
        f"{schedule}, remat {model.remat}, {config.dtype_policy}: batches of "
        f"{batch}, {model.num_micro_batches} micro-batches a replica."
    )
