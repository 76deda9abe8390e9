"""The cut of a graph into stages that cost nearly the same."""

import inspect
import math
import numbers
import timeit
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.checks import near
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import uncounted
from tf_gpipe.partition.contiguous import split
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node

_NAMES = ("parameters", "flops", "time", "memory")

_NUM_TIMINGS = 5


def check(balance: Any) -> None:
    """Refuses what neither names nor computes a cost, nor leaves it open.

    Raises:
        ValueError: If it is neither a name nor a function.
        TypeError: If it is a function of other arguments.
    """
    if balance is None:
        return
    if not callable(balance):
        if not isinstance(balance, str) or balance not in _NAMES:
            raise ValueError(expected(balance))
        return
    try:
        inspect.signature(balance).bind(None, None)
    except TypeError as error:
        raise TypeError(f"{expected(balance)} ({error})") from error
    except ValueError:
        pass  # Of a function that is not of Python.


def expected(balance: Any) -> str:
    """Returns what an error says of another `balance`."""
    return (
        f"`balance` must be one of {list(_NAMES)}, a function "
        "`cost(layer, input_shape)`, a list of layer counts, or None. "
        f"Received: balance={balance!r}{near([balance], _NAMES)}"
    )


def counts(
    balance: str | Callable | None,
    graph: Graph,
    schedule: Schedule,
    remat: str,
    device: str = "",
    weights: Sequence[Sequence[keras.Variable]] | None = None,
    tell: Callable = lambda *_: None,
    length: int = layer_costs.NOMINAL_LENGTH,
    costs: dict[str, list[float]] | None = None,
) -> list[int]:
    """Returns the number of calls of layers in each stage.

    Args:
        balance: `"parameters"`; `"flops"`, the floating-point operations of
            the forward pass; `"time"`, the measured seconds of a forward and
            a backward pass; `"memory"`, the bytes of a layer's weights and
            their gradients and of what it keeps for the backward pass; or a
            function `cost(layer, input_shape)` that returns a number. `None`
            is `"flops"`, or `"parameters"` where those of a layer cannot be
            found, or none has any.
        graph: `Graph` of built layers; their variables need no values. An
            unknown batch size of its inputs counts as 1.
        schedule: The `Schedule`, which tells what stages recompute.
        remat: The remat mode. Activations that are recomputed are kept only
            briefly, so that `"memory"` then counts a layer's output alone.
        device: The device on which `"time"` measures.
        weights: For each call, the weights that no earlier call uses. Defaults
            to those of the layers.
        tell: Function that is told the calls, how many each stage has, and a
            dictionary of what each of them costs, by what that is: first what
            was balanced, then what is known, too.
        length: Integer, what other sizes than that of a batch count as where
            they are not known.
        costs: What `costs_of_calls` returns for these arguments, if that is
            known.

    Raises:
        ValueError: If a cost is negative or no number, or cannot be found.
    """
    if schedule.num_stages == 1 and balance is None:
        return [len(graph.nodes)]
    if costs is None:
        costs = costs_of_calls(balance, graph, remat, device, weights, length)
    balanced = next(iter(costs))
    # A stage that recomputes takes a third more time, so that a stage that
    # never does, such as the last one of `1f1b`, gets more layers. What a
    # function given as `balance` measures is unknown: its costs stay as they
    # are.
    factors = None
    if balanced in ("flops", "time"):
        factors = [
            1 + schedule.recomputed_share(stage, remat) / 3
            for stage in range(schedule.num_stages)
        ]
    found = split(
        costs[balanced],
        schedule.num_stages,
        [
            layer_costs.size_in_bytes([value.spec for value in values])
            for values in graph.crossing()
        ],
        factors,
    )
    tell(graph.nodes, found, costs)
    return found


def costs_of_calls(
    balance: Any,
    graph: Graph,
    remat: str,
    device: str = "",
    weights: Sequence[Sequence[keras.Variable]] | None = None,
    length: int = layer_costs.NOMINAL_LENGTH,
) -> dict[str, list[float]]:
    """Returns the cost of each call of a layer, by what that is.

    First what is balanced, then what is known, too. The arguments are as of
    `counts`.
    """
    if weights is None:
        weights = weights_of_calls(graph)
    if balance is None:
        try:
            found = costs_of_calls(
                "flops", graph, remat, device, weights, length
            )
        except ValueError:
            found = {}
        if any(found.get("flops", ())):
            return found
        balance = "parameters"
    if balance == "parameters":
        sizes = [sum(math.prod(w.shape) for w in own) for own in weights]
        return {balance: sizes}
    if balance in ("flops", "memory"):
        traces, _ = layer_costs.trace(graph, length=length)
        rows = 1
        if balance != "memory" and not layer_costs.rows_of(graph):
            # For what is told of it: of one row weights would seem to be all.
            rows = layer_costs.NOMINAL_ROWS
        memory = [
            2 * layer_costs.size_in_bytes(own)
            + rows * x.output_bytes
            + (0 if remat == "always" else rows * x.stored_bytes)
            for own, x in zip(weights, traces, strict=True)
        ]
        found = {"flops": [x.forward_flops for x in traces], "memory": memory}
        return {balance: found[balance], **found}
    # Operations are not counted here: layers whose operations cannot be
    # counted have these costs, too.
    _, contents = layer_costs.walk(graph, specs_of, length=length)
    calls = [
        (node, [contents[value] for value in node.inputs])
        for node in graph.nodes
    ]
    if balance == "time":
        with tf.device(device):
            return {balance: [seconds(*call) for call in calls]}
    return {"cost": [_asked(balance, *call) for call in calls]}


def specs_of(node: Node, specs: dict) -> tuple[None, Any]:
    """Returns nothing of a call, and what its layer tells that it returns."""
    args, kwargs = node.arguments(specs)
    with uncounted.naming(node):
        return None, node.layer.compute_output_spec(*args, **kwargs)


def weights_of_calls(graph: Graph) -> list[list[keras.Variable]]:
    """Returns, for each call, the weights that no earlier call uses."""
    seen: set[int] = set()
    found = []
    for node in graph.nodes:
        weights = getattr(node.layer, "weights", ())
        own = {id(w): w for w in weights if id(w) not in seen}
        seen.update(own)
        found.append(list(own.values()))
    return found


def _asked(balance: Callable, node: Node, contents: list) -> float:
    """Returns the costs that a function given as `balance` returns."""
    shapes = [
        keras.tree.map_structure(lambda t: tuple(t.shape), x) for x in contents
    ]
    cost = balance(node.layer, shapes[0] if len(shapes) == 1 else shapes)
    if not isinstance(cost, numbers.Real) or not 0 <= float(cost) < math.inf:
        raise ValueError(
            "The cost function given as `balance` must return a "
            f"non-negative number. Received: {cost!r} for layer "
            f"'{node.layer.name}'"
        )
    return float(cost)


def seconds(node: Node, contents: list, backward: bool = True) -> float:
    """Returns the seconds of a forward and, if asked, a backward pass.

    On the current device. Inputs and weights are made up, so that nothing of
    the layer changes.
    """
    run = layer_costs.forward_and_backward(node)
    function = tf.function(
        lambda *args: run(*args)[1 if backward else 0], autograph=False
    )
    with uncounted.naming(node):
        args = keras.tree.map_structure(
            _made_up, (contents, layer_costs.variables_of(node.layer))
        )

        def pass_and_wait() -> None:
            for x in tf.nest.flatten(function(*args)):
                if x is not None:
                    tf.convert_to_tensor(x).numpy()

        pass_and_wait()  # traces
        # The least: whatever else the machine does only adds to the time.
        return min(timeit.repeat(pass_and_wait, number=1, repeat=_NUM_TIMINGS))


def _made_up(like: Any) -> tf.Tensor:
    if None in like.shape:
        raise ValueError(f"the shape of '{like.name}' is not known")
    dtype = tf.as_dtype(like.dtype)
    if dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(like.shape, (0, 1)), dtype)
    return tf.zeros(like.shape, dtype)
