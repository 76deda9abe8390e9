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
    # A layer may raise any error, as where its weights have sizes that the
    # specs leave open. Then the first step raises an error, too.
    with upstream.losses_kept([layer]), contextlib.suppress(Exception):
        upstream.run_on_specs(layer)(*args, **kwargs)


def build(graph: Graph) -> None:
    """Builds the layers within the layers of a graph, by calls on specs.

    Their weights have no values yet.

    Args:
        graph: `Graph` of built layers whose specs are known.
    """
    with NoValues():
        for node in graph.nodes:
            if are_left(node.layer):
                specs = {x: x.spec for x in node.inputs}
                run(node.layer, *node.arguments(specs))
