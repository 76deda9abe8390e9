"""What is said of layers that make a cut uneven, or that cannot be cut."""

import warnings
from collections.abc import Mapping
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
    nodes: Sequence[Node],
    counts: Sequence[int],
    costs: Mapping[str, Sequence[float]],
) -> None:
    """Warns of a stage that has more than twice its share of a cost.

    Or, of two stages, of one that has nearly all. It warns once.

    Args:
        name: Of the model.
        nodes: The calls of layers.
        counts: How many of them each stage has.
        costs: Dictionary of what each of them costs, by what that is, first
            what was balanced.
    """
    layers = {id(x.layer): x.layer for x in nodes}.values()
    size = sum(
        x.count_params()
        for x in layers
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
    """Returns what is to be said of a cost, if it was `balanced` or not."""
    total = sum(costs)
    if total <= 0:
        return None
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    stages = [
        range(end - count, end) for end, count in zip(ends, counts, strict=True)
    ]
    of_stage = [sum(costs[i] for i in stage) for stage in stages]
    fullest = max(of_stage)
    if fullest <= min(2 * total / len(counts), 0.95 * total):
        return None
    k = of_stage.index(fullest)
    place = max(stages[k], key=lambda i: costs[i])
    layer, most = nodes[place].layer, costs[place]
    if not balanced and most <= total / len(counts):
        # No layer makes it so: plans tell what each stage needs.
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
