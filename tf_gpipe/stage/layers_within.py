"""Layers within layers that Keras builds only as they run.

As the `PReLU` of `Dense(8, activation=PReLU())`: a layer with a `build` of its
own and a `compute_output_shape` does not run before the first step, so that
layers which its `build` leaves out have no weights until then. A stage must own
its weights, and an optimizer have their slots, before a step is traced.
"""

import contextlib
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.no_values import NoValues


def are_left(layer: keras.Operation) -> bool:
    """Returns whether a layer that is built has layers within that are not."""
    return any(map(upstream.is_to_be_built, upstream.layers_within(layer)))


def run(layer: keras.Layer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Builds the layers within a layer, by a call on specs.

    Args:
        layer: The layer.
        args: Tuple, the arguments of the call, with `KerasTensor`s.
        kwargs: Dictionary, its keyword arguments, likewise.
    """
    # A layer may raise any error: that of the first step is told then.
    with upstream.losses_kept([layer]), contextlib.suppress(Exception):
        upstream.run_on_specs(layer)(*args, **kwargs)


def build(graph: Graph) -> None:
    """Builds the layers within the layers of a graph, by calls on specs.

    Weights that come of it have values, as all others of the graph, except
    within a scope that makes weights without values.

    Args:
        graph: `Graph` of built layers whose specs are known.
    """
    nodes = [node for node in graph.nodes if are_left(node.layer)]
    if not nodes:
        return
    layers = [x for node in nodes for x in upstream.layers_within(node.layer)]
    before = {id(v) for layer in layers for v in layer.variables}
    specs = {x: x.spec for node in nodes for x in node.inputs}
    with NoValues() as scope:
        for node in nodes:
            run(node.layer, *node.arguments(specs))
    if upstream.within_stateless_scope():
        return
    now = {id(v): v for layer in layers for v in layer.variables}
    made = [v for key, v in now.items() if key not in before]
    for variable in made:
        upstream.give_value(variable)
    upstream.forget_waiting(made)
    scope.assign()
