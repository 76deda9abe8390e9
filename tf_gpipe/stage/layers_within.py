"""Layers within layers that Keras builds only as they run.

As the `PReLU` of `Dense(8, activation=PReLU())`: a layer with a `build` of its
own and a `compute_output_shape` does not run before the first step, so that
layers which its `build` leaves out have no weights until then. A stage must own
its weights, and an optimizer have their slots, before a step is traced.
"""

from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.no_values import NoValues


def are_left(layer: keras.Operation) -> bool:
    """Returns whether a layer that is built has layers within that are not."""
    return any(map(upstream.is_to_be_built, upstream.layers_within(layer)))


def run(
    layer: keras.Layer, args: tuple, kwargs: dict[str, Any]
) -> Exception | None:
    """Builds the layers within a layer, by a call on specs.

    Args:
        layer: The layer.
        args: Tuple, the arguments of the call, with `KerasTensor`s.
        kwargs: Dictionary, its keyword arguments, likewise.

    Returns:
        What the layer raised, if it did. The first step may tell it, too.
    """
    with upstream.losses_kept([layer]):
        try:
            upstream.run_on_specs(layer)(*args, **kwargs)
        except Exception as error:
            return error
    return None


def build(graph: Graph) -> None:
    """Builds the layers within the layers of a graph, by calls on specs.

    Their weights have no values yet.

    Args:
        graph: `Graph` of built layers whose specs are known.

    Raises:
        ValueError: If one cannot be built, and its input leaves sizes open.
    """
    left = [node for node in graph.nodes if are_left(node.layer)]
    if not left:
        return
    with NoValues():
        for node in left:
            specs = {x: x.spec for x in node.inputs}
            error = run(node.layer, *node.arguments(specs))
            shapes = [x.shape for x in specs.values()]
            is_open = any(None in shape[1:] for shape in shapes)
            if error is not None and is_open and are_left(node.layer):
                names = [
                    x.name
                    for x in upstream.layers_within(node.layer)
                    if upstream.is_to_be_built(x)
                ]
                raise ValueError(
                    f"Layer '{node.layer.name}' has layers within it that it "
                    f"builds only as it runs ({', '.join(names)}), and its "
                    f"input leaves sizes open: {shapes}. A stage must have all "
                    "its weights before the first step. Give `keras.Input` "
                    "all sizes, or call the layer on a batch before the "
                    "pipeline is made."
                ) from error
