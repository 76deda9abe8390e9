"""FLOPs and bytes of one layer call, from a trace with its backward pass.

Variables are traced by shape and dtype: they need no values.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.partition import cudnn
from tf_gpipe.partition import flops
from tf_gpipe.partition import uncounted
from tf_gpipe.partition.peak_memory import peak
from tf_gpipe.partition.tensor_memory import kept_bytes
from tf_gpipe.partition.tensor_memory import memory_owner
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.reached import followed_values
from tf_gpipe.stage.reached import reached
from tf_gpipe.stage.stage import in_mode

Specs = dict[Value, Any]

# Operations that read only the shapes of their inputs, so keep no tensor alive.
_SHAPES = frozenset("Shape ShapeN Size Rank".split())


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


def variables_of(layer: keras.Operation) -> list[keras.Variable]:
    """Returns the variables of a layer, none for other Keras operations."""
    return list(getattr(layer, "variables", ()))


def call_of(node: Node) -> Callable[[list], Any]:
    """Returns a function from the contents of `node.inputs` to the outputs."""

    def call(contents: list) -> Any:
        given = dict(zip(node.inputs, contents, strict=True))
        args, kwargs = node.arguments(given)
        return in_mode(node.layer, training=True)(*args, **kwargs)

    return call


def standing_for(
    variables: Sequence[keras.Variable], values: list
) -> keras.StatelessScope:
    """Returns a scope in which values stand for variables."""
    return keras.StatelessScope(
        zip(variables, values, strict=True),
        collect_losses=True,
        initialize_variables=False,
    )


def forward_and_backward(
    call: Callable[[list], Any],
    variables: Sequence[keras.Variable],
    sources: Callable[[list], list],
) -> Callable:
    """Returns a function that runs layers and their backward pass.

    It takes a list of contents for `call`; a list of values that stand for
    `variables`; and a function from each floating-point output to its gradient.
    It returns the outputs; the list of gradients by `sources(contents)` and the
    trainable variables; and the gradients of the outputs. The variables
    themselves are neither read nor changed.
    """

    def run(
        contents: list,
        values: list,
        gradient: Callable[[tf.Tensor], tf.Tensor] = tf.ones_like,
    ) -> tuple[Any, list, list]:
        pairs = zip(variables, values, strict=True)
        # Each variable is asked, not its layer: a frozen layer may contain a
        # trainable one.
        watched = sources(contents) + [x for v, x in pairs if v.trainable]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            with standing_for(variables, values):
                outputs = call(contents)
            targets = floating(outputs)
        arrived = list(map(gradient, targets))
        return outputs, tape.gradient(targets, watched, arrived), arrived

    return run


def floating(tensors: Any) -> list:
    """Returns the floating-point tensors of a nested structure."""
    return [x for x in keras.tree.flatten(tensors) if x.dtype.is_floating]


class _TracedCall(NamedTuple):
    """A graph of a layer call with its backward pass, and its tensors."""

    graph: Any
    inputs: list[list[tf.Tensor]]  # by value that the call takes
    weights: list[tf.Tensor]
    outputs: Any
    output_gradients: list[tf.Tensor]
    input_gradients: list[tf.Tensor]
    slices: list[tf.IndexedSlices]  # sparse gradients of weights


def trace_call(node: Node, specs: Specs) -> tuple[LayerCosts, Any]:
    """Returns the `LayerCosts` of a call, and the specs of its outputs."""
    with uncounted.naming(node):
        traced = _traced_call(node, specs)
        return _costs(node.layer, traced), keras.tree.map_structure(
            lambda x: keras.KerasTensor(
                x.shape, keras.backend.standardize_dtype(x.dtype)
            ),
            traced.outputs,
        )


def _traced_call(node: Node, specs: Specs) -> _TracedCall:
    run = forward_and_backward(
        call_of(node), variables_of(node.layer), floating
    )
    found: Any = None

    def gradients(*args):
        nonlocal found
        found = run(*args)
        return found[1]

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
    outputs, made, arrived = found
    count = len(floating(contents))
    given = iter(graph.inputs)
    return _TracedCall(
        graph,
        [[next(given) for _ in keras.tree.flatten(x)] for x in contents],
        list(given),
        outputs,
        arrived,
        [x for x in made[:count] if x is not None],
        [x for x in made[count:] if isinstance(x, tf.IndexedSlices)],
    )


def _costs(layer: keras.Operation, traced: _TracedCall) -> LayerCosts:
    graph, outputs = traced.graph, traced.outputs
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
    of_inputs = [{x.name for x in own} for own in traced.inputs]
    of_outputs = {memory_owner(x).name for x in keras.tree.flatten(outputs)}
    elsewhere = of_outputs.union((x.name for x in traced.weights), *of_inputs)
    for_weights = late - _needed_by(traced.input_gradients)
    # Layers of layers, such as residual blocks, mostly repeat. Then they share
    # a function, whose caller holds the gradient of the outputs to its end.
    has_layers = len(upstream.layers_within(layer)) > 1
    held = traced.output_gradients if has_layers else []
    return LayerCosts(
        forward_flops=flops.count(early),
        backward_flops=flops.count(late),
        weight_flops=flops.count(for_weights),
        stored_bytes=sum(
            kept_bytes(x) for name, x in kept.items() if name not in elsewhere
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
            for x in traced.slices
            if any(
                op.type == "Placeholder" for op in followed_values(x.indices)
            )
        ),
    )


def _needed_by(tensors: Sequence[tf.Tensor]) -> set[tf.Operation]:
    """Returns the operations from which tensors are computed.

    The other operations of the graph cost nothing: TensorFlow prunes them.
    """
    return reached(
        [x.op for x in tensors],
        lambda op: [*(x.op for x in op.inputs), *op.control_inputs],
    )
