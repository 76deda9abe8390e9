"""FLOPs and bytes of layer calls, found by tracing them.

Variables are traced by shape and dtype: they need no values.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import progress
from tf_gpipe import upstream
from tf_gpipe.partition import cudnn
from tf_gpipe.partition import flops
from tf_gpipe.partition import uncounted
from tf_gpipe.partition.peak_memory import peak
from tf_gpipe.partition.tensor_memory import kept_bytes
from tf_gpipe.partition.tensor_memory import memory_owner
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.stage import likeness
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import NestedInput
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.reached import followed_values
from tf_gpipe.stage.reached import reached
from tf_gpipe.stage.stage import in_mode

Specs = dict[Value, Any]

# Operations that read only the shapes of their inputs, so keep no tensor alive.
_SHAPES = frozenset("Shape ShapeN Size Rank".split())
# Stands for every unknown size of a tensor except that of its batch axis.
NOMINAL_LENGTH = 128
# Rows of a micro-batch where the model's inputs do not fix the batch size.
NOMINAL_ROWS = 32

# From each graph to the results of `_trace` for it, by the `_key` of calls.
_of_graphs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# From the settings that traces depend on to the results for layers of Keras
# alone, in any graph, by the `_key` of calls. At this many all are forgotten.
_of_keras: dict[tuple, dict[Hashable, tuple]] = {}
_MOST_OF_KERAS = 1000


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """FLOPs and bytes of one layer call for a micro-batch in training."""

    forward_flops: int
    backward_flops: int  # of the gradients by inputs and by weights
    weight_flops: int  # the part of `backward_flops` for weights alone
    # Bytes kept from the forward to the backward pass, beside the layer's
    # inputs, outputs and weights.
    stored_bytes: int
    # Whether the backward pass reads each of `Node.inputs`, and the outputs.
    kept_inputs: tuple[bool, ...]
    keeps_outputs: bool
    output_bytes: int
    # Peak bytes of the tensors that live only during the backward pass: the
    # gradient of the outputs, intermediate tensors, and the gradients by
    # inputs and weights.
    temporary: int
    # Memory traffic and number of operations of the forward pass, of the
    # backward pass, and of the part of it for weights alone.
    forward: flops.Traffic = flops.Traffic()
    backward: flops.Traffic = flops.Traffic()
    by_weights: flops.Traffic = flops.Traffic()
    # Bytes of its `IndexedSlices`, such as the gradient of an embedding: each
    # micro-batch's are kept until the end of the step, as they are not summed.
    slices_bytes: int = 0
    # Whether it has a backward pass: not if nothing before it is trained.
    differentiated: bool = True

    def forward_alone(self) -> "LayerCosts":
        """Returns the costs of a call that has no backward pass."""
        return LayerCosts(
            self.forward_flops,
            backward_flops=0,
            weight_flops=0,
            stored_bytes=0,
            kept_inputs=(False,) * len(self.kept_inputs),
            keeps_outputs=False,
            output_bytes=self.output_bytes,
            temporary=0,
            forward=self.forward,
            differentiated=False,
        )


def rows_of(graph: Graph) -> int | None:
    """Returns the batch size that an input of the model fixes, or `None`."""
    specs = keras.tree.flatten([x.spec for x in graph.inputs])
    known = (x.shape[0] for x in specs if x is not None and x.shape)
    return next((n for n in known if n), None)


def rows_of_micro_batch(size: int | None, num_micro_batches: int) -> int:
    """Returns the rows of the largest micro-batch of a batch.

    Args:
        size: Integer, the batch size; `None`, if it is unknown, leads to
            `NOMINAL_ROWS`.
        num_micro_batches: Integer.
    """
    if size is None:
        return NOMINAL_ROWS
    return math.ceil(size / num_micro_batches)


def trace(
    graph: Graph, rows: int | None = None, length: int = NOMINAL_LENGTH
) -> tuple[list, Specs]:
    """Returns the `LayerCosts` of each call, and the specs of all values.

    Nothing is allocated or run: the layers must be built, but their variables
    need no values. The costs are cached for as long as the graph lives, those
    of Keras's own layers also for other graphs. For `rows` and `length` see
    `walk`.

    Raises:
        ValueError: If the costs of a layer cannot be found.
    """
    settings = upstream.settings_of_traces()
    shared = None
    if settings is not None:
        formats = keras.config.floatx(), keras.config.image_data_format()
        shared = _of_keras.setdefault((settings, formats), {})
        if len(shared) > _MOST_OF_KERAS:
            shared.clear()
    known = _of_graphs.setdefault(graph, {})
    found, specs = walk(graph, _trace, rows, length, known, shared)
    # Equal calls share one `LayerCosts`.
    alone = {id(x): x.forward_alone() for x in found}
    return [
        x if differentiated else alone[id(x)]
        for x, differentiated in zip(found, graph.differentiated(), strict=True)
    ], specs


def walk(
    graph: Graph,
    visit: Callable[[Node, Specs], tuple],
    rows: int | None = None,
    length: int = NOMINAL_LENGTH,
    known: dict[Hashable, tuple] | None = None,
    shared: dict[Hashable, tuple] | None = None,
) -> tuple[list, Specs]:
    """Visits each layer call of a graph, with the specs of its inputs.

    Equal calls (see `_key`) are visited once, so that a thousand equal blocks
    take no longer than one.

    Args:
        graph: `Graph` of built layers.
        visit: Function of a `Node` and a dictionary from `Value`s to specs.
            It returns a result of any kind and the specs of the outputs.
        rows: Integer, the batch size; by default that of the graph's inputs,
            or 1 where it is unknown.
        length: Integer, stands for all other unknown sizes, of the graph's
            inputs and of the outputs of layers.
        known: Dictionary from keys of calls to what `visit` returned, a cache
            that is read and added to.
        shared: Like `known`, for calls of Keras's own layers, in any graph.
            Defaults to `known`.

    Returns:
        List with the result of `visit` for each call, and a dictionary from
        all `Value`s to their specs.
    """
    known = {} if known is None else known
    shared = known if shared is None else shared
    specs = {
        value: _with_sizes(_with_rows(value.spec, rows), 1, length)
        for value in graph.inputs
    }
    tensors = keras.tree.flatten(list(specs.values()))
    batch = {n for x in tensors for n in x.shape[:1]}
    found = []
    for node in progress.track(graph.nodes, "looking at layers"):
        key, of_keras = _key(node, specs)
        cache = shared if of_keras else known
        one = cache.get(key)
        if one is None:
            one = cache[key] = visit(node, specs)
        result, outputs = one
        found.append(result)
        outputs = _with_sizes(outputs, max(batch, default=1), length)
        specs.update(node.contents(outputs))
    return found, specs


def _with_rows(spec: Any, rows: int | None) -> Any:
    """Returns a spec with the batch size `rows`; unchanged if it is `None`."""
    return keras.tree.map_structure(
        lambda x: keras.KerasTensor(
            (*(rows or n for n in x.shape[:1]), *x.shape[1:]), x.dtype
        ),
        spec,
    )


def _with_sizes(spec: Any, rows: int, length: int) -> Any:
    """Returns a spec with `rows` and `length` in place of unknown sizes."""

    def filled(x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor) or None not in x.shape:
            return x
        shape = [n or (length if i else rows) for i, n in enumerate(x.shape)]
        return keras.KerasTensor(shape, x.dtype)

    return keras.tree.map_structure(filled, spec)


def variables_of(layer: keras.Operation) -> list[keras.Variable]:
    """Returns the variables of a layer, none for other Keras operations."""
    return list(getattr(layer, "variables", ()))


def forward_and_backward(
    node: Node, gradient: Callable[[tf.Tensor], tf.Tensor] = tf.ones_like
) -> Callable:
    """Returns a function that runs a layer call and its backward pass.

    It takes a list with the contents of `node.inputs` and a list of values
    that stand for `variables_of(node.layer)`. It returns the outputs; the list
    of gradients by the floating-point inputs and the trainable variables; and
    the gradients of the outputs that these begin with, made by `gradient`. The
    layer's own variables are neither read nor changed.
    """
    variables = variables_of(node.layer)

    def run(contents: list, values: list) -> tuple[Any, list, list]:
        mapping = list(zip(variables, values, strict=True))
        args, kwargs = node.arguments(
            dict(zip(node.inputs, contents, strict=True))
        )
        sources = _floating(contents)
        # Each variable is asked, not the layer: a frozen layer may contain a
        # trainable one.
        sources += [x for v, x in mapping if v.trainable]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            with keras.StatelessScope(
                mapping, collect_losses=True, initialize_variables=False
            ):
                outputs = in_mode(node.layer, training=True)(*args, **kwargs)
            targets = _floating(outputs)
        arrived = list(map(gradient, targets))
        return outputs, tape.gradient(targets, sources, arrived), arrived

    return run


def _floating(tensors: Any) -> list:
    return [x for x in keras.tree.flatten(tensors) if x.dtype.is_floating]


def _trace(node: Node, specs: Specs) -> tuple[LayerCosts, Any]:
    """Returns the `LayerCosts` of a call, and the specs of its outputs."""
    with uncounted.naming(node):
        outputs: Any = None
        arrived: list = []
        by_inputs: list = []
        slices: list = []
        run = forward_and_backward(node)

        def gradients(*args):
            nonlocal outputs, arrived
            outputs, found, arrived = run(*args)
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
        # Tensors of the forward pass, inputs and weights included, that the
        # backward pass reads, by name.
        kept = {
            root.name: root
            for op in late
            if op.type not in _SHAPES
            for x in op.inputs
            if x.op in early or x.op.type == "Placeholder"
            for root in [memory_owner(x)]
        }
        names = iter(x.name for x in graph.inputs)
        of_inputs = [
            {next(names) for _ in keras.tree.flatten(x)} for x in contents
        ]
        of_outputs = {memory_owner(x).name for x in keras.tree.flatten(outputs)}
        elsewhere = of_outputs.union(names, *of_inputs)
        for_weights = late - _needed_by(by_inputs)
        # Layers of layers, such as residual blocks, mostly repeat. Then they
        # share a function, whose caller holds the gradient of the outputs to
        # its end.
        held = arrived if _has_layers(node.layer) else []
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
            temporary=peak(late, [*graph.outputs, *held]),
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


def _has_layers(layer: keras.Operation) -> bool:
    return (
        isinstance(layer, keras.Layer)
        and len(upstream.layers_within(layer)) > 1
    )


def _needed_by(tensors: Sequence[tf.Tensor]) -> set[tf.Operation]:
    """Returns the operations from which tensors are computed.

    The other operations of the graph cost nothing: TensorFlow prunes them.
    """
    return reached(
        [x.op for x in tensors],
        lambda op: [*(x.op for x in op.inputs), *op.control_inputs],
    )


def _key(node: Node, specs: Specs) -> tuple[Hashable, bool]:
    """Returns a key that is the same for calls with the same costs.

    They are calls of layers with equal attributes, on equal arguments: tensors
    of equal dtypes and shapes. The Boolean tells whether the key may outlive
    the layers: all their code is that of libraries.
    """
    numbers = {value: i for i, value in enumerate(node.inputs)}

    def described(x: Value | NestedInput) -> list:
        return [
            *((numbers[value], _described(specs[value])) for value in x.values),
            _described(x.content(specs)),
        ]

    layer = node.layer
    # Until it is built, a layer alone knows what it will train.
    trained = (
        [x.trainable for x in upstream.layers_within(layer)]
        if isinstance(layer, keras.Layer)
        else []
    )
    arguments = node.filled(described)
    found = likeness.of((layer, trained, arguments), in_costs=True)
    return found.form, found.of_keras


def _described(spec: Any) -> Any:
    return keras.tree.map_structure(
        lambda x: f"{x.dtype}{tuple(x.shape)}", spec
    )
