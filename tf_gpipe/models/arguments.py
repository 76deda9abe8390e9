"""The constructor arguments of a pipeline, as attributes of the model."""

from typing import Any

from tf_gpipe import upstream


def _argument(name: str, doc: str) -> property:
    """Returns a read-only property of a constructor argument.

    Setting it to its present value is allowed: a user's subclass may store
    the arguments that it passes to `super().__init__`.
    """

    def get(self: Any) -> Any:
        config = getattr(self._config, name)
        if self._pipeline is None:
            return config
        return self._decided().get(name, config)

    def put(self: Any, value: Any) -> None:
        repair = (
            "A subclass that means something else by this name must define it "
            f"in the class, with `{name} = None`."
        )
        if "_config" not in vars(self):
            raise AttributeError(
                f"`{name}` is an argument of {type(self).__name__}, so it "
                f"cannot be set before `super().__init__`. {repair}"
            )
        # Keras wraps lists that are set as attributes in a class of its own.
        value = list(value) if isinstance(value, list) else value
        known = [getattr(self._config, name), get(self)]
        if any(type(value) is type(x) and value == x for x in known):
            return
        made = "PipelinedSequential(model"
        if not hasattr(type(self), "add"):
            made = "PipelinedModel.from_model(model"
        way = (
            "Call `model.rebalance(balance)`."
            if name == "balance"
            else "Make a pipeline that shares its layers and weights: "
            f"tf_gpipe.{made}, {name}=...)."
        )
        raise AttributeError(
            f"`{name}` of model '{self.name}' cannot be set, because its "
            f"stages are formed by it. Received: {name}={value!r}, where the "
            f"model has {name}={get(self)!r}. {way} {repair}"
        )

    return property(get, put, doc=doc)


class Arguments(upstream.Mixin):
    """Mixin: the constructor arguments, as properties of the model.

    Once the model is built, those with defaults have the values in effect. For
    a class with a `PipelineConfig` and a `Pipeline` or `None`.
    """

    num_stages = _argument("num_stages", "How many stages there are.")
    num_micro_batches = _argument(
        "num_micro_batches", "How many micro-batches a mini-batch is cut into."
    )
    balance = _argument(
        "balance", "The numbers of layers of the stages; as given until built."
    )
    schedule = _argument(
        "schedule", "The schedule as it was given: a name, or a `Schedule`."
    )
    remat = _argument("remat", "Which micro-batches are recomputed.")
    memory_limit = _argument(
        "memory_limit", "The memory that a device may take."
    )
    batch_size = _argument(
        "batch_size", "The rows of the mini-batches that `memory_limit` is for."
    )
    devices = _argument(
        "devices", "The devices of the schedule, a list a replica if several."
    )
    boundary_dtype = _argument(
        "boundary_dtype", "The dtype in which activations travel, or `None`."
    )
    nominal_length = _argument(
        "nominal_length", "What sizes that are not known count as in costs."
    )

    def _decided(self) -> dict[str, Any]:
        """Returns the values in effect of arguments that have defaults.

        Those that are chosen for the layers and the machine when the model is
        built: numbers of stages and micro-batches, balance, devices.
        """
        stages = self._pipeline.stages
        schedule = self._pipeline.schedule
        first = [schedule.devices.index(i) for i in range(len(schedule.tasks))]
        columns = [stages[k].devices for k in first]
        rows = [list(row) for row in zip(*columns, strict=True)]
        return {
            "num_stages": len(stages),
            "num_micro_batches": self._pipeline.num_micro_batches
            or schedule.num_micro_batches,
            "balance": [len(stage.nodes) for stage in stages],
            "devices": rows if len(rows) > 1 else rows[0],
        }
