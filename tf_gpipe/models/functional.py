"""`PipelinedModel`, a functional Keras model trained as a pipeline."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.models import planned
from tf_gpipe.models import user_class
from tf_gpipe.models.pipelined import Pipelined
from tf_gpipe.models.sequential import PipelinedSequential
from tf_gpipe.partition import layer_costs
from tf_gpipe.planning.plans import Plan
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage import abstract
from tf_gpipe.stage.opening import functional


@keras.saving.register_keras_serializable(package="tf_gpipe")
class PipelinedModel(Pipelined, upstream.Functional):
    """A functional Keras model, trained as a pipeline over several devices.

    As `PipelinedSequential`, for models with several inputs and outputs,
    shared layers and skip connections: what it computes is what `keras.Model`
    computes. The calls of layers are cut into stages in the order of
    `keras.Model.layers`, in which a layer comes as late as those that need it
    allow. Functional models and `Sequential`s within the model, such as a
    backbone of `keras.applications` or KerasHub, are cut like the rest, while
    names, files and `summary` stay those of the model. One whose class has a
    `call` of its own is one layer. Among cuts that balance equally well, those
    with less to send are preferred.

    A tensor goes straight from the stage that makes it to every stage that
    uses it, once a device, and its gradients return the same way. The
    outputs of the model meet on the last stage's device.

    Args:
        inputs: Nested structure of `keras.Input`s.
        outputs: Nested structure of tensors that layers have made of them.
            The layers keep their weights, which move to the devices of their
            stages. To build a model that is too large for one device, make it
            within `keras.StatelessScope(initialize_variables=False)`: then
            its weights get their first values where their stage is.
        name: String.
        num_stages: As of `PipelinedSequential`, at most the number of calls
            of layers, also in models within the model.
        num_micro_batches: As of `PipelinedSequential`.
        balance: As of `PipelinedSequential`; a list has the number of calls
            of layers in each stage.
        schedule: As of `PipelinedSequential`.
        remat: As of `PipelinedSequential`.
        devices: As of `PipelinedSequential`.
        boundary_dtype: As of `PipelinedSequential`.
        nominal_length: As of `PipelinedSequential`.
        plan: As of `PipelinedSequential`.
        trainable: Boolean, whether the layers are trainable, or `None` to
            leave them as they are.

    Raises:
        ValueError: If an argument is out of range or unknown, or there are
            too few layers or devices.

    Example:

    >>> inputs = keras.Input((8,))
    >>> hidden = keras.layers.Dense(8, activation="relu")(inputs)
    >>> outputs = keras.layers.Add()([inputs, keras.layers.Dense(8)(hidden)])
    >>> model = tf_gpipe.PipelinedModel(
    ...     inputs,
    ...     outputs,
    ...     num_stages=2,
    ...     num_micro_batches=4,
    ...     devices=["CPU:0", "CPU:0"],
    ... )
    >>> [stage.count_params() for stage in model.stages]
    [72, 72]
    """

    def __init__(
        self,
        inputs: Any,
        outputs: Any,
        name: str | None = None,
        *,
        num_stages: int | str | None = None,
        num_micro_batches: int | None = None,
        balance: str | Callable | Sequence[int] = "parameters",
        schedule: str | Schedule = "1f1b",
        remat: str = "always",
        devices: Sequence[str] | Sequence[Sequence[str]] | None = None,
        boundary_dtype: str | None = None,
        nominal_length: int = layer_costs.NOMINAL_LENGTH,
        plan: Plan | None = None,
        trainable: bool | None = None,
    ):
        super().__init__(inputs, outputs, name=name, trainable=trainable)
        arguments = planned.arguments(
            plan,
            {
                "num_stages": num_stages,
                "num_micro_batches": num_micro_batches,
                "balance": balance,
                "schedule": schedule,
                "remat": remat,
                "devices": devices,
            },
            lambda: planned.of_model(self),
        )
        self._configure(
            **arguments,
            boundary_dtype=boundary_dtype,
            nominal_length=nominal_length,
        )
        for x in self.inputs:
            if upstream.is_optional(x):
                raise ValueError(
                    "A pipeline needs all of its inputs, but "
                    f"keras.Input(name='{x.name}', optional=True) may be "
                    "`None`. Use optional=False."
                )
        graph = functional(self)
        if not graph.nodes:
            raise ValueError(
                "A pipeline needs layers between `inputs` and `outputs`. "
                f"Received: inputs={inputs}, outputs={outputs}"
            )
        self._place(graph)

    @classmethod
    def from_model(cls, model: keras.Model, **kwargs: Any) -> "PipelinedModel":
        """Returns a pipeline that shares layers and weights with a model.

        A model of a class of your own keeps it: the pipeline is an instance
        of that class, too, with its methods and properties (`train_step`,
        `compute_loss`, `metrics`), in which `super()` is the pipeline. Its
        `__init__` is not run again: the pipeline gets the attributes of
        `model` as they are.

        Args:
            model: Functional `keras.Model`, or a built `keras.Sequential`.
                What it has been compiled with does not come along. If it has
                been trained or asked, compile it again before it is used: its
                weights have moved.
            **kwargs: Arguments of the class, such as `num_stages`.

        Returns:
            A `PipelinedModel`; of a subclass of `keras.Sequential`, a
            `PipelinedSequential`.

        Raises:
            TypeError: If `model` has no graph of layers, or its class has a
                `call` of its own.
            ValueError: If the model has attributes of names that a pipeline
                has for itself.

        Example:

        ```python
        model = tf_gpipe.PipelinedModel.from_model(
            keras.applications.ResNet50(weights=None),
            num_stages=4,
            num_micro_batches=16,
        )
        ```
        """
        graph = model
        if isinstance(model, keras.Sequential):
            graph = upstream.graph_of(model)
        if not isinstance(graph, upstream.Functional):
            raise TypeError(
                "A pipeline is cut from the graph of a functional model or a "
                "built `keras.Sequential`. Received: "
                f"model={getattr(model, 'name', model)!r} (of type "
                f"{type(model).__name__}), whose layers only its `call` "
                "knows. Write it as a function of `keras.Input`s; or put its "
                "largest stack of layers into a `PipelinedSequential`, which "
                "`call` can use as a layer."
            )
        kwargs.setdefault("name", model.name)
        if isinstance(model, keras.Sequential):
            own = user_class.kept(model, PipelinedSequential)
            if own is not PipelinedSequential:
                if cls is not PipelinedModel:
                    raise TypeError(
                        f"{cls.__name__} is functional: it cannot keep the "
                        f"class of model {model.name!r}, "
                        f"{own.__name__}, a subclass of `keras.Sequential`. "
                        "Use `PipelinedModel.from_model`, or a subclass of "
                        "`PipelinedSequential`."
                    )
                return PipelinedSequential(model, **kwargs)
        kept: Any = user_class.kept(model, cls)
        made = cls.__new__(kept)
        cls.__init__(
            made,
            upstream.inputs_of(graph),
            upstream.outputs_of(graph),
            **kwargs,
        )
        user_class.carry(model, made)
        if kwargs.get("trainable") is None:
            upstream.set_trainable_alone(made, model.trainable)
        return made

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = cls._revived(config)
        if "model" in config:
            model, scope = cls._plain(config.pop("model"), custom_objects)
            made = cls.from_model(model, **config)
            scope.finish(made)
            return made
        if "layers" not in config:
            # Of a subclass, which makes its layers itself.
            config.pop("dtype", None)
            return cls(**config)
        # So that weights get their first values where their stage is.
        with abstract.NoValues() as scope:
            arguments = upstream.functional_arguments(config, custom_objects)
        model = cls(**arguments)
        scope.assign()
        return model

    def _convert_inputs_to_tensors(self, flat_inputs):
        converted = super()._convert_inputs_to_tensors(flat_inputs)
        # There are more given than taken where a dictionary has other keys
        # too, of which Keras warns.
        for x, given in zip(converted, flat_inputs, strict=False):
            # A tensor of another dtype has none.
            mask = upstream.mask(given)
            if mask is not None:
                upstream.set_mask(x, mask)
        return converted

    def _pipeline_for(self, x: Any) -> tuple:
        x = self._as_tensors(x)
        # Which Keras does where it calls the model, but `fit` does not.
        self._assert_input_compatibility(x)
        return self._built_pipeline(), tuple(self._standardize_inputs(x))


user_class.register_for_hdf5(PipelinedModel)
