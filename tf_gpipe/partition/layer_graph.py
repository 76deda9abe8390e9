"""What a layer does and keeps, found by tracing it without its weights."""

import dataclasses
import json
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.partition import flops

# Whose result shares the memory of their first input.
_ALIASES = frozenset(
    """Identity IdentityN Reshape Squeeze ExpandDims StopGradient
    PreventGradient EnsureShape""".split()
)
_BODIES = {
    "PartitionedCall": "f",
    "StatefulPartitionedCall": "f",
    "StatelessWhile": "body",
    "While": "body",
}
# Which need no more of their inputs.
_SHAPES = frozenset("Shape ShapeN Size Rank".split())


@dataclasses.dataclass(frozen=True)
class LayerGraph:
    """What a layer does and keeps for one micro-batch in training.

    Attributes:
        outputs: Nested structure of `KerasTensor`s with a batch size.
        forward_flops: Integer, floating-point operations of the forward pass.
        backward_flops: Integer, those of the gradient by inputs and weights.
        stored_bytes: Integer, what the forward pass keeps for the backward
            pass beside the layer's inputs, outputs and weights.
        keeps_inputs: Boolean, whether the backward pass needs the inputs.
        keeps_outputs: Boolean, whether it needs the outputs.
        input_bytes: Integer, the size of the inputs.
        output_bytes: Integer, the size of the outputs.
        largest_bytes: Integer, the size of the largest tensor in between.
    """

    outputs: Any
    forward_flops: int
    backward_flops: int
    stored_bytes: int
    keeps_inputs: bool
    keeps_outputs: bool
    input_bytes: int
    output_bytes: int
    largest_bytes: int


def trace(layers: Sequence[keras.Layer], inputs: Any) -> list[LayerGraph]:
    """Returns what each of some layers does, called one after another.

    Nothing is allocated or run. Layers of one configuration are traced once.

    Args:
        layers: List of built layers; their variables need no values.
        inputs: Nested structure of `KerasTensor`s, what the first layer is
            called on, with a batch size.

    Returns:
        List with a `LayerGraph` for each layer.

    Raises:
        ValueError: If the costs of a layer cannot be found.
    """
    known: dict[str, LayerGraph] = {}
    graphs = []
    for layer in layers:
        which = key(layer, inputs)
        if which not in known:
            try:
                known[which] = _trace(layer, inputs)
            except Exception as e:
                raise ValueError(
                    f"The cost of layer '{layer.name}' (of type "
                    f"{type(layer).__name__}) cannot be found: {e}. Give "
                    "costs with a function `cost(layer, input_shape)`, or "
                    "the split as a list of layer counts."
                ) from e
        graphs.append(known[which])
        inputs = known[which].outputs
    return graphs


def size_in_bytes(tensors: Any) -> int:
    """Returns the size of the tensors in a nested structure."""
    return sum(
        math.prod(n or 1 for n in x.shape) * tf.as_dtype(x.dtype).size
        for x in keras.tree.flatten(tensors)
        if x is not None
    )


def forward_and_backward(layer: keras.Layer) -> Callable:
    """Returns a function that runs a layer on given values of its variables.

    It takes a nested structure of inputs and a list of values for
    `layer.variables`, and returns the outputs, and the gradients of their sum
    by the inputs and the weights. The layer's own variables stay as they are.
    """
    variables = layer.variables
    trainable = {id(v) for v in layer.trainable_variables}

    def run(inputs: Any, values: list) -> tuple[Any, list]:
        mapping = list(zip(variables, values, strict=True))
        sources = [x for x in keras.tree.flatten(inputs) if x.dtype.is_floating]
        sources += [x for v, x in mapping if id(v) in trainable]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            with keras.StatelessScope(
                mapping, collect_losses=True, initialize_variables=False
            ):
                if layer._call_has_training_arg:
                    outputs = layer(inputs, training=True)
                else:
                    outputs = layer(inputs)
            targets = [
                x for x in keras.tree.flatten(outputs) if x.dtype.is_floating
            ]
        return outputs, tape.gradient(targets, sources)

    return run


def _trace(layer: keras.Layer, inputs: Any) -> LayerGraph:
    outputs: Any = None
    run = forward_and_backward(layer)

    def gradients(*args):
        nonlocal outputs
        outputs, found = run(*args)
        return found

    specs = keras.tree.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype), inputs
    )
    values = [tf.TensorSpec(v.shape, v.dtype) for v in layer.variables]
    graph = (
        tf.function(gradients, autograph=False)
        .get_concrete_function(specs, values)
        .graph
    )
    forward_ops = _before([x.op for x in keras.tree.flatten(outputs)])
    done = set(forward_ops)
    needed = _before([x.op for x in graph.outputs])
    kept = _kept(needed, done)
    num_inputs = len(keras.tree.flatten(inputs))
    of_inputs = {x.name for x in graph.inputs[:num_inputs]}
    of_weights = {x.name for x in graph.inputs[num_inputs:]}
    of_outputs = {_root(x).name for x in keras.tree.flatten(outputs)}
    return LayerGraph(
        outputs=keras.tree.map_structure(
            lambda x: keras.KerasTensor(
                x.shape, keras.backend.standardize_dtype(x.dtype)
            ),
            outputs,
        ),
        forward_flops=flops.count(forward_ops),
        backward_flops=flops.count(x for x in needed if x not in done),
        stored_bytes=sum(
            _kept_bytes(x)
            for name, x in kept.items()
            if name not in of_inputs | of_outputs | of_weights
        ),
        keeps_inputs=not of_inputs.isdisjoint(kept),
        keeps_outputs=not of_outputs.isdisjoint(kept),
        input_bytes=size_in_bytes(inputs),
        output_bytes=size_in_bytes(outputs),
        largest_bytes=max(
            (
                size_in_bytes(x)
                for op in forward_ops
                for x in op.outputs
                if x.dtype.is_floating and None not in x.shape.as_list()
            ),
            default=0,
        ),
    )


def _before(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns operations with all that they need.

    Whatever else is in the graph, TensorFlow drops.
    """
    waiting = list(operations)
    found: dict[tf.Operation, None] = {}
    while waiting:
        op = waiting.pop()
        if op not in found:
            found[op] = None
            waiting += [x.op for x in op.inputs]
            waiting += op.control_inputs
    return list(found)


def _kept(
    needed: Sequence[tf.Operation], forward_ops: set[tf.Operation]
) -> dict[str, tf.Tensor]:
    """Returns what the backward pass takes from the forward pass, by name."""
    kept: dict[str, tf.Tensor] = {}
    for op in needed:
        if op not in forward_ops and op.type not in _SHAPES:
            for x in op.inputs:
                if x.op in forward_ops or x.op.type == "Placeholder":
                    root = _root(x)
                    kept[root.name] = root
    return kept


def _root(x: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory `x` shares."""
    while (source := _source(x)) is not None:
        x = source
    return x


def _source(x: tf.Tensor) -> tf.Tensor | None:
    """Returns the input of `x`'s operation that is `x`, if one is."""
    op = x.op
    if op.type in _ALIASES:
        return op.inputs[x.value_index if op.type == "IdentityN" else 0]
    # Functions return what their gradients need, even what they are given.
    attribute = _BODIES.get(op.type)
    if attribute is None:
        return None
    name = op.get_attr(attribute).name
    body = op.graph._get_function(name).graph
    root = _root(body.outputs[x.value_index])
    for i, given in enumerate(body.inputs):
        # A loop's variable is its start only if no step changes it.
        if root is given and (attribute == "f" or i == x.value_index):
            return op.inputs[i]
    return None


def _kept_bytes(x: tf.Tensor) -> int:
    """Returns the size of a tensor, or of a loop's list with one a step."""
    if x.dtype != tf.variant or x.op.type not in ("While", "StatelessWhile"):
        return size_in_bytes(x)
    start = x.op.inputs[x.value_index]
    if start.op.type not in ("EmptyTensorList", "TensorListReserve"):
        return 0
    body = x.op.graph._get_function(x.op.get_attr("body").name).graph
    push = body.outputs[x.value_index].op
    if push.type == "Identity":
        push = push.inputs[0].op
    element = push.inputs[-1]
    return flops.iterations(x.op) * size_in_bytes(element)


def key(layer: keras.Layer, inputs: Any) -> str:
    """Returns what decides a layer's costs: all but its names."""
    try:
        config = keras.saving.serialize_keras_object(layer)
    except Exception:  # whatever a layer's `get_config` raises
        config = id(layer)
    structure = keras.tree.map_structure(
        lambda x: f"{x.dtype}{tuple(x.shape)}", inputs
    )
    return json.dumps(
        [id(type(layer)), _without_names(config), structure], default=str
    )


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {k: _without_names(v) for k, v in config.items() if k != "name"}
    if isinstance(config, (list, tuple)):
        return [_without_names(x) for x in config]
    return config
