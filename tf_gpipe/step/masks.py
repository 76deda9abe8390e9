"""Keras masks of outputs, computed before the outputs."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe.stage.activations import join
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.loops import retraced
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.structures import filled
from tf_gpipe.stage.structures import tensors
from tf_gpipe.stage.traced_function import TracedFunction
from tf_gpipe.step.exchange import Exchange
from tf_gpipe.step.state import StateVersions


def masks_ahead(
    pipeline: Pipeline,
    functions: Sequence[StageFunction],
    exchange: Exchange,
    versions: StateVersions,
    num_micro_batches: int,
) -> list[Any]:
    """Returns the masks of the outputs of each micro-batch, nested like these.

    A masked loss divides by the unmasked values of the whole mini-batch; 1F1B
    needs that number before the last forward pass. Masks mostly depend on
    inputs alone; the operations that make them are run once more, here.
    `keras.random` gives the same numbers as in the forward tasks.

    Raises:
        ValueError: If masks may be others when they are computed again, as by
            other random numbers or by Python.
    """
    stages = pipeline.stages
    device = stages[0].device
    states = {id(v): v for f in functions for v in f.carried}

    def given(m: int) -> tuple:
        return (
            [exchange.value(x, device, m) for x in pipeline.graph.inputs],
            [versions.start(v, m, device) for v in states.values()],
        )

    def masks(inputs: list, values: list) -> Any:
        made = dict(zip(pipeline.graph.inputs, inputs, strict=True))
        state = dict(zip(states, values, strict=True))
        for stage, function in zip(stages, functions, strict=True):
            result = function(
                join([made[x] for x in stage.inputs]),
                [state[id(v)] for v in function.carried],
            )
            made.update(zip(stage.outputs, result.outputs.each(), strict=True))
            state.update(
                zip(map(id, function.updated), result.updates, strict=True)
            )
        return pipeline.packed(result.outputs).masks

    of_each = [given(m) for m in range(num_micro_batches)]
    traced_masks = tf.function(masks, autograph=False)
    concrete = retraced(lambda: traced_masks.get_concrete_function(*of_each[0]))
    feeds = concrete.inputs[: len(tensors(of_each[0]))]
    traced = TracedFunction(concrete, feeds)
    for op in traced.unrepeatable(traced.makers(concrete.outputs)):
        raise ValueError(
            "A Keras mask of the model's outputs may be another one when it "
            f"is computed again, by operation '{op.name}' of type {op.type}. "
            "So it is not known what a loss divides by before all forward "
            "passes are done. Use schedule='gpipe'; or, where the mask is "
            "random, draw it with `keras.random` and a "
            "`keras.random.SeedGenerator`."
        )
    part = traced.extract(feeds, concrete.outputs)
    return [
        filled(concrete.structured_outputs, part(tensors(each)))
        for each in of_each
    ]
