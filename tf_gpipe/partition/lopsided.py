"""What is said of layers that make a cut uneven, or that cannot be cut."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage.graph import Node

# Smaller models have nothing to gain from a pipeline, however they are cut.
_MIN_PARAMETERS = 10_000
_NAMED = 5


def warn(
    name: str,
    balance: Any,
    nodes: Sequence[Node],
    costs: Sequence[float],
    counts: Sequence[int],
) -> None:
    """Warns of a stage that has more than twice its share of the cost.

    Or, of two stages, of one that has nearly all.

    Args:
        name: Of the model.
        balance: What costs are of.
        nodes: The calls of layers.
        costs: What each of them costs.
        counts: How many of them each stage has.
    """
    total = sum(costs)
    layers = {id(x.layer): x.layer for x in nodes}.values()
    size = sum(
        x.count_params()
        for x in layers
        if isinstance(x, keras.Layer) and x.built
    )
    if len(counts) < 2 or total <= 0 or size < _MIN_PARAMETERS:
        return
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    stages = [
        range(end - count, end) for end, count in zip(ends, counts, strict=True)
    ]
    of_stage = [sum(costs[i] for i in stage) for stage in stages]
    fullest = max(of_stage)
    if fullest <= min(2 * total / len(counts), 0.95 * total):
        return
    k = of_stage.index(fullest)
    place = max(stages[k], key=lambda i: costs[i])
    layer, most = nodes[place].layer, costs[place]
    what = balance if isinstance(balance, str) else "cost"
    warnings.warn(
        f"Stage {k} of model '{name}' has {fullest / total:.0%} of the "
        f"{what}, where each of {len(counts)} stages should have "
        f"{1 / len(counts):.0%}: the others wait for it. Layer "
        f"'{layer.name}' (of type {type(layer).__name__}) alone has "
        f"{most / total:.0%}. {_why(layer)} Use "
        f"num_stages={max(1, int(total / most))}, or make several layers of "
        "it; or give another `balance`, or the cut itself, a list of layer "
        "counts.",
        stacklevel=2,
    )


def uncut(layers: Sequence[Any]) -> str:
    """Returns, for an error, which of some layers cannot be cut."""
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
