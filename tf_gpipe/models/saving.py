"""Configs of pipelines in saved files, and the way back to plain Keras."""

import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.models import user_class
from tf_gpipe.partition import auto_remat
from tf_gpipe.partition.config import PipelineConfig
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage import call_overrides
from tf_gpipe.stage import no_values
from tf_gpipe.stage import seeds


class Saving(upstream.Mixin):
    """Mixin: `get_config`, `export`, and conversion to a plain Keras model.

    For a class with a `PipelineConfig` and a `Pipeline` or `None`, and with
    methods `_of_model` and `_of_layers`, which make it of the plain model or of
    a config.
    """

    def get_config(self):
        config = super().get_config()
        return config if self._keeps_class else {**config, **self._arguments()}

    def to_keras(self) -> keras.Model:
        """Returns the plain Keras model, with the same layers and weights.

        A `keras.Model`, a `keras.Sequential`, or one of the class that the
        pipeline keeps; not compiled. For serving, for export, and to go on
        without a pipeline. Its variables are those of the pipeline and stay
        on the devices of the stages: what trains one trains the other. For a
        copy on one device, give it to `keras.models.clone_model`, and the copy
        its weights.

        Returns:
            A `keras.Model`.

        Raises:
            ValueError: If the model has not been built.

        Example:

        >>> layers = [keras.Input((8,)), keras.layers.Dense(8)]
        >>> model = tf_gpipe.PipelinedSequential(layers, num_stages=1)
        >>> type(model.to_keras()) is keras.Sequential
        True
        """
        self._built_pipeline()
        with self._strategy_scope():
            return _plain_model(self)

    @functools.wraps(keras.Model.export)
    def export(self, filepath, *args, **kwargs):
        if any(call_overrides.overrides(self, x) for x in call_overrides.CALLS):
            # A plain model would not have the user's `call`.
            return super().export(filepath, *args, **kwargs)
        # Converters to other formats know the operations of layers, but not a
        # pipeline's function calls.
        return self.to_keras().export(filepath, *args, **kwargs)

    def _arguments(self) -> dict[str, Any]:
        """Returns the pipeline's arguments, in a form that JSON can hold."""
        config = dict(vars(self._config))
        if isinstance(config["schedule"], Schedule):
            config["schedule"] = config["schedule"].get_config()
        balance = config["balance"]
        if config["remat"] == AUTO_REMAT and auto_remat.cuts(balance):
            # The cut and the recomputed layers are chosen together, when the
            # loaded model is built: a saved cut would fix half of the choice.
            config["num_stages"] = self.num_stages
        elif balance is None or callable(balance):
            # Saved as layer counts: the user's function may not exist when the
            # model is loaded, and a loaded model keeps its stages.
            config["balance"] = None
            if self._pipeline is not None:
                config["balance"] = [
                    len(x.nodes) for x in self._pipeline.stages
                ]
        return config

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel" and self._pipeline is not None:
            # Seed states that the saved functions read; no layer tracks them.
            states = [*seeds.global_seed(), *self._pipeline.seeds.values()]
            children |= {
                f"_global_seed_{i}": v.value for i, v in enumerate(states)
            }
        return children

    @classmethod
    def from_config(cls, config, custom_objects=None):
        if cls._has_own_config(config):
            return cls(**config)
        config = cls._revived(config)
        if "model" not in config:
            return cls._of_layers(config, custom_objects)
        # The plain model of the user's class, without weight values.
        model, scope = no_values.built(
            lambda x: keras.saving.deserialize_keras_object(
                x, custom_objects=custom_objects
            ),
            config.pop("model"),
        )
        made = cls._of_model(model, **config)
        scope.finish(made)
        return made

    @classmethod
    def _has_own_config(cls, config: dict[str, Any]) -> bool:
        """Returns whether a config is of a subclass's own constructor alone.

        Its `get_config` then does not extend that of the pipeline.
        """
        return (
            isinstance(config, dict)
            and not {"schedule", "devices"} <= config.keys()
            and not call_overrides.is_ours(cls.__init__)
        )

    @staticmethod
    def _revived(config: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of a config with its `Schedule` and devices revived.

        Devices that do not exist here are replaced by devices that do.
        """
        if not isinstance(config, dict) or "schedule" not in config:
            raise not_a_config(config)
        config = dict(config)
        if isinstance(config["schedule"], dict):
            try:
                config["schedule"] = Schedule(**config["schedule"])
            except TypeError as error:
                raise not_a_config(config) from error
        fields: Any = {
            x.name: config.get(
                x.name, None if x.default is dataclasses.MISSING else x.default
            )
            for x in dataclasses.fields(PipelineConfig)
            if x.name != "devices"
        }
        strategy = None
        if tf.distribute.has_strategy():
            strategy = tf.distribute.get_strategy()
        # Of a class that is kept, the name is in the plain model's config.
        named = config.get("model", {}).get("config", config)
        config["devices"] = PipelineConfig(**fields, devices=None).devices_here(
            named.get("name", "model"), config.get("devices"), strategy
        )
        return config


def not_a_config(config: Any) -> ValueError:
    """Returns the error for a config that `get_config` cannot have made."""
    return ValueError(
        "`config` must be a dictionary that `get_config` of a pipeline "
        f"has returned. Received: config={config!r:.200}"
    )


def _plain_model(model: Any) -> keras.Model:
    """Returns a plain Keras model that shares a pipeline's layers and weights.

    Its class is the user's own if the pipeline keeps one, or else Keras's.
    """
    sequential = isinstance(model, keras.Sequential)
    base: Any = keras.Sequential if sequential else upstream.Functional
    cls: Any = user_class.without_pipeline(type(model))
    if not issubclass(cls, base):
        cls = base
    made = cls.__new__(cls)
    if sequential:
        # Includes the input layer, which `keras.Sequential.layers` leaves out.
        layers = keras.Model.layers.fget(model)
        base.__init__(made, layers, name=model.name)
    else:
        base.__init__(
            made,
            upstream.inputs_of(model),
            upstream.outputs_of(model),
            name=model.name,
        )
    user_class.carry(model, made)
    upstream.set_trainable_alone(made, model.trainable)
    upstream.count_as_called(made)
    return made
