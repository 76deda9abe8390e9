"""A stage: consecutive calls of layers on one device a replica."""

import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import replicas
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.graph import unique
from tf_gpipe.stage.graph import variables_of

FIXED_ROWS = (
    "A layer may be made for batches of one size, as by "
    "`keras.ops.reshape(x, (8, -1))`, and a micro-batch has some of a batch's "
    "rows. Take their number from `keras.ops.shape(x)[0]`, or use "
    "num_micro_batches=1."
)
_NOT_DENSE = (tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)


class Stage:
    """Consecutive calls of layers that one device of each replica runs.

    Attributes:
        index: Integer, the stage's place in the pipeline, from 0.
        scope: String, the scope of names in graphs, by which errors are
            placed.
        devices: List of TensorFlow device strings, one a replica.
        layers: Tuple of the Keras layers, each once.
        nodes: The calls of layers.
        inputs: The `Value`s that it takes.
        outputs: The `Value`s that it makes for other stages; of the last
            stage, those that the model returns.

    Example:

    >>> model = tf_gpipe.PipelinedSequential(
    ...     [keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)],
    ...     num_stages=2,
    ...     devices=["CPU:0", "CPU:0"],
    ... )
    >>> [(stage.index, stage.count_params()) for stage in model.stages]
    [(0, 72), (1, 9)]
    """

    def __init__(
        self,
        index: int,
        devices: Sequence[str],
        part: Graph,
        earlier: Sequence["Stage"],
    ):
        self.index = index
        self.scope = f"stage_{index}"
        self.devices = list(devices)
        self.nodes = part.nodes
        self.inputs = part.inputs
        self.outputs = part.outputs
        # Without Keras operations that are not layers, such as additions.
        layers = unique(node.layer for node in part.nodes)
        self.layers: tuple[keras.Layer, ...] = tuple(
            x for x in layers if isinstance(x, keras.Layer)
        )
        self.variables = self.used()
        elsewhere = {id(v) for stage in earlier for v in stage.variables}
        # Variables that an earlier stage uses too live on its device. Their
        # values are passed in as tensors, sent once per step.
        self.borrowed = [v for v in self.variables if id(v) in elsewhere]
        self.owned = [v for v in self.variables if id(v) not in elsewhere]

    @property
    def device(self) -> str:
        """String, the device in this replica; outside of one, the first."""
        return self.devices[replicas.current()]

    def count_params(self) -> int:
        """Returns the number of parameters that live on the stage's device."""
        weights = {id(w) for layer in self.layers for w in layer.weights}
        return sum(
            int(v.shape.num_elements()) for v in self.owned if id(v) in weights
        )

    def used(self) -> list[keras.Variable]:
        """Returns the variables that the layers have now, each once."""
        return variables_of(self.nodes)

    def waiting(self) -> list[keras.Variable]:
        """Returns the layers' metric variables that have no value yet.

        Keras leaves metric variables out of `Layer.variables`.
        """
        found = [v for layer in self.layers for v in layer.metrics_variables]
        return [v for v in unique(found) if not upstream.has_value(v)]

    def ids_of_weights(self) -> set[int]:
        """Returns the ids of the layers' own weights, frozen ones included."""
        return {
            id(v)
            for layer in self.layers
            for x in upstream.layers_within(layer)
            for v in upstream.own_weights(x)
        }

    def __repr__(self) -> str:
        names = ", ".join(node.layer.name for node in self.nodes)
        return f"<Stage {self.index} on {', '.join(self.devices)}: {names}>"


def trainable(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns those of a stage's variables that are trained.

    As `keras.Model.trainable_variables` does it for a model that is not frozen
    itself: it asks the variables, since a frozen layer may have a variable that
    is trained. Tapes do not watch a `tf.Variable` that was created as not
    trainable.
    """
    return [v for v in variables if v.trainable and v.value.trainable]


class AddedLoss(NamedTuple):
    """The origin of a loss that a layer has added."""

    node: Node  # the call of a layer
    place: int  # among the losses of the call
    layer: keras.Layer  # the layer, or one within it


# A function that may run a layer in place of its call. It takes the call, a
# dict from values to tensors, to which it adds the layer's results, and the
# scope that has the layer's state. It returns whether it has run the layer.
LayerRunner = Callable[[Node, dict[Value, Any], keras.StatelessScope], bool]


def run_stage(
    stage: Stage,
    values: dict[Value, Any],
    training: bool | None,
    instead: Callable[[Node], bool] = lambda node: False,
) -> Iterator[Node]:
    """Calls the layers of a stage, and adds a note to an error of a layer.

    A generator, which calls each layer when it is asked for the next node.

    Args:
        stage: The stage.
        values: Dict from values to tensors. It has the stage's inputs; the
            results of layers are added.
        training: `None` for Keras's default.
        instead: Function that is called with each node first. If it returns
            `True`, the layer is not called.

    Yields:
        Each node, after its call.
    """
    for node in stage.nodes:
        try:
            if not instead(node):
                run_node(node, values, training)
        except Exception as e:
            where = f"stage {stage.index} on {stage.device}"
            given = node.arguments(values)[0]
            name_layer(e, node.layer, where, *given)
            _name_declared(e, node.filled(lambda x: x.spec)[0], given)
            raise
        yield node
    _check_dense(stage, values)


def run_node(
    node: Node, values: dict[Value, Any], training: bool | None
) -> None:
    """Calls a layer with `training`, unless `None`; see `Node.run`."""
    node.run(values, functools.partial(in_mode, training=training))


def _check_dense(stage: Stage, values: dict[Value, Any]) -> None:
    """Raises an error if a stage would send a tensor that is not dense."""
    made_by = {value: node.layer for node in stage.nodes for value in node.made}
    for value in [x for x in stage.outputs if x in made_by]:
        for x in keras.tree.flatten(values[value]):
            if isinstance(x, _NOT_DENSE):
                layer = made_by[value]
                raise TypeError(
                    f"Stage {stage.index} on {stage.device} would hand on what "
                    "is no dense tensor. Received from layer "
                    f"'{layer.name}' (of type {type(layer).__name__}): a "
                    f"{type(x).__name__}. Make it dense; or keep the layers "
                    "that take it in the same stage, with `balance` a list of "
                    "layer counts."
                )


def adder(layer: keras.Layer, loss: tf.Tensor) -> keras.Layer:
    """Returns the layer that has added a loss: `layer` or one within it."""
    _, *inner = upstream.layers_within(layer)
    for x in inner:
        if upstream.take_loss(x, loss):
            return x
    upstream.take_loss(layer, loss)
    return layer


def in_mode(layer: Any, training: bool | None) -> Callable:
    """Returns a function that calls a layer with `training`, unless `None`."""

    def call(*args, **kwargs):
        # It overrides the argument that a functional model has noted for the
        # layer. Layers without this argument pass it on to layers within them.
        if training is not None:
            kwargs["training"] = training
        # A layer may return a variable in place of a tensor.
        return keras.tree.map_structure(_read, layer(*args, **kwargs))

    return call if isinstance(layer, keras.Layer) else layer


def name_layer(error: Exception, layer: Any, stage: str, *inputs: Any) -> None:
    """Adds a note to an error: its layer, stage and input shapes."""
    shapes = keras.tree.map_structure(
        lambda t: tuple(getattr(t, "shape", ())), inputs
    )
    text = ", ".join(map(str, shapes))
    error.add_note(
        f"Raised by layer '{layer.name}' (of type {type(layer).__name__}) in "
        f"{stage}, called on inputs of shape {text}."
    )


def _name_declared(error: Exception, specs: tuple, given: tuple) -> None:
    """Adds a note to an error if inputs have other rows than the specs."""
    for spec, x in zip(
        keras.tree.flatten(specs), keras.tree.flatten(given), strict=False
    ):
        if not (isinstance(spec, keras.KerasTensor) and tf.is_tensor(x)):
            continue
        rows = x.shape[0] if x.shape.rank else None
        if spec.shape and spec.shape[0] not in (None, rows):
            error.add_note(f"The model declares {spec.shape}. {FIXED_ROWS}")
            return


def _read(x: Any) -> Any:
    is_variable = isinstance(x, (tf.Variable, keras.Variable))
    return tf.convert_to_tensor(x) if is_variable else x
