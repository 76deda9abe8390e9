"""`PipelinedModel`, a functional Keras model trained as a pipeline."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.models import depth
from tf_gpipe.models import user_class
from tf_gpipe.models.docstrings import with_arguments_of
from tf_gpipe.models.docstrings import with_keras_docstrings
from tf_gpipe.models.pipelined import Pipelined
from tf_gpipe.models.sequential import PipelinedSequential
from tf_gpipe.partition import layer_costs
from tf_gpipe.planning.plans import Plan
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage import call_overrides
from tf_gpipe.stage import model_graph
from tf_gpipe.stage import no_values


@with_keras_docstrings
@with_arguments_of(PipelinedSequential)
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
        **others: Those of `PipelinedSequential`, from `num_stages` to `plan`.
        trainable: Boolean, whether the layers are trainable, or `None` to
            leave them as they are.

    Raises:
        TypeError: If an argument is of a wrong type.
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
        balance: str | Callable | Sequence[int] | None = None,
        schedule: str | Schedule = "1f1b",
        remat: str = "always",
        devices: Sequence[str] | Sequence[Sequence[str]] | None = None,
        boundary_dtype: str | None = None,
        nominal_length: int = layer_costs.NOMINAL_LENGTH,
        memory_limit: int | str | float | None = None,
        batch_size: int | None = None,
        plan: Plan | None = None,
        trainable: bool | None = None,
    ):
        with depth.naming_recursion_limit():
            super().__init__(inputs, outputs, name=name, trainable=trainable)
        self._configure(
            plan,
            self,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            balance=balance,
            schedule=schedule,
            remat=remat,
            devices=devices,
            boundary_dtype=boundary_dtype,
            nominal_length=nominal_length,
            memory_limit=memory_limit,
            batch_size=batch_size,
        )
        for x in self.inputs:
            if upstream.is_optional(x):
                raise ValueError(
                    "A pipeline needs all of its inputs, but "
                    f"keras.Input(name='{x.name}', optional=True) may be "
                    "`None`. Use optional=False."
                )
        graph = model_graph.of_model(self)
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
                Compile the pipeline: what `model` was compiled with is not
                copied. If `model` has been trained or has predicted, compile
                it again before you use it: its weights have moved.
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

        >>> inputs = keras.Input((8,))
        >>> hidden = keras.layers.Dense(8, activation="relu")(inputs)
        >>> plain = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        >>> model = tf_gpipe.PipelinedModel.from_model(
        ...     plain, num_stages=2, devices=["CPU:0", "CPU:0"]
        ... )
        >>> model.weights[0] is plain.weights[0]
        True
        """
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
        call_overrides.check(model)
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
    def _of_model(cls, model, **config):
        return cls.from_model(model, **config)

    @classmethod
    def _of_layers(cls, config, custom_objects):
        if "layers" not in config:
            # The config of a subclass whose `__init__` makes the layers.
            config.pop("dtype", None)
            return cls(**config)
        # Without values: weights are initialised on their stage's device.
        arguments, scope = no_values.built(
            lambda x: upstream.functional_arguments(x, custom_objects), config
        )
        model = cls(**arguments)
        scope.assign()
        return model

    def _convert_inputs_to_tensors(self, flat_inputs):
        if len(flat_inputs) < len(self.inputs):
            # Keras checks lists and dictionaries, but no deeper structures.
            names = keras.tree.map_structure(
                lambda x: x.name, upstream.inputs_of(self)
            )
            raise ValueError(
                f"A pipeline needs all of its {len(self.inputs)} inputs: "
                f"{names}. Call it with tensors in this structure; it "
                f"received {len(flat_inputs)}: {flat_inputs}"
            )
        converted = super()._convert_inputs_to_tensors(flat_inputs)
        # Not strict: a dictionary may have more keys than the model has
        # inputs. Keras warns of them.
        for x, given in zip(converted, flat_inputs, strict=False):
            # Keras loses the mask where it converts a tensor's dtype.
            mask = upstream.mask(given)
            if mask is not None:
                upstream.set_mask(x, mask)
        return converted


user_class.register_for_hdf5(PipelinedModel)
