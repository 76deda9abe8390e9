"""Forms the stages of a graph and puts their variables on devices."""

from collections.abc import Sequence

import keras

from tf_gpipe import upstream
from tf_gpipe.devices import placement
from tf_gpipe.models import refused
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.stage import Stage


def form_stages(
    graph: Graph, counts: Sequence[int], devices: Sequence[Sequence[str]]
) -> tuple[Stage, ...]:
    """Returns the stages of a graph. No variable is moved.

    Args:
        graph: `Graph` of built layers.
        counts: List of integers, the number of layer calls of each stage.
        devices: List with a list for each stage: its device in each replica.

    Raises:
        ValueError: If a stage cannot compute from micro-batches.
    """
    stages: list[Stage] = []
    for k, part in enumerate(graph.parts(counts)):
        stage = Stage(k, devices[k], part, stages)
        refused.check_stage(stage)
        stages.append(stage)
    return tuple(stages)


def put_on_devices(stages: Sequence[Stage]) -> None:
    """Moves the variables of stages to their stages' devices.

    Call it in the scope of the model's `tf.distribute` strategy.
    """
    # Not those of a `TFSMLayer`: the functions of a SavedModel always use the
    # variables that were loaded with it, never a moved copy.
    loaded = {
        id(variable)
        for stage in stages
        for layer in stage.layers
        for x in upstream.layers_within(layer)
        if isinstance(x, keras.layers.TFSMLayer)
        for variable in x.variables
    }
    # Collected before any is moved: if `rebalance` fails, the model is
    # unchanged.
    places = [
        (variable, stage.devices, id(variable) in weights)
        for stage in stages
        for weights in [stage.ids_of_weights()]
        for variable in (*stage.owned, *stage.waiting())
        if id(variable) not in loaded
    ]
    for place in places:
        placement.place(*place)
    upstream.forget_waiting(variable for variable, *_ in places)
