"""A stage: consecutive layers on one device a replica."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe import replicas


class Stage:
    """Consecutive layers that one device of each replica runs.

    Attributes:
        index: Integer, the stage's place in the pipeline.
        devices: List of TensorFlow devices, one a replica.
        device: String, that of the current replica; of the first one outside
            of replicas.
        layers: Tuple of the Keras layers.
    """

    def __init__(
        self,
        index: int,
        devices: Sequence[str],
        layers: Sequence[keras.Layer],
        earlier: Sequence["Stage"],
    ):
        self.index = index
        self.devices = list(devices)
        self.layers = tuple(layers)
        self.variables = _unique(v for x in layers for v in x.variables)
        elsewhere = {id(v) for stage in earlier for v in stage.variables}
        # Variables of layers that an earlier stage uses too live there. Their
        # values come in as tensors, sent once a step.
        self.borrowed = [v for v in self.variables if id(v) in elsewhere]
        self.owned = [v for v in self.variables if id(v) not in elsewhere]

    @property
    def device(self) -> str:
        return self.devices[replicas.current()]

    def count_params(self) -> int:
        """Returns the number of parameters that live on the stage's device."""
        weights = {id(w) for layer in self.layers for w in layer.weights}
        return sum(
            int(v.shape.num_elements()) for v in self.owned if id(v) in weights
        )

    def trainable(self, variables: Sequence[keras.Variable]) -> list:
        """Returns those of `variables` that training changes."""
        ids = {id(v) for x in self.layers for v in x.trainable_variables}
        return [v for v in variables if id(v) in ids]

    def __repr__(self) -> str:
        names = ", ".join(layer.name for layer in self.layers)
        return f"<Stage {self.index} on {', '.join(self.devices)}: {names}>"


class Activations(NamedTuple):
    """What travels from a stage to the next one."""

    tensors: Any  # nested structure
    masks: Any  # the Keras masks of `tensors`: same structure, None or tensor

    @classmethod
    def of(cls, tensors: Any) -> "Activations":
        """Returns tensors with the masks that Keras attached to them."""
        masks = keras.tree.map_structure(
            lambda x: getattr(x, "_keras_mask", None), tensors
        )
        return cls(tensors, masks)

    def unpack(self) -> Any:
        """Returns the tensors with their masks attached for Keras."""

        def attach(x, mask):
            if mask is None:
                return x
            x = tf.identity(x)
            x._keras_mask = mask
            return x

        return keras.tree.map_structure(attach, self.tensors, self.masks)


def call_layer(
    layer: keras.Layer, x: Any, training: bool | None, stage: Stage
) -> Any:
    """Calls a layer as `keras.Sequential` does, and names it on failure."""
    try:
        if layer._call_has_training_arg:
            return layer(x, training=training)
        return layer(x)
    except Exception as e:
        name_layer(e, layer, f"stage {stage.index} on {stage.device}", x)
        raise


def name_layer(
    error: Exception, layer: keras.Layer, stage: str, inputs: Any
) -> None:
    """Adds to an error of a layer which one it is, and where."""
    shapes = keras.tree.map_structure(
        lambda t: tuple(getattr(t, "shape", ())), inputs
    )
    error.add_note(
        f"Raised by layer '{layer.name}' (of type {type(layer).__name__}) in "
        f"{stage}, called on inputs of shape {shapes}."
    )


def _unique(variables) -> list[keras.Variable]:
    return list({id(v): v for v in variables}.values())
