"""The plan of --tune: chosen once, and kept in the working directory."""

import tf_gpipe
from tf_gpipe.commands import models
from trainers.command_line import UserError

# The files in the working directory of the plan, and of the flags that it was
# chosen for.
_PLAN = "plan.json"
_PLAN_FLAGS = "plan_flags.json"
# Those that the trainer itself has, beside the hyper-parameters of its model.
_OF_A_PLAN = (
    *("batch_size", "batch_tokens", "max_length"),
    *("optimizer", "optimizer_args", "ema"),
)


def check(config):
    """Refuses flags that --tune rules out, and tells which it decides.

    Raises:
        UserError: If one is given.
    """
    if config.strategy != "none":
        raise UserError(
            "--tune chooses one pipeline, for devices of this host or "
            f"--workers. Received: --tune, --strategy={config.strategy}"
        )
    if config.elastic:
        raise UserError(
            "--tune keeps a pipeline for all of --workers, and --elastic "
            "goes on without some. Received: --tune --elastic"
        )
    given = [
        f"--{name}={value}"
        for name, value in config.pipeline_arguments().items()
        if name != "num_stages" and value is not None
    ]
    print(f"--tune decides in place of {', '.join(given)}.")


class TunedPlans:
    """The plans of a run with --tune, one for each model.

    Args:
        config: `JobConfig`.
        workdir: `Workdir`, or `None`.
        about: Dictionary from names of flags to their values, of those that
            plans and others depend on.
        devices: List of device strings.
    """

    def __init__(self, config, workdir, about, devices):
        self._config = config
        self._workdir = workdir
        self._about = about
        self._devices = devices

    def get(
        self,
        name,
        hyper_parameters,
        model,
        rows,
        length,
        optimizer,
        keeps=False,
    ):
        """Returns the plan in the working directory, or else chooses one.

        Args:
            name: String, the name of the model.
            hyper_parameters: Dictionary of its arguments.
            model: The model.
            rows: Integer, the rows of a mini-batch.
            length: Integer in place of sizes of inputs that are left open.
            optimizer: Keras optimizer or its name.
            keeps: Boolean, whether a plan that is chosen is printed, and
                written into the working directory.

        Raises:
            UserError: If the plan there was chosen for something else.
        """
        flags = self._flags(name, hyper_parameters)
        plan = self._kept(flags)
        if plan is None:
            plan = tf_gpipe.tune(
                model,
                models.batch(model, rows, length),
                devices=self._devices,
                optimizer=optimizer,
                replicas=False,
            )
            if keeps:
                print(plan, end="")
            if keeps and self._workdir:
                self._workdir.path.mkdir(parents=True, exist_ok=True)
                self._workdir.keep(flags, _PLAN_FLAGS)
                plan.save(self._workdir.path / _PLAN)
        return plan

    def _kept(self, flags):
        """Returns the plan in the working directory, or `None`."""
        path = self._workdir and self._workdir.path / _PLAN
        if not path or not path.exists():
            return None
        changed = self._workdir.changed(flags, _PLAN_FLAGS)
        if changed:
            raise UserError(
                f"{path} was chosen for other flags: {'; '.join(changed)}. Go "
                "on with the same flags, or delete it to choose anew. "
                "(--model_args also has what follows from the data.)"
            )
        return tf_gpipe.Plan.load(path)

    def _flags(self, name, hyper_parameters):
        """Returns the flags that a plan depends on, with their values.

        Those of the batches are known only where a model is trained. Which data
        set that is, and how it is read, matters by the hyper-parameters that
        follow: the size of images, the number of classes, or the vocabulary's.
        """
        return {
            "dtype_policy": self._config.dtype_policy,
            "workers": self._config.workers,
            "num_stages": self._config.num_stages,
            "model": name,
            "model_args": hyper_parameters,
            **{x: y for x, y in self._about.items() if x in _OF_A_PLAN},
        }
