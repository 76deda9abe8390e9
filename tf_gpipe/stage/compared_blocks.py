"""Comparison of blocks of layers: do they compute the same, by their traces?"""

from collections.abc import Hashable
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.blocks import likeness_of
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.likeness import Itself
from tf_gpipe.stage.phases import StagePhases
from tf_gpipe.stage.same_traces import Description
from tf_gpipe.stage.same_traces import described
from tf_gpipe.stage.stage import Activations


class ComparedBlock:
    """A block whose traces are compared with those of a block that is alike.

    Code that is not a library's may tell layers apart by more than their
    attributes, such as their names or a global table of layers. So each block
    is traced: its forward pass, which is most often enough, and its gradient
    where Python functions make it.

    Args:
        block: The block.
        variables: The block's variables, as in its `Likeness`.
        function: `StageFunction` of the block.
    """

    def __init__(
        self,
        block: Graph,
        variables: list[keras.Variable],
        function: StageFunction,
    ):
        self._block = block
        self._function = function
        self._numbers = {
            id(upstream.tensorflow_variable(v).handle): i
            for i, v in enumerate(variables)
        }
        self._phases = [
            StagePhases(
                function,
                splits=False,
                recomputed=(),
                jit_compile=False,
                differentiated=differentiated,
            )
            for differentiated in (False, True)
        ]
        self._found: dict[Any, Description] = {}

    def is_same(
        self,
        other: "ComparedBlock",
        inputs: Activations,
        carried: list,
        differentiated: bool,
    ) -> bool:
        """Returns whether both blocks compute the same of their variables.

        Args:
            other: `ComparedBlock`.
            inputs: The inputs of the blocks.
            carried: The values of `StageFunction.carried`.
            differentiated: Whether their gradients are to be the same, too.
        """
        if self._carried() != other._carried():
            return False
        before = likeness_of(self._block).form
        for phases in (False, True)[: 1 + differentiated]:
            one = self._described(inputs, carried, phases)
            if one != other._described(inputs, carried, phases):
                return False
            if not one.has_custom_gradients:
                break
        # The calls have changed no attribute of the layers.
        return likeness_of(self._block).form == before

    def _carried(self) -> list[Hashable]:
        return [self._number_of(v) for v in self._function.carried]

    def _described(
        self, inputs: Activations, carried: list, differentiated: bool
    ) -> Description:
        concrete, trace = self._phases[differentiated].concrete(inputs, carried)
        graph = concrete.graph
        if graph not in self._found:
            self._found[graph] = described(
                graph,
                (
                    trace.result,
                    trace.input_gradients,
                    [
                        (self._number_of(v), x)
                        for v, x in trace.variable_gradients
                    ],
                    [self._number_of(v) for v in self._function.updated],
                    len(self._function.added),
                ),
                self._number,
            )
        return self._found[graph]

    def _number_of(self, variable: keras.Variable) -> Hashable:
        return self._number(upstream.tensorflow_variable(variable).handle)

    def _number(self, handle: tf.Tensor) -> Hashable:
        return self._numbers.get(id(handle), Itself(handle))
