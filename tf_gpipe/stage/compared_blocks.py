"""Comparison of blocks of layers: do they compute the same, by their traces?"""

from collections.abc import Hashable

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.blocks import likeness_of
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.likeness import Itself
from tf_gpipe.stage.likeness import Likeness
from tf_gpipe.stage.phases import Phases
from tf_gpipe.stage.same_traces import Description
from tf_gpipe.stage.same_traces import described
from tf_gpipe.stage.trace import Trace
from tf_gpipe.stage.trace import TracedStage


class ComparedBlock:
    """A block whose traces are compared with those of a block that is alike.

    Code that is not a library's may tell layers apart by more than their
    attributes, such as their names or a global table of layers. So each block
    is traced: its forward pass, which is most often enough, and its gradient
    where Python functions make it.

    Args:
        block: The block.
        alike: Its `Likeness`.
        function: The `StageFunction` of its layers.
    """

    def __init__(self, block: Graph, alike: Likeness, function: StageFunction):
        self._block = block
        self._form = alike.form
        self._function = function
        self._places = {
            id(upstream.handle_of(v)): i for i, v in enumerate(alike.variables)
        }
        self._found: dict[tuple, Description] = {}
        self._verdicts: dict[tuple, bool] = {}

    def is_same(
        self,
        other: "ComparedBlock",
        phases: Phases,
        inputs: Activations,
        carried: list,
    ) -> bool:
        """Returns whether another block computes the same of its variables.

        If so, it may share `phases`, which are those of this block's function.
        """
        key = phases, other
        if key not in self._verdicts:
            same = sum(self._verdicts.values())
            # Where most layers tell themselves apart, as by their names, all
            # others are taken to do so.
            self._verdicts[key] = len(self._verdicts) <= 2 * same + 2 and (
                self._compared(other, phases, inputs, carried)
            )
        return self._verdicts[key]

    def _compared(
        self,
        other: "ComparedBlock",
        phases: Phases,
        inputs: Activations,
        carried: list,
    ) -> bool:
        if self._carried() != other._carried():
            return False
        differentiated = bool(phases.output_gradients)
        for with_gradient in (False, True)[: 1 + differentiated]:
            key = phases, with_gradient
            if key not in self._found:
                self._found[key] = self._described(
                    phases.traced.graph, phases.trace, with_gradient
                )
            # Traced anew, so that no graph outlives the comparison.
            traced = TracedStage(other._function, with_gradient)
            concrete, trace = traced.trace(inputs, carried)
            if self._found[key] != other._described(
                concrete.graph, trace, with_gradient
            ):
                return False
            if not self._found[key].has_custom_gradients:
                break
        # The calls have changed no attribute of the layers.
        return likeness_of(other._block).form == self._form

    def _carried(self) -> list[Hashable]:
        return [self._place_of(v) for v in self._function.carried]

    def _described(
        self, graph: tf.Graph, trace: Trace, with_gradient: bool
    ) -> Description:
        """Describes a trace of this block, or its forward pass alone."""
        pairs = trace.variable_gradients
        gradients = [(self._place_of(v), x) for v, x in pairs]
        return described(
            graph,
            (
                trace.result,
                (trace.input_gradients, gradients) if with_gradient else (),
                [self._place_of(v) for v in self._function.updated],
                len(self._function.added),
            ),
            self._place,
            None if with_gradient else trace.num_forward,
        )

    def _place_of(self, variable: keras.Variable) -> Hashable:
        return self._place(upstream.handle_of(variable))

    def _place(self, handle: tf.Tensor) -> Hashable:
        """Returns a variable's place in the likeness, or other tensors."""
        return self._places.get(id(handle), Itself(handle))
