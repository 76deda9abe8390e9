"""What calls of layers do and keep, found by tracing them without weights."""

import dataclasses
import json
import math
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import progress
from tf_gpipe import upstream
from tf_gpipe.partition import cudnn
from tf_gpipe.partition import flops
from tf_gpipe.partition import uncounted
from tf_gpipe.partition.passing import peak
from tf_gpipe.partition.tensor_memory import holder
from tf_gpipe.partition.tensor_memory import kept_bytes
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Taken
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.reached import followed_values
from tf_gpipe.stage.reached import reached
from tf_gpipe.stage.stage import in_mode

Specs = dict[Value, Any]

# Operations that need no more of their inputs than these shapes.
_SHAPES = frozenset("Shape ShapeN Size Rank".split())
# What a size that is not known counts as, but for the rows of a batch.
NOMINAL_LENGTH = 128
# The rows of a micro-batch where a model does not tell, and they matter.
NOMINAL_ROWS = 32

# What has been traced of a graph, by the keys of calls.
_traced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """What a call of a layer does and keeps for a micro-batch in training."""

    forward_flops: int
    backward_flops: int  # of the gradient by inputs and weights
    weight_flops: int  # those of them for weights alone
    # What it keeps beside the layer's inputs, outputs and weights.
    stored_bytes: int
    # Whether the backward pass needs each of `Node.inputs`, and the outputs.
    kept_inputs: tuple[bool, ...]
    keeps_outputs: bool
    output_bytes: int
    # What the backward pass needs only while it runs: the gradient that
    # arrives, and what it makes, those of the inputs and the weights included.
    passing: int
    # What the passes cost beside their arithmetic, and of the backward pass
    # that for weights alone.
    forward: flops.Traffic = flops.Traffic()
    backward: flops.Traffic = flops.Traffic()
    by_weights: flops.Traffic = flops.Traffic()
    # Its gradients of rows of weights, which no step adds up.
    slices_bytes: int = 0


def rows_of(graph: Graph) -> int | None:
    """Returns the size of a batch, if an input of the model tells it."""
    specs = keras.tree.flatten([x.spec for x in graph.inputs])
    known = (x.shape[0] for x in specs if x is not None and x.shape)
    return next((n for n in known if n), None)


def rows_of_micro_batch(size: int | None, num_micro_batches: int) -> int:
    """Returns the rows of a micro-batch of a batch of so many, or unknown."""
    if size is None:
        return NOMINAL_ROWS
    return math.ceil(size / num_micro_batches)


def trace(
    graph: Graph, rows: int | None = None, length: int = NOMINAL_LENGTH
) -> tuple[list, Specs]:
    """Returns the `LayerCosts` of each call, and the specs of all values.

    Nothing is allocated or run: the variables of the layers, which are built,
    need no values. What is traced is kept as long as the graph. `rows` and
    `length` are as of `walk`.

    Raises:
        ValueError: If the costs of a layer cannot be found.
    """
    known = _traced.setdefault(graph, {})
    return walk(graph, _trace, rows, length, known)


def walk(
    graph: Graph,
    visit: Callable[[Node, Specs], tuple],
    rows: int | None = None,
    length: int = NOMINAL_LENGTH,
    known: dict[str, tuple] | None = None,
) -> tuple[list, Specs]:
    """Returns what `visit` finds of each call, and the specs of all values.

    `visit` returns what it finds of a `Node` and the specs of its inputs, and
    what the layer returns. Of calls that do the same only one is visited, so
    that a thousand of them take no longer than one.

    Args:
        graph: `Graph` of built layers.
        visit: Function of a `Node` and a dictionary of specs.
        rows: Integer, the batch size; by default that of the graph's inputs,
            or 1 where it is not known.
        length: Integer, what other sizes count as that are not known, of the
            graph's inputs and of what layers return.
        known: Dictionary of what calls were found to do, which is added to.
    """
    known = {} if known is None else known
    specs = {
        value: _with_sizes(_with_rows(value.spec, rows), 1, length)
        for value in graph.inputs
    }
    tensors = keras.tree.flatten(list(specs.values()))
    batch = {n for x in tensors for n in x.shape[:1]}
    found = []
    for node in progress.track(graph.nodes, "looking at layers"):
        key = _key(node, specs)
        if key not in known:
            known[key] = visit(node, specs)
        result, outputs = known[key]
        found.append(result)
        outputs = _with_sizes(outputs, max(batch, default=1), length)
        specs.update(node.contents(outputs))
    return found, specs


def _with_rows(spec: Any, rows: int | None) -> Any:
    """Returns a spec for so many rows, or for its own."""
    return keras.tree.map_structure(
        lambda x: keras.KerasTensor(
            (*(rows or n for n in x.shape[:1]), *x.shape[1:]), x.dtype
        ),
        spec,
    )


def _with_sizes(spec: Any, rows: int, length: int) -> Any:
    """Returns a spec in which all sizes are known."""

    def filled(x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor) or None not in x.shape:
            return x
        shape = [n or (length if i else rows) for i, n in enumerate(x.shape)]
        return keras.KerasTensor(shape, x.dtype)

    return keras.tree.map_structure(filled, spec)


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

    def run(contents: list, values: list) -> tuple[Any, list]:
        mapping = list(zip(variables, values, strict=True))
        args, kwargs = node.arguments(
            dict(zip(node.inputs, contents, strict=True))
        )
        sources = _floating(contents)
        # Not by layer: within a frozen layer there may be a trained one.
        sources += [x for v, x in mapping if v.trainable]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            with keras.StatelessScope(
                mapping, collect_losses=True, initialize_variables=False
            ):
                outputs = in_mode(node.layer, training=True)(*args, **kwargs)
            targets = _floating(outputs)
        return outputs, tape.gradient(targets, sources)

    return run


def _floating(tensors: Any) -> list:
    return [x for x in keras.tree.flatten(tensors) if x.dtype.is_floating]


def _trace(node: Node, specs: Specs) -> tuple[LayerCosts, Any]:
    """Returns what a call does, and the specs of what the layer returns."""
    with uncounted.naming(node):
        outputs: Any = None
        by_inputs: list = []
        slices: list = []
        run = forward_and_backward(node)

        def gradients(*args):
            nonlocal outputs
            outputs, found = run(*args)
            count = len(_floating(args[0]))
            by_inputs.extend(x for x in found[:count] if x is not None)
            slices.extend(
                x for x in found[count:] if isinstance(x, tf.IndexedSlices)
            )
            return found

        contents, values = keras.tree.map_structure(
            lambda x: tf.TensorSpec(x.shape, x.dtype),
            ([specs[x] for x in node.inputs], variables_of(node.layer)),
        )
        graph = (
            tf.function(gradients, autograph=False)
            .get_concrete_function(contents, values)
            .graph
        )
        cudnn.tell_shapes(graph)
        early = _needed_by(keras.tree.flatten(outputs))
        late = _needed_by(graph.outputs) - early
        # What the backward pass takes from the forward pass, by name.
        kept = {
            root.name: root
            for op in late
            if op.type not in _SHAPES
            for x in op.inputs
            if x.op in early or x.op.type == "Placeholder"
            for root in [holder(x)]
        }
        names = iter(x.name for x in graph.inputs)
        of_inputs = [
            {next(names) for _ in keras.tree.flatten(x)} for x in contents
        ]
        of_outputs = {holder(x).name for x in keras.tree.flatten(outputs)}
        elsewhere = of_outputs.union(names, *of_inputs)
        for_weights = late - _needed_by(by_inputs)
        found = LayerCosts(
            forward_flops=flops.count(early),
            backward_flops=flops.count(late),
            weight_flops=flops.count(for_weights),
            stored_bytes=sum(
                kept_bytes(x)
                for name, x in kept.items()
                if name not in elsewhere
            ),
            kept_inputs=tuple(not own.isdisjoint(kept) for own in of_inputs),
            keeps_outputs=not of_outputs.isdisjoint(kept),
            output_bytes=size_in_bytes(outputs),
            passing=peak(late, graph.outputs),
            forward=flops.traffic(early),
            backward=flops.traffic(late),
            by_weights=flops.traffic(for_weights),
            slices_bytes=sum(
                size_in_bytes([x.values, x.indices])
                for x in slices
                if any(
                    op.type == "Placeholder"
                    for op in followed_values(x.indices)
                )
            ),
        )
        return found, keras.tree.map_structure(
            lambda x: keras.KerasTensor(
                x.shape, keras.backend.standardize_dtype(x.dtype)
            ),
            outputs,
        )


def _needed_by(tensors: Sequence[tf.Tensor]) -> set[tf.Operation]:
    """Returns the operations from which tensors are computed.

    TensorFlow drops all other operations of the graph.
    """
    return reached(
        [x.op for x in tensors],
        lambda op: [*(x.op for x in op.inputs), *op.control_inputs],
    )


def _key(node: Node, specs: Specs) -> str:
    """Returns a key that calls share which do the same: all but their names."""
    try:
        config = keras.saving.serialize_keras_object(node.layer)
    except Exception:  # whatever a layer's `get_config` raises
        config = id(node.layer)
    nameless = json.loads(
        json.dumps(config, default=str),
        # What has a name alone is a dtype policy.
        object_hook=lambda x: x if {*x} == {"name"} else {**x, "name": None},
    )
    numbers = {value: i for i, value in enumerate(node.inputs)}

    def described(x: Value | Taken) -> tuple:
        return (
            *(f"input {numbers[value]}" for value in x.values),
            keras.tree.map_structure(
                lambda x: f"{x.dtype}{tuple(x.shape)}",
                [x.content(specs), *(specs[value] for value in x.values)],
            ),
        )

    layer = node.layer
    parts = (
        upstream.layers_within(layer) if isinstance(layer, keras.Layer) else []
    )
    trained = [x.trainable for x in (*parts, *variables_of(layer))]
    return json.dumps(
        [id(type(node.layer)), nameless, trained, node.filled(described)],
        default=str,
    )
