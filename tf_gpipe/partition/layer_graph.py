"""What calls of layers do and keep, found by tracing them without weights."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.graph import Graph
from tf_gpipe.graph import Node
from tf_gpipe.partition import flops
from tf_gpipe.stage import in_mode

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
    """What a call of a layer does and keeps for a micro-batch in training.

    Attributes:
        outputs: Nested structure of `KerasTensor`s with a batch size, what
            the layer returns.
        forward_flops: Integer, floating-point operations of the forward pass.
        backward_flops: Integer, those of the gradient by inputs and weights.
        stored_bytes: Integer, what the forward pass keeps for the backward
            pass beside the layer's inputs, outputs and weights.
        kept_inputs: Tuple with whether the backward pass needs each of
            `Node.inputs`.
        keeps_outputs: Boolean, whether it needs the outputs.
        output_bytes: Integer, the size of the outputs.
        largest_bytes: Integer, the size of the largest tensor in between.
    """

    outputs: Any
    forward_flops: int
    backward_flops: int
    stored_bytes: int
    kept_inputs: tuple[bool, ...]
    keeps_outputs: bool
    output_bytes: int
    largest_bytes: int


def trace(graph: Graph, inputs: Sequence[Any]) -> list[LayerGraph]:
    """Returns what each call of a layer does.

    Nothing is allocated or run. Layers of one configuration are traced once.

    Args:
        graph: `Graph` of built layers; their variables need no values.
        inputs: List with a nested structure of `KerasTensor`s, with a batch
            size, for each of the graph's inputs.

    Returns:
        List with a `LayerGraph` for each node.

    Raises:
        ValueError: If the costs of a layer cannot be found.
    """
    known: dict[str, LayerGraph] = {}
    graphs = []
    values = dict(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        contents = [values[value] for value in node.inputs]
        which = key(node, contents)
        if which not in known:
            with naming(node):
                known[which] = _trace(node, contents)
        graphs.append(known[which])
        values.update(node.contents(known[which].outputs))
    return graphs


@contextlib.contextmanager
def naming(node: Node) -> Iterator[None]:
    """Returns a scope whose errors say which layer has no cost."""
    try:
        yield
    except Exception as e:
        raise ValueError(
            f"The cost of layer '{node.layer.name}' (of type "
            f"{type(node.layer).__name__}) cannot be found: {e}. Give "
            "costs with a function `cost(layer, input_shape)`, or the split as "
            "a list of layer counts."
        ) from e


def size_in_bytes(tensors: Any) -> int:
    """Returns the size of the tensors in a nested structure."""
    return sum(
        math.prod(n or 1 for n in x.shape) * tf.as_dtype(x.dtype).size
        for x in keras.tree.flatten(tensors)
        if x is not None
    )


def variables_of(layer: keras.Operation) -> list[keras.Variable]:
    """Returns the variables of a layer; other operations have none."""
    return list(getattr(layer, "variables", ()))


def forward_and_backward(node: Node) -> Callable:
    """Returns a function that calls a layer on given values of its variables.

    It takes a list with the contents of `node.inputs` and a list of values
    for `variables_of(node.layer)`, and returns the outputs, and the gradients
    of their sum by the inputs and the weights. The layer's own variables stay
    as they are.
    """
    variables = variables_of(node.layer)
    weights = getattr(node.layer, "trainable_variables", ())
    trainable = {id(v) for v in weights}

    def run(contents: list, values: list) -> tuple[Any, list]:
        mapping = list(zip(variables, values, strict=True))
        args, kwargs = node.arguments(
            dict(zip(node.inputs, contents, strict=True))
        )
        sources = [
            x for x in keras.tree.flatten(contents) if x.dtype.is_floating
        ]
        sources += [x for v, x in mapping if id(v) in trainable]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            with keras.StatelessScope(
                mapping, collect_losses=True, initialize_variables=False
            ):
                outputs = in_mode(node.layer, training=True)(*args, **kwargs)
            targets = [
                x for x in keras.tree.flatten(outputs) if x.dtype.is_floating
            ]
        return outputs, tape.gradient(targets, sources)

    return run


def _trace(node: Node, contents: list) -> LayerGraph:
    outputs: Any = None
    run = forward_and_backward(node)

    def gradients(*args):
        nonlocal outputs
        outputs, found = run(*args)
        return found

    specs = keras.tree.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype), contents
    )
    values = [tf.TensorSpec(v.shape, v.dtype) for v in variables_of(node.layer)]
    graph = (
        tf.function(gradients, autograph=False)
        .get_concrete_function(specs, values)
        .graph
    )
    forward_ops = _before([x.op for x in keras.tree.flatten(outputs)])
    done = set(forward_ops)
    needed = _before([x.op for x in graph.outputs])
    kept = _kept(needed, done)
    placeholders = iter(x.name for x in graph.inputs)
    of_inputs = [
        {next(placeholders) for _ in keras.tree.flatten(x)} for x in contents
    ]
    of_weights = set(placeholders)
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
            if name not in of_outputs.union(of_weights, *of_inputs)
        ),
        kept_inputs=tuple(not own.isdisjoint(kept) for own in of_inputs),
        keeps_outputs=not of_outputs.isdisjoint(kept),
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


def key(node: Node, contents: Sequence[Any]) -> str:
    """Returns what decides the costs of a call: all but names.

    Args:
        node: The `Node`.
        contents: List with a nested structure of `KerasTensor`s for each of
            its inputs.
    """
    try:
        config = keras.saving.serialize_keras_object(node.layer)
    except Exception:  # whatever a layer's `get_config` raises
        config = id(node.layer)
    numbers = {value: f"input {i}" for i, value in enumerate(node.inputs)}
    structure = keras.tree.map_structure(
        lambda x: f"{x.dtype}{tuple(x.shape)}", list(contents)
    )
    return json.dumps(
        [
            id(type(node.layer)),
            _without_names(config),
            node.arguments(numbers),
            structure,
        ],
        default=str,
    )


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {k: _without_names(v) for k, v in config.items() if k != "name"}
    if isinstance(config, (list, tuple)):
        return [_without_names(x) for x in config]
    return config
