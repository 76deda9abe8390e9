"""What layers cost, by the measures that `balance` names."""

import math
import numbers
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.graph import Graph
from tf_gpipe.graph import Node
from tf_gpipe.partition import layer_graph
from tf_gpipe.schedule import Schedule

NAMES = ("parameters", "flops", "time", "memory")

_NUM_TIMINGS = 5


def check(balance: Any) -> None:
    """Raises a ValueError if `balance` neither names nor computes a cost."""
    if not callable(balance) and balance not in NAMES:
        raise ValueError(
            f"`balance` must be one of {list(NAMES)}, a function "
            "`cost(layer, input_shape)`, or a list of layer counts. "
            f"Received: balance={balance!r}"
        )


def of_nodes(
    balance: str | Callable,
    graph: Graph,
    device: str,
    remat: str,
    weights: Sequence[Sequence[keras.Variable]] | None = None,
) -> list[float]:
    """Returns the cost of each call of a layer.

    Args:
        balance: `"parameters"`; `"flops"`, the floating-point operations of
            the forward pass; `"time"`, the measured seconds of a forward and
            a backward pass; `"memory"`, the bytes of a layer's weights and
            their gradients and of what it keeps for the backward pass; or a
            function `cost(layer, input_shape)` that returns a number.
        graph: `Graph` of built layers; their variables need no values. Where
            the batch size of its inputs is unknown, it is taken for 1.
        device: String, where `"time"` measures.
        remat: The remat mode. What is recomputed is not kept for long, so
            with rematerialisation `"memory"` counts a layer's output alone.
        weights: List of the weights of each call that no earlier one has.
            Defaults to what the layers tell.

    Returns:
        List of non-negative numbers.

    Raises:
        ValueError: If a cost is negative or no number, or cannot be found.
    """
    layers = [node.layer for node in graph.nodes]
    weights = own_weights(layers) if weights is None else weights
    if balance == "parameters":
        return [sum(math.prod(w.shape) for w in own) for own in weights]
    inputs = [with_rows(value.spec, 1) for value in graph.inputs]
    if balance in ("flops", "memory"):
        graphs = layer_graph.trace(graph, inputs)
    if balance == "flops":
        return [x.forward_flops for x in graphs]
    if balance == "memory":
        return [
            2 * layer_graph.size_in_bytes(own)
            + x.output_bytes
            + (0 if remat == "always" else x.stored_bytes)
            for own, x in zip(weights, graphs, strict=True)
        ]
    # Without counting operations: these costs are for layers too whose
    # operations cannot be counted.
    given = []
    values = dict(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        given.append([values[value] for value in node.inputs])
        node.run(values, lambda layer: layer.compute_output_spec)
    if balance == "time":
        with tf.device(device):
            return [
                _seconds(node, contents)
                for node, contents in zip(graph.nodes, given, strict=True)
            ]
    assert callable(balance)
    costs = []
    for layer, contents in zip(layers, given, strict=True):
        shapes = [
            keras.tree.map_structure(lambda t: tuple(t.shape), x)
            for x in contents
        ]
        cost = balance(layer, shapes[0] if len(shapes) == 1 else shapes)
        if not isinstance(cost, numbers.Real) or not (
            0 <= float(cost) < math.inf
        ):
            raise ValueError(
                "The cost function given as `balance` must return a "
                f"non-negative number. Received: {cost!r} for layer "
                f"'{layer.name}'"
            )
        costs.append(float(cost))
    return costs


def of_stages(
    balance: str | Callable, schedule: Schedule, remat: str
) -> list[float]:
    """Returns how many times as much a layer costs in each stage.

    A stage that recomputes takes a third more time, so one that never does,
    such as the last one of `1f1b`, gets more layers. What a function given as
    `balance` measures is not known, and nothing is added to it.
    """
    if balance not in ("flops", "time"):
        return [1.0] * schedule.num_stages
    return [
        1 + schedule.recomputed_share(stage, remat) / 3
        for stage in range(schedule.num_stages)
    ]


def of_cuts(graph: Graph) -> list[int]:
    """Returns the bytes of a row that cross each place between two nodes."""
    return [
        sum(
            layer_graph.size_in_bytes(with_rows(value.spec, 1))
            for value in values
        )
        for values in graph.crossing()
    ]


def with_rows(inputs: Any, rows: int) -> Any:
    """Returns `KerasTensor`s with a batch size where there was none."""
    return keras.tree.map_structure(
        lambda x: keras.KerasTensor(
            tuple(n or rows for n in x.shape[:1]) + tuple(x.shape[1:]), x.dtype
        ),
        inputs,
    )


def own_weights(
    layers: Sequence[keras.Operation],
) -> list[list[keras.Variable]]:
    """Returns the weights of each layer that no earlier one has."""
    seen: set[int] = set()
    found = []
    for layer in layers:
        weights = getattr(layer, "weights", ())
        own = {id(w): w for w in weights if id(w) not in seen}
        seen.update(own)
        found.append(list(own.values()))
    return found


def _seconds(node: Node, contents: Sequence[Any]) -> float:
    """Returns the seconds of a forward and a backward pass.

    On made-up inputs and weights, so that nothing of the layer changes.
    """
    run = layer_graph.forward_and_backward(node)
    function = tf.function(lambda *args: run(*args)[1], autograph=False)
    seconds = []
    with layer_graph.naming(node):
        args = (
            keras.tree.map_structure(_made_up, list(contents)),
            [_made_up(v) for v in layer_graph.variables_of(node.layer)],
        )
        function(*args)
        for _ in range(_NUM_TIMINGS):
            start = time.perf_counter()
            for x in tf.nest.flatten(function(*args)):
                if x is not None:
                    tf.convert_to_tensor(x).numpy()  # waits for the device
            seconds.append(time.perf_counter() - start)
    # Whatever else the machine does only adds to it.
    return min(seconds)


def _made_up(like: Any) -> tf.Tensor:
    if None in like.shape:
        raise ValueError(f"the shape of '{like.name}' is not known")
    dtype = tf.as_dtype(like.dtype)
    if dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(like.shape, (0, 1)), dtype)
    return tf.zeros(like.shape, dtype)
