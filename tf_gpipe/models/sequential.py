"""`PipelinedSequential`, a `keras.Sequential` trained as a pipeline."""

import inspect
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe import upstream
from tf_gpipe.models import depth
from tf_gpipe.models import refused
from tf_gpipe.models import user_class
from tf_gpipe.models.docstrings import with_keras_docstrings
from tf_gpipe.models.pipelined import Pipelined
from tf_gpipe.models.saving import not_a_config
from tf_gpipe.partition import layer_costs
from tf_gpipe.planning.plans import Plan
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage import call_overrides
from tf_gpipe.stage import model_graph
from tf_gpipe.stage import no_values
from tf_gpipe.stage.stage import name_layer


@with_keras_docstrings
@keras.saving.register_keras_serializable(package="tf_gpipe")
class PipelinedSequential(Pipelined, keras.Sequential):
    """A linear stack of layers, trained as a pipeline over several devices.

    GPipe (Huang et al., 2019, arXiv:1811.06965) for Keras: the layers are cut
    into stages, each on a device of its own; a mini-batch is cut into
    micro-batches, which follow one another through the stages; gradients are
    accumulated over the micro-batches and applied once. What it computes is
    what `keras.Sequential` computes. Everything that Keras offers for a model
    works: `compile`, `fit`, `evaluate`, `predict`, callbacks, saving.

    Functional models and `Sequential`s in the list are cut like the rest; one
    whose class has a `call` of its own is one layer.

    It is a layer, too: inside another Keras model, the call is pipelined
    forward, and backward under a gradient tape.

    Args:
        layers: List of Keras layers, or a `keras.Sequential`, whose layers
            and weights are then shared. If that is of a subclass, the pipeline
            keeps its class, as `PipelinedModel.from_model` says.
        num_stages: Integer K, at most the number of layers (of a functional
            model, of calls of layers), those of models within it among them.
            Defaults to one stage a visible accelerator (a CPU where there is
            none), or two where the schedule puts several on a device; at most
            one a layer. With `"auto"` all arguments up to `remat` are chosen,
            as by `tf_gpipe.tune` without measurements, for mini-batches of the
            size that the `Input` tells.
        num_micro_batches: Integer M. Mini-batches need not be divisible by it.
            One of fewer rows is cut into micro-batches of one row.
            Defaults to 4 a device, the paper's rule for a small bubble.
        balance: List of K numbers of layers (of a functional model, of calls
            of layers); or the cost to balance across stages: `"flops"`,
            operations of the forward pass; `"time"`, measured on the first
            device when the model is built; `"parameters"`; `"memory"`, for
            weights and what is kept for the backward pass; or a function
            `cost(layer, input_shape)` that returns a number. Costs are those
            of a batch of one row, if the `Input` gives no batch size. Defaults
            to `"flops"`, or `"parameters"` where a layer's operations cannot
            be counted.
        schedule: `"1f1b"` (one forward, one backward), `"eager_1f1b"` (as 1F1B,
            with more forward passes ahead, which run while activations and
            gradients travel), `"gpipe"` (all forward, then all backward),
            `"zero_bubble"` (as 1F1B, with the gradients of weights in what was
            bubble), `"eager_zero_bubble"` (as eager 1F1B, likewise, for the
            last micro-batches), `"interleaved"` and `"interleaved_zero_bubble"`
            (as 1F1B and zero-bubble, stage s on device s modulo the number of
            `devices`, so that `num_stages` is a multiple of it), `"zb_v"`,
            `"v_half"` and `"v_min"` (of D devices, stages s and 2D-1-s on
            device s, so that `num_stages` is 2D), `"auto"` (searched for what
            the stages cost), or a `tf_gpipe.Schedule`. `"1f1b"` and
            `"zero_bubble"` hold few activations, `"v_half"` and `"v_min"`
            fewer; `"gpipe"` accepts losses that need the whole mini-batch;
            `"eager_1f1b"` is for slow connections; `"zb_v"` has the smallest
            bubble where stages take equally long, `"auto"` where they do not.
            Defaults to `"1f1b"`.
        remat: Which micro-batches keep only the input of each stage and
            compute the activations again for the backward pass: `"always"`,
            `"except_last"` (all but the last one) or `"never"`. The last
            stage recomputes nothing under schedules in which its backward
            passes follow its forward passes at once, such as `"1f1b"`. With
            `"auto"` each stage recomputes just those of its layers with which
            it fits in `memory_limit`; with the default `balance` the model is
            cut so that the slowest stage is as fast as it can be then.
            Defaults to `"always"`.
        devices: List of TensorFlow device strings, one a stage, repeated
            where stages share a device; with schedules that put several
            stages on a device, one for each of the schedule's devices.
            Devices of other hosts are those that `tf_gpipe.connect` returns.
            Under a `tf.distribute` strategy a list of such lists, one a
            replica; not on TPUs, where stages are the logical cores of a
            replica. Defaults to the visible accelerators in order (CPUs where
            there are none), row by row.
        boundary_dtype: `"bfloat16"` or `"float16"`, in which activations and
            their gradients travel from one device to another, where they have
            a wider floating-point type: half the bytes of float32, for a
            relative error of up to 2^-8 or 2^-11 in each number; with float16
            those beyond 65,504 overflow. Defaults to `None`: they travel
            as they are, and the numbers are those of the plain model.
        nominal_length: Integer that stands for every unknown dimension except
            the batch, such as the length of `Input((None,))`, when `balance`
            computes costs. Defaults to 128.
        memory_limit: What a device may take, with `remat="auto"`: an integer
            of bytes, or a string such as `"8GB"`, for weights, the sums of
            their gradients, the optimizer's slots and activations; or a
            float up to 1, a share of the activations that the fullest device
            takes with `remat="never"`.
        batch_size: Integer, the rows of the mini-batches that a
            `memory_limit` in bytes is for; by default those of the model's
            `Input`. If the batch size is unknown, a share is computed for
            micro-batches of 32 rows.
        plan: `tf_gpipe.Plan`, which `tf_gpipe.tune` or `tf_gpipe.plan` has
            made for these layers. It decides `num_stages`,
            `num_micro_batches`, `balance`, `schedule`, `remat`,
            `memory_limit` and `batch_size`, and `devices` and
            `nominal_length` unless they are given. Values of the others that
            are not the defaults are refused; of layers only their number is
            compared with the plan's. Defaults to `None`.
        trainable: Boolean, whether the layers are trainable.
        name: String.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range or unknown, or there are
            too few layers or devices.

    Example:

    >>> model = tf_gpipe.PipelinedSequential(
    ...     [
    ...         keras.Input(shape=(8,)),
    ...         keras.layers.Dense(16, activation="relu"),
    ...         keras.layers.Dense(4),
    ...     ],
    ...     num_stages=2,
    ...     num_micro_batches=4,
    ...     devices=["CPU:0", "CPU:0"],
    ... )
    >>> [stage.count_params() for stage in model.stages]
    [144, 68]
    """

    def __new__(cls, layers=None, *args, **kwargs):
        if isinstance(layers, keras.Sequential):
            cls = user_class.kept(layers, cls)
        return super().__new__(cls)

    def __init__(
        self,
        layers: Sequence[keras.Layer] | keras.Sequential | None = None,
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
        trainable: bool = True,
        name: str | None = None,
    ):
        super().__init__(trainable=trainable, name=name)
        self._configure(
            plan,
            layers,
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
        if layers is None:
            return
        model = layers if isinstance(layers, keras.Sequential) else None
        if model is not None:
            user_class.check(model, self)
            call_overrides.check_penalty(model)
            # Includes the input layer, which `layers.layers` leaves out.
            layers = keras.Model.layers.fget(layers)
        layers = checks.items(
            layers,
            "`layers` must be a list of layers or a `keras.Sequential`. "
            f"Received: layers={layers!r}",
        )
        for layer in layers:
            self.add(layer, rebuild=False)
        if not self.layers:
            raise ValueError(
                "A pipeline needs layers. Received an empty list: "
                f"layers={layers}"
            )
        self._resolve(self.layers)
        self._maybe_rebuild()
        if model is not None:
            user_class.carry(model, self)
            # A frozen model stays frozen: Keras trains none of its layers,
            # whether or not they are trainable themselves.
            self._trainable = trainable and model.trainable

    # What `help` shows, which asks `__new__` first.
    __new__.__signature__ = inspect.signature(__init__)  # type: ignore

    def add(self, layer, rebuild=True):
        self._pipeline = None
        super().add(layer, rebuild=rebuild)

    def pop(self, rebuild=True):
        self._pipeline = None
        return super().pop(rebuild=rebuild)

    def build(self, input_shape=None):
        """Builds the layers, each on the device of its stage.

        Args:
            input_shape: Shape of the input with its batch axis, such as
                `(None, 8)`. It may be left out of a model with an `Input`.

        Raises:
            ValueError: If stages cannot be formed of the layers.
        """
        self._resolve(self.layers)
        # Built without values: weights are initialised on their stage's
        # device, so a model too large for one device is never on one.
        begun = isinstance(self._layers[0], keras.layers.InputLayer)
        with no_values.NoValues() as scope:
            try:
                with depth.naming_recursion_limit():
                    super().build(input_shape)
                if self._functional is None:
                    refused.check_specs(self._layers)
            except Exception as e:
                if isinstance(self._layers[0], keras.layers.InputLayer):
                    self._name_layer(e, self._layers[0].output)
                    if not begun:
                        # Keras added this input layer, with the shape of this
                        # call, which may be what was wrong.
                        self._layers.pop(0)
                raise
        if self._functional is not None:
            # The graph that Keras runs: if a layer returns more tensors than
            # its spec has, the next one gets those of the spec only.
            self._place(model_graph.of_model(self))
            scope.assign()

    def compute_output_spec(self, inputs, training=None, mask=None, **kwargs):
        """Returns the shape and dtype of what a call returns.

        Args:
            inputs: Nested structure of `keras.KerasTensor`s.
            training: Boolean or `None`, as for `call`.
            mask: As for `call`.
            **kwargs: As for `call`.

        Returns:
            Nested structure of `keras.KerasTensor`s.
        """
        if self._pipeline is None:
            self._build_for(inputs)
        return super().compute_output_spec(
            inputs, training=training, mask=mask, **kwargs
        )

    @classmethod
    def _of_model(cls, model, **config):
        return cls(model, name=model.name, **config)

    @classmethod
    def _of_layers(cls, config, custom_objects):
        # Not needed: a built model's list of layers has its input layer.
        config.pop("build_input_shape", None)
        config.pop("dtype", None)
        layers = config.get("layers")
        if not isinstance(layers, (list, tuple)) or not all(
            isinstance(x, dict) for x in layers
        ):
            raise not_a_config(config)
        config["layers"] = [
            keras.saving.deserialize_keras_object(x, custom_objects)
            if "module" in x
            # In HDF5 files, a layer's config does not have its Python module.
            else upstream.layer_from_hdf5(x, custom_objects)
            for x in layers
        ]
        return cls(**config)

    def _maybe_rebuild(self):
        # Called for each added layer, before there are enough for all stages.
        try:
            self._resolve(self.layers)
        except ValueError:
            self.built = False
            self._functional = None
            return
        super()._maybe_rebuild()

    def _build_for(self, inputs: Any) -> None:
        """Builds the layers for inputs of any nested structure."""
        self._resolve(self.layers)
        if any(t is None for t in keras.tree.flatten(inputs)):
            raise ValueError(
                "A pipeline needs all of its inputs, but `None` was passed. "
                f"Received: inputs={inputs}"
            )
        if isinstance(inputs, (tf.Tensor, tf.SparseTensor, keras.KerasTensor)):
            self.build((None, *inputs.shape[1:]))
        if self._pipeline is None:
            x = keras.tree.map_structure(
                lambda t: keras.KerasTensor(
                    (None, *t.shape[1:]),
                    keras.backend.standardize_dtype(t.dtype),
                ),
                self._converted(inputs),
            )
            graph = model_graph.of_layers(self.layers, x)
            with no_values.NoValues() as scope, upstream.name_scope_of(self):
                try:
                    made = x
                    for layer in self.layers:
                        made = layer(made)
                except Exception as e:
                    self._name_layer(e, x)
                    raise
                # Within the scope: to infer a spec Keras may call a layer,
                # which would initialise all variables without values, on the
                # first device.
                graph.infer_specs()
            self._place(graph)
            scope.assign()
        self.built = True

    def _converted(self, inputs: Any) -> Any:
        """Returns inputs as Keras's `__call__`, which `fit` does not call."""
        return keras.tree.map_structure(
            lambda x: upstream.convert_argument(self, x), inputs
        )

    def _name_layer(self, error: Exception, x: Any) -> None:
        """Adds the failing layer and its stage to an error of the build.

        They are found by calling the layers once more, on the spec `x`.
        """
        stages = ["a stage not yet known"] * len(self.layers)
        if isinstance(self._config.balance, list):
            _, devices = self._resolve(self.layers)
            of_calls = [
                f"stage {k} on {', '.join(devices[k])}"
                for k, count in enumerate(self._config.balance)
                for _ in range(count)
            ]
            # A model in the list has the stage of its first layer.
            stages = [
                of_calls[model_graph.num_calls(self.layers[:i])]
                for i in range(len(self.layers))
            ]
        for layer, stage in zip(self.layers, stages, strict=True):
            inputs = x
            try:
                x = layer(inputs)
            except Exception:
                name_layer(error, layer, stage, inputs)
                return

    def _pipeline_for(self, x: Any) -> tuple:
        x = self._as_tensors(x)
        if self._pipeline is None:
            self._build_for(x)
        if self._functional is None:
            x = self._converted(x)
        else:
            mask = upstream.mask(x)
            given = self._functional._standardize_inputs(x)
            if len(given) != 1:
                raise ValueError(
                    f"Model '{self.name}' takes one input. Received "
                    f"{len(given)}: {x!r}"
                )
            x = given[0]
            if mask is not None:
                upstream.set_mask(x, mask)
        return self._built_pipeline(), (x,)


user_class.register_for_hdf5(PipelinedSequential)
