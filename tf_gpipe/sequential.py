"""`PipelinedSequential`, a `keras.Sequential` trained as a pipeline."""

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import abstract
from tf_gpipe import placement
from tf_gpipe import replicas
from tf_gpipe import slots
from tf_gpipe import state
from tf_gpipe.micro_batch import not_dense
from tf_gpipe.pipeline import Pipeline
from tf_gpipe.pipeline_config import PipelineConfig
from tf_gpipe.pipeline_config import ResolvedConfig
from tf_gpipe.schedule import Schedule
from tf_gpipe.stage import Stage
from tf_gpipe.stage import name_layer
from tf_gpipe.summary import stage_table
from tf_gpipe.training import PipelinedTraining


@keras.saving.register_keras_serializable(package="tf_gpipe")
class PipelinedSequential(PipelinedTraining, keras.Sequential):
    """A linear stack of layers, trained as a pipeline over several devices.

    GPipe (Huang et al., 2019, arXiv:1811.06965) for Keras: the layers are cut
    into stages, each on a device of its own; a mini-batch is cut into
    micro-batches, which follow one another through the stages; gradients are
    accumulated over the micro-batches and applied once. What it computes is
    what `keras.Sequential` computes. Everything that Keras offers for a model
    works: `compile`, `fit`, `evaluate`, `predict`, callbacks, saving.

    It is a layer, too: inside another Keras model, the call is pipelined
    forward, and backward under a gradient tape.

    Args:
        layers: List of Keras layers, or a `keras.Sequential`, whose layers
            and weights are then shared.
        num_stages: Integer K, at most the number of layers. Defaults to one
            stage a visible accelerator (a CPU where there is none), at most
            one a layer.
        num_micro_batches: Integer M. Batches need not be divisible by it.
            Defaults to `4 * num_stages`, the paper's rule for a small bubble.
        balance: List of K layer counts; or what stages shall have in nearly
            equal parts: `"parameters"`; `"flops"`, operations of the forward
            pass; `"time"`, measured on the first device when the model is
            built; `"memory"`, for weights and for what is kept for the
            backward pass; or a function `cost(layer, input_shape)` that
            returns a number. Costs are those of a batch of one row, if the
            `Input` gives no batch size. Defaults to `"parameters"`.
        schedule: `"1f1b"` (one forward, one backward), `"gpipe"` (all
            forward, then all backward), `"interleaved"` (as 1F1B, stage s on
            device s modulo the number of `devices`, so that `num_stages` is a
            multiple of it), or a `tf_gpipe.Schedule`. `"1f1b"` holds fewer
            activations than `"gpipe"`, which accepts losses that need the
            whole mini-batch; `"interleaved"` has the smallest bubble.
            Defaults to `"1f1b"`.
        remat: Which micro-batches keep only the input of each stage and
            compute the activations again for the backward pass: `"always"`,
            `"except_last"` (all but the last one) or `"never"`. None is where
            a schedule sends the last stage backward right after a forward
            pass, as `"1f1b"` does. Defaults to `"always"`.
        devices: List of TensorFlow device strings, one a stage, repeated
            where stages share a device; with `"interleaved"` and schedules of
            your own, one for each of the schedule's devices. Devices of other
            hosts are those that `tf_gpipe.connect` returns. Under a
            `tf.distribute` strategy a list of such lists, one a replica; not
            on TPUs, where stages are the logical cores of a replica. Defaults
            to the visible accelerators in order (CPUs where there are none),
            row by row.
        trainable: Boolean, whether the layers are trainable.
        name: String.

    Raises:
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

    def __init__(
        self,
        layers: Sequence[keras.Layer] | keras.Sequential | None = None,
        *,
        num_stages: int | None = None,
        num_micro_batches: int | None = None,
        balance: str | Callable | Sequence[int] = "parameters",
        schedule: str | Schedule = "1f1b",
        remat: str = "always",
        devices: Sequence[str] | Sequence[Sequence[str]] | None = None,
        trainable: bool = True,
        name: str | None = None,
    ):
        super().__init__(trainable=trainable, name=name)
        # XLA compiles for one device: a model with a pipeline in it spans
        # several.
        self.supports_jit = False
        self._config = PipelineConfig(
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            balance=balance,
            schedule=schedule,
            remat=remat,
            devices=devices,
        )
        self._pipeline: Pipeline | None = None
        if layers is None:
            return
        if isinstance(layers, keras.Sequential):
            # With the input layer, which `layers.layers` leaves out.
            layers = keras.Model.layers.fget(layers)
        for layer in layers:
            self.add(layer, rebuild=False)
        if not self.layers:
            raise ValueError(
                "A pipeline needs layers. Received an empty list: "
                f"layers={list(layers)}"
            )
        self._resolve()
        self._maybe_rebuild()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages: each has `index`, `device`, `layers`, `count_params()`.

        Raises:
            ValueError: If the model has not been built.
        """
        return self._built_pipeline().stages

    def add(self, layer, rebuild=True):
        self._pipeline = None
        super().add(layer, rebuild=rebuild)

    def pop(self, rebuild=True):
        self._pipeline = None
        return super().pop(rebuild=rebuild)

    def __call__(self, inputs, *args, **kwargs):
        # Before Keras builds the layers for the shape of a ragged tensor.
        for x in keras.tree.flatten(inputs):
            if isinstance(x, tf.RaggedTensor):
                raise not_dense(x)
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape=None):
        if self.layers:
            self._resolve()
        # Abstractly: weights get their values where their stage is, and a
        # model too large for one device is never on one.
        with abstract.no_values():
            try:
                super().build(input_shape)
            except Exception as e:
                first = self._layers[0] if self._layers else None
                if isinstance(first, keras.layers.InputLayer):
                    self._name_layer(e, first.output)
                raise
        if self._functional is not None:
            self._place(self._functional.input)

    def rebalance(self, balance: Any = "time") -> None:
        """Cuts a built model into stages anew.

        Weights and optimizer state move to the devices of their new stages,
        with the values that they have. Functions that `fit`, `evaluate` and
        `predict` have traced are traced again; a `tf.function` of your own
        that calls the model must be made again.

        Args:
            balance: As the argument of the class.

        Raises:
            ValueError: If `balance` is not valid, or the model has not been
                built.
        """
        pipeline = self._built_pipeline()
        num_stages = pipeline.schedule.num_stages
        config = dataclasses.replace(
            self._config, balance=balance, num_stages=num_stages
        )
        self._resolve(config)
        previous, self._config = self._config, config
        try:
            self._place(self._inputs)
        except Exception:
            self._config = previous
            raise
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and optimizer.built:
            # Of those too that have been frozen since it was built.
            weights = optimizer._trainable_variables
            for weight, own in zip(
                weights, slots.of_optimizer(optimizer, weights), strict=True
            ):
                for slot in own:
                    placement.place(slot, replicas.devices_of(weight.value))
            slots.find_again(optimizer)
        self.train_function = None
        self.test_function = None
        self.predict_function = None

    def compute_output_spec(self, inputs, training=None, mask=None, **kwargs):
        if self._pipeline is None:
            self._build_for(inputs)
        return super().compute_output_spec(
            inputs, training=training, mask=mask, **kwargs
        )

    def summary(
        self,
        line_length=None,
        positions=None,
        print_fn=None,
        expand_nested=False,
        show_trainable=False,
        layer_range=None,
    ):
        """Prints Keras's summary, then a table of the stages."""
        super().summary(
            line_length=line_length,
            positions=positions,
            print_fn=print_fn,
            expand_nested=expand_nested,
            show_trainable=show_trainable,
            layer_range=layer_range,
        )
        if self._pipeline is not None:
            (print_fn or print)(stage_table(self._pipeline, line_length))

    def load_weights(self, filepath, skip_mismatch=False, **kwargs):
        # Keras drops the file's optimizer state, with a warning, if the
        # optimizer does not have its variables yet.
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and self.built and not optimizer.built:
            optimizer.build(self.trainable_variables)
        super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def stateless_call(self, *args, **kwargs):
        raise NotImplementedError(
            "A pipeline reads its weights on their devices, so they cannot be "
            "passed to it. Call the model itself, under a `tf.GradientTape` "
            "for gradients."
        )

    def get_config(self):
        config = super().get_config()
        config.update(self._config.to_dict())
        if callable(config["balance"]):
            # A function need not be there when the model is loaded.
            config["balance"] = (
                [len(stage.layers) for stage in self._pipeline.stages]
                if self._pipeline is not None
                else "parameters"
            )
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        if isinstance(config["schedule"], dict):
            config["schedule"] = Schedule(**config["schedule"])
        build_input_shape = config.pop("build_input_shape", None)
        config["layers"] = [
            keras.saving.deserialize_keras_object(
                layer, custom_objects=custom_objects
            )
            for layer in config["layers"]
        ]
        config.pop("dtype", None)
        model = cls(**config)
        if build_input_shape and model._functional is None:
            model.build(build_input_shape)
        return model

    def _maybe_rebuild(self):
        # Layers are added one by one: wait until stages can be formed.
        try:
            self._resolve()
        except ValueError:
            self.built = False
            self._functional = None
            return
        super()._maybe_rebuild()

    def _place(self, inputs: Any) -> None:
        """Forms the stages and puts the weights on their devices."""
        layers = self.layers
        self._inputs = inputs
        config = self._resolve()
        counts = config.layer_counts(layers, inputs)
        stages: list[Stage] = []
        for k, devices in enumerate(config.devices):
            first = sum(counts[:k])
            stages.append(
                Stage(k, devices, layers[first : first + counts[k]], stages)
            )
            with self._strategy_scope():
                for variable in stages[k].owned:
                    placement.place(variable, devices)
        abstract.forget(v for stage in stages for v in stage.variables)
        self._pipeline = Pipeline(
            tuple(stages),
            config.schedule,
            config.remat,
            state.global_seed(),
        )

    def _build_for(self, inputs: Any) -> None:
        """Builds the layers for inputs of any nested structure."""
        if not self.layers:
            raise ValueError(
                f"Model '{self.name}' has no layers. Call `model.add(layer)`."
            )
        self._resolve()
        if isinstance(inputs, (tf.Tensor, keras.KerasTensor)):
            shape = tuple(inputs.shape)
            self.build((None, *shape[1:]))
        if self._pipeline is None:
            x = keras.tree.map_structure(
                lambda t: keras.KerasTensor(
                    (None, *t.shape[1:]),
                    keras.backend.standardize_dtype(t.dtype),
                ),
                inputs,
            )
            with abstract.no_values():
                try:
                    abstract.call(self.layers, x)
                except Exception as e:
                    self._name_layer(e, x)
                    raise
            self._place(x)
        self.built = True

    def _name_layer(self, error: Exception, x: Any) -> None:
        """Adds to an error of the build which layer and stage raised it.

        Found by going through the layers once more.
        """
        config = self._resolve()
        stages = ["a stage not yet known"] * len(self.layers)
        if isinstance(config.balance, list):
            stages = [
                f"stage {k} on {', '.join(devices)}"
                for k, devices in enumerate(config.devices)
                for _ in range(config.balance[k])
            ]
        for layer, stage in zip(self.layers, stages, strict=True):
            inputs = x
            try:
                x = layer(inputs)
            except Exception:
                name_layer(error, layer, stage, inputs)
                return

    def _resolve(self, config: PipelineConfig | None = None) -> ResolvedConfig:
        return (config or self._config).resolve(
            self.layers, self._distribute_strategy
        )

    def _strategy_scope(self) -> contextlib.AbstractContextManager:
        """Returns the scope of the strategy that the model was made under."""
        if self._distribute_strategy is None or tf.distribute.has_strategy():
            return contextlib.nullcontext()
        return self._distribute_strategy.scope()

    def _built_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            self._resolve()
            raise ValueError(
                f"Model '{self.name}' has no stages yet, because it has not "
                "been built. Give it an `Input` as its first layer, call "
                "`model.build(input_shape)`, or call it on data."
            )
        return self._pipeline

    def _pipeline_for(self, x: Any) -> tuple[Pipeline, Any]:
        x = keras.tree.map_structure(
            lambda t: t if tf.is_tensor(t) else keras.ops.convert_to_tensor(t),
            x,
        )
        if self._pipeline is None:
            self._build_for(x)
        if self._functional is not None:
            mask = getattr(x, "_keras_mask", None)
            x = self._functional._standardize_inputs(x)[0]
            if mask is not None:
                x._keras_mask = mask
        return self._built_pipeline(), x
