"""The cut of a graph into stages that cost nearly the same."""

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe.checks import near
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import measured_calls
from tf_gpipe.partition.contiguous import split
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node

_NAMES = ("parameters", "flops", "time", "memory")


def check(balance: Any) -> None:
    """Checks a `balance` that is no list: a name, a function or `None`.

    Raises:
        ValueError: If it is none of these.
        TypeError: If it is a function that does not take two arguments.
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
        pass  # Functions written in C may have no signature to check.


def expected(balance: Any) -> str:
    """Returns the error message for a wrong `balance`."""
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
    tell: Callable = lambda *_: None,
    length: int = layer_costs.NOMINAL_LENGTH,
    costs: dict[str, list[float]] | None = None,
) -> list[int]:
    """Returns the number of layer calls in each stage.

    Args:
        balance: `"parameters"`; `"flops"`, the floating-point operations of
            the forward pass; `"time"`, the measured seconds of a forward and
            a backward pass; `"memory"`, the bytes of a layer's weights and
            their gradients and of what it keeps for the backward pass; or a
            function `cost(layer, input_shape)` that returns a number. `None`
            is `"flops"`, or `"parameters"` where the operations of a layer
            cannot be counted, or no layer has any.
        graph: `Graph` of built layers; their variables need no values. An
            unknown batch size of its inputs counts as 1.
        schedule: The `Schedule`: how often a stage recomputes depends on it.
        remat: The remat mode. With `"always"`, stored activations live only
            briefly, so that `"memory"` counts a layer's output without them.
        device: The device on which `"time"` measures.
        tell: Function that is called with the list of calls, the number of
            calls in each stage, and the result of `costs_of_calls`.
        length: Integer, stands for unknown sizes other than the batch size.
        costs: The result of `costs_of_calls` for these arguments, if it is
            known.

    Raises:
        ValueError: If a cost is negative or no number, or cannot be found.
    """
    if schedule.num_stages == 1 and balance is None:
        return [len(graph.nodes)]
    if costs is None:
        costs = costs_of_calls(balance, graph, remat, device, length=length)
    balanced = next(iter(costs))
    # Recomputation makes a stage a third slower, so that a stage without it,
    # such as the last one of `1f1b`, gets more layers. The unit of a function
    # given as `balance` is unknown: its costs are not multiplied.
    factors = None
    if balanced in ("flops", "time"):
        factors = [
            1 + schedule.recomputed_share(stage, remat) / 3
            for stage in range(schedule.num_stages)
        ]
    found = split(
        costs[balanced],
        schedule.num_stages,
        graph.crossing(lambda value: size_in_bytes(value.spec)),
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
    """Returns the costs of the layer calls, by the name of the cost.

    The arguments are those of `counts`; and `weights`, for each call those that
    no earlier call uses, by default those of the layers.

    Returns:
        Dictionary from names such as `"flops"` to a list with the cost of each
        call. The first one is to be balanced; others were found on the way.
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
        if balance != "memory" and not graph.declared_rows:
            # Only `lopsided.warn` reads these: with activations of one row,
            # weights would seem to be all the memory.
            rows = layer_costs.NOMINAL_ROWS
        memory = [
            2 * size_in_bytes(own)
            + rows * x.output_bytes
            + (0 if remat == "always" else rows * x.stored_bytes)
            for own, x in zip(weights, traces, strict=True)
        ]
        found = {"flops": [x.forward_flops for x in traces], "memory": memory}
        return {balance: found[balance], **found}
    # Not `trace`: counting operations fails for some layers, which can still be
    # timed or given a cost.
    if balance == "time":
        visit = functools.partial(measured_calls.visit, device=device)
        return {balance: layer_costs.walk(graph, visit, length=length)[0]}
    _, contents = layer_costs.walk(graph, layer_costs.specs_of, length=length)
    return {
        "cost": [
            _asked(balance, node, [contents[value] for value in node.inputs])
            for node in graph.nodes
        ]
    }


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
    """Returns the cost of a call, from the user's function `balance`."""
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
