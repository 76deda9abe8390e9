"""What stages hand to one another: activations forth, gradients back."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.gradients import add
from tf_gpipe.graph import Value
from tf_gpipe.micro_batch import Split
from tf_gpipe.pipeline import Pipeline
from tf_gpipe.stage import Activations


class Exchange:
    """What the stages of a pipeline make of a mini-batch for one another.

    A tensor goes straight from the stage that makes it to every stage that
    uses it, and TensorFlow sends it once a device. Gradients return the same
    way: what the stages of one device make is summed there, the rest on the
    device of the stage that made the tensor.

        stage 0 ---> stage 1 ---> stage 2        activations
           '-------- a skip --------^

    Args:
        pipeline: A `Pipeline`.
        split: `Split` of the mini-batch.
        inputs: List with the contents of each of the model's inputs.
    """

    def __init__(self, pipeline: Pipeline, split: Split, inputs: Sequence[Any]):
        self._pipeline = pipeline
        self._split = split
        self._given = dict(zip(pipeline.graph.inputs, inputs, strict=True))
        # What the model is given, cut into micro-batches where it is used.
        self._cut: dict[tuple[Value, str], list[Activations]] = {}
        self._made: dict[tuple[int, int], Activations] = {}
        # What a device has got from another one.
        self._received: dict[tuple[Value, int, str], Any] = {}
        # Flat gradients by value, micro-batch and device.
        self._gradients: dict[tuple[Value, int], dict[str, list]] = {}

    def inputs(self, k: int, m: int) -> Activations:
        """Returns what stage `k` takes of micro-batch `m`."""
        stage = self._pipeline.stages[k]
        found = [self._value(value, stage.device, m) for value in stage.inputs]
        return Activations(
            tuple(x.tensors for x in found), tuple(x.masks for x in found)
        )

    def put(self, k: int, m: int, outputs: Activations) -> None:
        """Takes what stage `k` has made of micro-batch `m`."""
        self._made[k, m] = outputs

    def outputs(self, m: int) -> Activations:
        """Returns what the last stage has made of micro-batch `m`."""
        return self._made[len(self._pipeline.stages) - 1, m]

    def put_gradients(self, k: int, m: int, gradients: Sequence) -> None:
        """Takes the gradients by what stage `k` took of micro-batch `m`.

        Args:
            k: Integer, the stage.
            m: Integer, the micro-batch.
            gradients: List with a gradient or `None` for each flat tensor.
        """
        stage = self._pipeline.stages[k]
        rest = list(gradients)
        for value in stage.inputs:
            size = len(keras.tree.flatten(value.spec))
            own, rest = rest[:size], rest[size:]
            by_device = self._gradients.setdefault((value, m), {})
            before = by_device.get(stage.device, [None] * size)
            by_device[stage.device] = _added(before, own)

    def back(self, k: int, m: int) -> list[list[list]]:
        """Returns the gradients by what stage `k` made of micro-batch `m`.

        Returns:
            List with, for each output, a list with the flat gradients that
            each device has sent. `total` sums them.
        """
        here = self._pipeline.stages[k].device
        return [
            [
                [self._sent(x, device, here) for x in part]
                for device, part in self._gradients.pop((value, m), {}).items()
            ]
            for value in self._pipeline.stages[k].outputs
        ]

    def total(self, k: int, arrived: list[list[list]]) -> list:
        """Returns a gradient or `None` for each flat output of stage `k`.

        Args:
            k: Integer, the stage.
            arrived: What `back` has returned.
        """
        flat: list = []
        for value, parts in zip(
            self._pipeline.stages[k].outputs, arrived, strict=True
        ):
            flat += _sum(value, parts)
        return flat

    def input_gradients(self) -> list:
        """Returns a gradient or `None` for each flat tensor of the inputs."""
        found = []
        for value in self._pipeline.graph.inputs:
            parts = [
                _sum(
                    value,
                    list(self._gradients.pop((value, m), {}).values()),
                )
                for m in range(self._split.num_micro_batches)
            ]
            found += [
                None
                if any(x is None for x in xs)
                else self._split.merge(list(xs))
                for xs in zip(*parts, strict=True)
            ]
        return found

    def _value(self, value: Value, device: str, m: int) -> Activations:
        if value not in self._given:
            maker, i = self._pipeline.maker[value]
            made = self._made[maker.index, m]
            if (value, m, device) not in self._received:
                self._received[value, m, device] = keras.tree.map_structure(
                    lambda x: self._sent(x, maker.device, device),
                    made.tensors[i],
                )
            return Activations(self._received[value, m, device], made.masks[i])
        if (value, device) not in self._cut:
            whole = Activations.of(self._given[value])
            with tf.device(device):
                self._cut[value, device] = [
                    Activations(*(self._split.take(x, i) for x in whole))
                    for i in range(self._split.num_micro_batches)
                ]
        return self._cut[value, device][m]

    def _sent(self, x: Any, sender: str, receiver: str) -> Any:
        """Returns a tensor that goes from device to device, or `None`."""
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


def _sum(value: Value, parts: list[list]) -> list:
    total: list = [None] * len(keras.tree.flatten(value.spec))
    for part in parts:
        total = _added(total, part)
    return total


def _added(a: list, b: list) -> list:
    return [add(x, y) for x, y in zip(a, b, strict=True)]
