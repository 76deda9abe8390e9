"""What a layer does and keeps, found by tracing it without its weights."""

import dataclasses
import json
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


@dataclasses.dataclass(frozen=True)
class LayerGraph:
    """What a layer does and keeps for one micro-batch in training.

    Attributes:
        outputs: Nested structure of `KerasTensor`s with a batch size.
        forward_flops: Integer, floating-point operations of the forward pass.
        backward_flops: Integer, those of the gradient by inputs and weights.
        stored_bytes: Integer, what the forward pass keeps for the backward
            pass beside the layer's inputs and weights.
        keeps_inputs: Boolean, whether the backward pass needs the inputs.
        output_bytes: Integer, the size of the outputs.
    """

    outputs: Any
    forward_flops: int
    backward_flops: int
    stored_bytes: int
    keeps_inputs: bool
    output_bytes: int


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
        key = _key(layer, inputs)
        if key not in known:
            try:
                known[key] = _trace(layer, inputs)
            except Exception as e:
                raise ValueError(
                    f"The cost of layer '{layer.name}' (of type "
                    f"{type(layer).__name__}) cannot be found: {e}. Give "
                    "costs with a function `cost(layer, input_shape)`, or "
                    "the split as a list of layer counts."
                ) from e
        graphs.append(known[key])
        inputs = known[key].outputs
    return graphs


def size_in_bytes(tensors: Any) -> int:
    """Returns the size of the tensors in a nested structure."""
    return sum(_bytes(x) for x in keras.tree.flatten(tensors) if x is not None)


def _trace(layer: keras.Layer, inputs: Any) -> LayerGraph:
    variables = layer.variables
    trainable = {id(v) for v in layer.trainable_variables}
    outputs: Any = None
    forward_ops: list[tf.Operation] = []

    def run(xs, values):
        nonlocal outputs, forward_ops
        graph = tf.compat.v1.get_default_graph()
        before = set(graph.get_operations())
        sources = [x for x in keras.tree.flatten(xs) if x.dtype.is_floating] + [
            value
            for v, value in zip(variables, values, strict=True)
            if id(v) in trainable
        ]
        mapping = list(zip(variables, values, strict=True))
        with tf.GradientTape() as tape:
            tape.watch(sources)
            with keras.StatelessScope(mapping, collect_losses=True):
                if layer._call_has_training_arg:
                    outputs = layer(xs, training=True)
                else:
                    outputs = layer(xs)
            targets = [
                x for x in keras.tree.flatten(outputs) if x.dtype.is_floating
            ]
        forward_ops = [x for x in graph.get_operations() if x not in before]
        return tape.gradient(
            targets,
            sources,
            output_gradients=[
                tf.compat.v1.placeholder(x.dtype, x.shape) for x in targets
            ],
        )

    specs = keras.tree.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype), inputs
    )
    values = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    concrete = tf.function(run, autograph=False).get_concrete_function(
        specs, values
    )
    graph = concrete.graph
    given = keras.tree.flatten(inputs)
    stored, kept_inputs = _stored(
        forward_ops,
        _needed(graph, forward_ops),
        {x.name for x in graph.inputs[: len(given)]},
        {x.name for x in graph.inputs[len(given) :]},
    )
    done = set(forward_ops)
    backward_ops = [x for x in _needed(graph, forward_ops) if x not in done]
    return LayerGraph(
        outputs=keras.tree.map_structure(
            lambda x: keras.KerasTensor(
                x.shape, keras.backend.standardize_dtype(x.dtype)
            ),
            outputs,
        ),
        forward_flops=flops.count(forward_ops),
        backward_flops=flops.count(backward_ops),
        stored_bytes=stored,
        keeps_inputs=kept_inputs,
        output_bytes=size_in_bytes(outputs),
    )


def _needed(
    graph: tf.Graph, forward_ops: Sequence[tf.Operation]
) -> list[tf.Operation]:
    """Returns the operations that the gradients need, of all that is traced.

    TensorFlow drops the rest from the graph.
    """
    waiting = [x.op for x in graph.outputs]
    found: dict[tf.Operation, None] = {}
    while waiting:
        op = waiting.pop()
        if op in found:
            continue
        found[op] = None
        waiting += [x.op for x in op.inputs]
        waiting += op.control_inputs
    return list(found)


def _stored(
    forward_ops: Sequence[tf.Operation],
    needed: Sequence[tf.Operation],
    inputs: set[str],
    weights: set[str],
) -> tuple[int, bool]:
    """Returns the bytes that wait for the backward pass, and if inputs do."""
    forward = set(forward_ops)
    kept: dict[str, tf.Tensor] = {}
    for op in needed:
        if op in forward:
            continue
        if op.type in ("Shape", "ShapeN", "Size", "Rank"):
            continue
        for x in op.inputs:
            if x.op in forward or x.name in inputs:
                root = _root(x)
                kept[root.name] = root
    keeps_inputs = any(name in inputs for name in kept)
    return (
        sum(
            _bytes(x)
            for name, x in kept.items()
            if name not in inputs and name not in weights
        ),
        keeps_inputs,
    )


def _root(x: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory `x` shares."""
    while x.op.type in _ALIASES:
        x = x.op.inputs[x.value_index if x.op.type == "IdentityN" else 0]
    return x


def _bytes(x: Any) -> int:
    dtype = tf.as_dtype(x.dtype)
    count = 1
    for n in x.shape:
        count *= n if n is not None else 1
    return count * dtype.size


def _key(layer: keras.Layer, inputs: Any) -> str:
    """Returns what decides a layer's costs: all but its names."""
    config = keras.saving.serialize_keras_object(layer)
    structure = keras.tree.map_structure(
        lambda x: f"{x.dtype}{tuple(x.shape)}", inputs
    )
    return json.dumps([_without_names(config), structure], default=str)


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {k: _without_names(v) for k, v in config.items() if k != "name"}
    if isinstance(config, (list, tuple)):
        return [_without_names(x) for x in config]
    return config
