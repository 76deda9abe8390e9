"""Warnings and errors about layers that make a cut uneven or cannot be cut."""

import warnings
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import ranges
from tf_gpipe.stage.graph import unique

# Smaller models gain nothing from a pipeline, however they are cut: no warning.
_MIN_PARAMETERS = 10_000
# The most layers that an error lists by name.
_NAMED = 5


def warn(
    name: str,
    nodes: Sequence[Node],
    counts: Sequence[int],
    costs: Mapping[str, Sequence[float]],
) -> None:
    """Warns if a stage has over twice its share of a cost, or over 95% of it.

    It warns about the first such cost only.

    Args:
        name: String, the model's name.
        nodes: The layer calls.
        counts: The number of calls in each stage.
        costs: Dictionary from the names of costs to the cost of each call,
            the balanced cost first.
    """
    size = sum(
        x.count_params()
        for x in unique(x.layer for x in nodes)
        if isinstance(x, keras.Layer) and x.built
    )
    if len(counts) < 2 or size < _MIN_PARAMETERS:
        return
    balanced = next(iter(costs))
    for what, of_calls in costs.items():
        told = _told(name, nodes, counts, what, of_calls, what == balanced)
        if told is not None:
            warnings.warn(told, stacklevel=2)
            return


def _told(
    name: str,
    nodes: Sequence[Node],
    counts: Sequence[int],
    what: str,
    costs: Sequence[float],
    balanced: bool,
) -> str | None:
    """Returns the warning about one cost, or `None` if it is even enough.

    Args:
        name: String, the model's name.
        nodes: The layer calls.
        counts: The number of calls in each stage.
        what: String, the name of the cost.
        costs: That cost of each call.
        balanced: Boolean, whether the cut balances this cost.
    """
    total = sum(costs)
    if total <= 0:
        return None
    stages = ranges(counts)
    of_stage = [sum(costs[stage]) for stage in stages]
    fullest = max(of_stage)
    if fullest <= min(2 * total / len(counts), 0.95 * total):
        return None
    k = of_stage.index(fullest)
    calls = range(len(costs))[stages[k]]
    place = max(calls, key=lambda i: costs[i])
    layer, most = nodes[place].layer, costs[place]
    if not balanced and most <= total / len(counts):
        # No single layer is to blame, so there is no advice to give. `Plan`
        # shows what each stage needs.
        return None
    waits = ": the others wait for it" if what != "memory" else ""
    repair = (
        f"Use num_stages={max(1, int(total / most))}, or make several layers "
        f"of it; or give another `balance`, or the cut itself, a list of layer "
        "counts."
    )
    if not balanced and most <= 2 * total / len(counts):
        repair = f"If that is too much, balance='{what}' is more even."
    return (
        f"Stage {k} of model '{name}' has {fullest / total:.0%} of the "
        f"{what}, where each of {len(counts)} stages should have "
        f"{1 / len(counts):.0%}{waits}. Layer '{layer.name}' (of type "
        f"{type(layer).__name__}) alone has {most / total:.0%}. "
        f"{_why(layer)} {repair}"
    )


def uncut(layers: Sequence[Any]) -> str:
    """Returns the end of an error message: which layers cannot be cut.

    It names the layer with the most layers in it, or else the first ones.
    """
    composite = [
        x
        for x in layers
        if isinstance(x, keras.Layer) and not upstream.runs_its_graph(x)
    ]
    if composite:
        layer = max(composite, key=lambda x: len(upstream.layers_within(x)))
        within = len(upstream.layers_within(layer)) - 1
        if within:
            return (
                f" Layer '{layer.name}' (of type {type(layer).__name__}) has "
                f"{within} layers in it, and counts as one. {_why(layer)}"
            )
    names = [f"'{x.name}'" for x in layers[:_NAMED]]
    more = ["..."] if len(layers) > _NAMED else []
    if not names:
        return ""
    return f" They are {', '.join(names + more)}; a layer is not cut."


def _why(layer: Any) -> str:
    if isinstance(layer, keras.Model):
        return (
            "It is a model that only its own methods know how to call, so "
            "that it is not cut: write it as a functional model, without a "
            "`call` of its own, for its layers to be cut like others."
        )
    return "A layer is not cut."
