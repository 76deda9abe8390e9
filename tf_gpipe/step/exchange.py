"""Activations and gradients that are sent between stages."""

import functools
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.activations import join
from tf_gpipe.stage.gradients import add
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.step.micro_batch import Split

# A value, and the index of one of its parts in `Activations.parts()`.
_Part = tuple[Value, int]


class Exchange:
    """The activations and gradients of a mini-batch, sent between stages.

    A tensor goes directly from the stage that makes it to every stage that
    uses it, and TensorFlow sends it once to each device. Its gradients return
    the same way: those of stages on one device are summed there, and the sums
    of several devices on the device of the stage that made the tensor.

        stage 0 ---> stage 1 ---> stage 2        activations
           '-------- a skip --------^

    Args:
        pipeline: A `Pipeline`.
        split: `Split` of the mini-batch.
        inputs: For each input of the model a nested structure of tensors.
    """

    def __init__(self, pipeline: Pipeline, split: Split, inputs: Sequence[Any]):
        self._pipeline = pipeline
        self._split = split
        self._model_inputs = dict(
            zip(pipeline.graph.inputs, inputs, strict=True)
        )
        self._stage_outputs: dict[tuple[int, int], Activations] = {}
        # By value, micro-batch and device: activations that the device has.
        # For inputs of the model the device is "": all take the same tensors.
        self._received: dict[tuple[Value, int, str], Activations] = {}
        # By part and micro-batch: gradients by the device that made them.
        self._gradients: dict[tuple[_Part, int], dict[str, Any]] = {}
        self._num_parts = {
            value: len(Activations.of(x).parts())
            for value, x in self._model_inputs.items()
        }

    def inputs(self, k: int, m: int) -> Activations:
        """Returns the inputs of stage `k` for micro-batch `m`."""
        stage = self._pipeline.stages[k]
        found = [self.value(value, stage.device, m) for value in stage.inputs]
        return join(found)

    def put(self, k: int, m: int, outputs: Activations) -> None:
        """Records the outputs of stage `k` for micro-batch `m`."""
        self._stage_outputs[k, m] = outputs
        made = self._pipeline.stages[k].outputs
        for value, x in zip(made, outputs.each(), strict=True):
            self._num_parts[value] = len(x.parts())

    def outputs(self, m: int) -> Activations:
        """Returns the outputs of the last stage for micro-batch `m`."""
        return self._stage_outputs[self._pipeline.last, m]

    def first_finished(self) -> int:
        """Returns the index of the last stage's first finished micro-batch."""
        return next(
            m for k, m in self._stage_outputs if k == self._pipeline.last
        )

    def put_gradients(self, k: int, m: int, gradients: Sequence) -> None:
        """Records the gradient or `None` of each part of stage `k`'s inputs."""
        stage = self._pipeline.stages[k]
        names = self._parts_of(stage.inputs)
        for x, gradient in zip(names, gradients, strict=True):
            by_device = self._gradients.setdefault((x, m), {})
            before = by_device.get(stage.device)
            by_device[stage.device] = add(before, gradient)

    def output_gradients(self, k: int, m: int) -> list[list]:
        """Returns the gradients of stage `k`'s outputs.

        A list for each part, with a gradient from each device that sent one.
        """
        stage = self._pipeline.stages[k]
        return [
            [
                self._sent(gradient, device, stage.device)
                for device, gradient in self._gradients.pop((x, m), {}).items()
            ]
            for x in self._parts_of(stage.outputs)
        ]

    def input_gradients(self) -> list:
        """Returns a gradient or `None` for each part of the inputs."""
        found: list = []
        for x in self._parts_of(self._pipeline.graph.inputs):
            parts = [
                total(self._gradients.pop((x, m), {}).values())
                for m in range(self._split.num_micro_batches)
            ]
            lacks = any(part is None for part in parts)
            found.append(None if lacks else self._split.merge(parts))
        return found

    def value(self, value: Value, device: str, m: int) -> Activations:
        """Returns a value of micro-batch `m` for a stage on `device`."""
        given = value in self._model_inputs
        key = value, m, "" if given else device
        if key not in self._received:
            if given:
                whole = Activations.of(self._model_inputs[value])
                if self._split.num_micro_batches > 1:
                    whole = whole.with_full_masks()
                parts = [self._split.take(x, m) for x in whole]
                self._received[key] = Activations(*parts)
            else:
                maker, i = self._pipeline.maker[value]
                made = self._stage_outputs[maker.index, m].each()[i]
                self._received[key] = made.with_parts(
                    self._sent(x, maker.device, device) for x in made.parts()
                )
        return self._received[key]

    def _parts_of(self, values: Iterable[Value]) -> list[_Part]:
        return [
            (value, i)
            for value in values
            for i in range(self._num_parts[value])
        ]

    def _sent(self, x: Any, sender: str, receiver: str) -> Any:
        """Returns a tensor as received: cast to `boundary_dtype` for the way.

        `x` may be `None`.
        """
        dtype = self._pipeline.boundary_dtype
        if (
            dtype is None
            or sender == receiver
            or x is None
            or not x.dtype.is_floating
            or x.dtype.size <= tf.as_dtype(dtype).size
        ):
            return x
        with tf.device(sender):
            narrow = tf.cast(x, dtype)
        with tf.device(receiver):
            return tf.cast(narrow, x.dtype)


def total(gradients: Iterable) -> Any:
    """Returns the sum of gradients, `None` if there are none."""
    return functools.reduce(add, gradients, None)
