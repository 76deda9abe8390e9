"""Stages of a graph, and their variables on their devices."""

from collections.abc import Sequence

import keras

from tf_gpipe import upstream
from tf_gpipe.devices import placement
from tf_gpipe.models import refused
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.stage import Stage


def stages_of(
    graph: Graph, counts: Sequence[int], devices: Sequence[Sequence[str]]
) -> tuple[Stage, ...]:
    """Returns the stages of a graph, which have the layers as they are.

    Args:
        graph: `Graph` of built layers.
        counts: List of integers, how many calls each stage has.
        devices: List of the devices of each stage, one a replica.

    Raises:
        ValueError: If one of the stages cannot be.
    """
    stages: list[Stage] = []
    for k, part in enumerate(graph.parts(counts)):
        stage = Stage(k, devices[k], part, stages)
        refused.check_stage(stage)
        stages.append(stage)
    return tuple(stages)


def put_on_devices(stages: Sequence[Stage]) -> None:
    """Puts the variables of stages on the devices of these.

    Call it in the scope of the model's `tf.distribute` strategy.
    """
    # The functions of a SavedModel use the variables that it was loaded with,
    # wherever others are made of them.
    loaded = {
        id(variable)
        for stage in stages
        for layer in stage.layers
        for x in upstream.layers_within(layer)
        if isinstance(x, keras.layers.TFSMLayer)
        for variable in x.variables
    }
    # All or none: what `rebalance` refuses leaves the model as it is.
    places = [
        (variable, stage.devices, id(variable) in weights)
        for stage in stages
        for weights in [stage.made_trainable()]
        for variable in (*stage.owned, *stage.waiting())
        if id(variable) not in loaded
    ]
    for place in places:
        placement.place(*place)
    upstream.forget_waiting(variable for variable, *_ in places)
