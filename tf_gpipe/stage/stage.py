"""A stage: consecutive calls of layers on one device a replica."""

import functools
from collections.abc import Callable
from collections.abc import Iterable
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
        # Without operations that are no layers, such as additions.
        self.layers: tuple[keras.Layer, ...] = tuple(
            {
                id(node.layer): node.layer
                for node in part.nodes
                if isinstance(node.layer, keras.Layer)
            }.values()
        )
        # Variables may also be arguments, as of an operation on a weight.
        self._arguments = [
            x
            for node in part.nodes
            for x in keras.tree.flatten((node.args, node.kwargs))
            if isinstance(x, keras.Variable)
        ]
        self.variables = self.used()
        elsewhere = {id(v) for stage in earlier for v in stage.variables}
        # Variables of layers that an earlier stage uses too live there. Their
        # values come in as tensors, sent once a step.
        self.borrowed = [v for v in self.variables if id(v) in elsewhere]
        self.owned = [v for v in self.variables if id(v) not in elsewhere]

    @property
    def device(self) -> str:
        """String, the device of this replica; outside of one, of the first."""
        return self.devices[replicas.current()]

    def count_params(self) -> int:
        """Returns the number of parameters that live on the stage's device."""
        weights = {id(w) for layer in self.layers for w in layer.weights}
        return sum(
            int(v.shape.num_elements()) for v in self.owned if id(v) in weights
        )

    def used(self) -> list[keras.Variable]:
        """Returns the variables that the layers have at the moment."""
        own = [v for layer in self.layers for v in layer.variables]
        return _unique([*own, *self._arguments])

    def waiting(self) -> list[keras.Variable]:
        """Returns the variables of metrics of layers that have no value yet.

        Keras leaves them out of a layer's variables.
        """
        found = [v for layer in self.layers for v in layer.metrics_variables]
        return [v for v in _unique(found) if not upstream.has_value(v)]

    def made_trainable(self) -> set[int]:
        """Returns the ids of weights, also of those that are frozen."""
        return {
            id(v)
            for layer in self.layers
            for x in upstream.layers_within(layer)
            for v in upstream.own_weights(x)
        }

    def trainable(self, variables: Sequence[keras.Variable]) -> list:
        """Returns those of some variables that training changes.

        As `keras.Model.trainable_variables` of a model that is not frozen
        itself, which asks variables: there may be one that is trained in a
        layer that is frozen. Tapes do not follow one that was not made to be.

        Args:
            variables: List of `keras.Variable`s.
        """
        return [v for v in variables if v.trainable and v.value.trainable]

    def __repr__(self) -> str:
        names = ", ".join(node.layer.name for node in self.nodes)
        return f"<Stage {self.index} on {', '.join(self.devices)}: {names}>"


class Activations(NamedTuple):
    """What travels from a stage to another one: tensors, and more.

    Keras attaches to a tensor its mask, and to the result of a softmax or a
    sigmoid the logits behind it, from which cross-entropies are taken. In
    graphs they also look for an operation `Softmax` or `Sigmoid`, whose input
    they take for logits.

    All fields are nested structures like `tensors`, with `None` where there
    is nothing.
    """

    tensors: Any
    masks: Any
    logits: Any  # attached by Keras
    before_softmax: Any  # inputs of operations, where Keras attached nothing
    before_sigmoid: Any

    @classmethod
    def of(cls, tensors: Any) -> "Activations":
        """Returns tensors with what Keras takes from beside them."""

        def before(operation: str) -> Any:
            return keras.tree.map_structure(
                lambda x: _input_of(x, operation), tensors
            )

        return cls(
            tensors,
            keras.tree.map_structure(upstream.mask, tensors),
            keras.tree.map_structure(upstream.logits, tensors),
            before("Softmax"),
            before("Sigmoid"),
        )

    def unpack(self) -> Any:
        """Returns the tensors, with what Keras takes from beside them."""

        def attach(x, mask, logits, before_softmax, before_sigmoid):
            if before_softmax is not None:
                x = tf.nn.softmax(before_softmax)
            elif before_sigmoid is not None:
                x = tf.nn.sigmoid(before_sigmoid)
            elif mask is not None or logits is not None:
                x = tf.identity(x)
            if mask is not None:
                upstream.set_mask(x, mask)
            if logits is not None:
                upstream.set_logits(x, logits)
            return x

        return keras.tree.map_structure(attach, *self)

    def parts(self) -> list[tf.Tensor]:
        """Returns all that may have a gradient, each tensor and its logits."""
        return [x for parts in self.by_tensor() for x in parts]

    def by_tensor(self) -> list[list[tf.Tensor]]:
        """Returns `parts()` in a list for each tensor."""
        tensors, _, *logits = map(keras.tree.flatten, self)
        return [
            [tensor, *(x for x in rest if x is not None)]
            for tensor, *rest in zip(tensors, *logits, strict=True)
        ]

    def with_parts(self, parts: Iterable[tf.Tensor]) -> "Activations":
        """Returns the same with other tensors in place of `parts()`."""
        rest = iter(parts)
        tensors, _, *logits = map(keras.tree.flatten, self)
        rows = [
            [
                next(rest) if i == 0 or x is not None else None
                for i, x in enumerate(each)
            ]
            for each in zip(tensors, *logits, strict=True)
        ]
        columns = [list(x) for x in zip(*rows, strict=True)] or [[]] * 4
        packed = [keras.tree.pack_sequence_as(self.tensors, x) for x in columns]
        return Activations(packed[0], self.masks, *packed[1:])

    def each(self) -> "list[Activations]":
        """Returns the elements of a tuple that the tensors are."""
        return [Activations(*x) for x in zip(*self, strict=True)]


def join(contents: Sequence[Activations]) -> Activations:
    """Returns the contents of several values as one: `each` undoes it."""
    fields = zip(*contents, strict=True)
    return Activations(*fields) if contents else Activations(*([()] * 5))


def _input_of(x: Any, operation: str) -> Any:
    """Returns the input of the operation of this name that made a tensor."""
    if (
        tf.is_symbolic_tensor(x)
        and x.op.type == operation
        and upstream.logits(x) is None
    ):
        return x.op.inputs[0]
    return None


class AddedLoss(NamedTuple):
    """Where a loss comes from that a layer has added."""

    node: Node  # the call of a layer
    place: int  # among the losses of the call
    layer: keras.Layer  # the layer, or one within it


# Runs a layer in place of its call, if it can: it is given the call, the
# contents of its inputs, to which it adds what the layer makes, and the scope
# that has the layer's state. Returns whether it has.
Instead = Callable[[Node, dict[Value, Any], keras.StatelessScope], bool]


def in_line(node: Node, values: dict, scope: keras.StatelessScope) -> bool:
    """The `Instead` that runs nothing: layers are called where they are."""
    del node, values, scope
    return False


def run_stage(
    stage: Stage,
    values: dict[Value, Any],
    training: bool | None,
    after: Callable[[Node], None] = lambda node: None,
    instead: Callable[[Node], bool] = lambda node: False,
) -> None:
    """Calls the layers of a stage, and names one that fails.

    What they make is added to `values`, which has the contents of the stage's
    inputs. `after` is called after each call of a layer, with its node, and
    `instead` before: the layer is not called if that returns `True`.
    """
    for node in stage.nodes:
        try:
            if not instead(node):
                node.run(values, functools.partial(in_mode, training=training))
        except Exception as e:
            where = f"stage {stage.index} on {stage.device}"
            name_layer(e, node.layer, where, *node.arguments(values)[0])
            raise
        after(node)
    _check_dense(stage, values)


def _check_dense(stage: Stage, values: dict[Value, Any]) -> None:
    """Refuses to hand on what is no dense tensor."""
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
    """Returns which layer has added a loss: one within `layer`, or itself."""
    _, *inner = upstream.layers_within(layer)
    for x in inner:
        if upstream.take_loss(x, loss):
            return x
    upstream.take_loss(layer, loss)
    return layer


def in_mode(layer: Any, training: bool | None) -> Callable:
    """Returns a layer as Keras calls it in training mode, or in inference."""

    def call(*args, **kwargs):
        # Also what a functional model has noted as the layer's default. And
        # layers that do not take it pass it on to those within them.
        if training is not None:
            kwargs["training"] = training
        # A layer may return a weight itself.
        return keras.tree.map_structure(_read, layer(*args, **kwargs))

    return call if isinstance(layer, keras.Layer) else layer


def name_layer(error: Exception, layer: Any, stage: str, *inputs: Any) -> None:
    """Adds to an error of a layer which one it is, and where."""
    shapes = keras.tree.map_structure(
        lambda t: tuple(getattr(t, "shape", ())), inputs
    )
    text = ", ".join(map(str, shapes))
    error.add_note(
        f"Raised by layer '{layer.name}' (of type {type(layer).__name__}) in "
        f"{stage}, called on inputs of shape {text}."
    )


def _read(x: Any) -> Any:
    is_variable = isinstance(x, (tf.Variable, keras.Variable))
    return tf.convert_to_tensor(x) if is_variable else x


def _unique(variables) -> list[keras.Variable]:
    return list({id(v): v for v in variables}.values())
