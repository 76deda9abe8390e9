"""The layers of a stage as a pure function, with its gradient from a tape."""

from collections.abc import Callable
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage import loops
from tf_gpipe.stage import matrix_gradient
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.assignments import AssignmentScope
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.stage import AddedLoss
from tf_gpipe.stage.stage import LayerRunner
from tf_gpipe.stage.stage import Stage
from tf_gpipe.stage.stage import adder
from tf_gpipe.stage.stage import run_stage
from tf_gpipe.stage.stage import trainable
from tf_gpipe.stage.structures import filled
from tf_gpipe.stage.structures import tensors
from tf_gpipe.stage.tensorflow_state import TensorFlowState
from tf_gpipe.stage.tensorflow_state import holding
from tf_gpipe.stage.tensorflow_state import not_followed
from tf_gpipe.stage.tensorflow_state import written


class Result(NamedTuple):
    """The outputs, losses and state updates of a stage for one micro-batch."""

    outputs: Activations
    losses: list[tf.Tensor]  # of `add_loss` and activity regularisers
    updates: list[tf.Tensor]  # new values of `StageFunction.updated`

    @property
    def targets(self) -> list[tf.Tensor]:
        """Tensors that may have a gradient: parts of outputs, then losses."""
        return self.outputs.parts() + self.losses


class StageFunction:
    """The layers of a stage as a pure function: state in, state out.

    It assigns no variable, so a second run (recomputation for the backward
    pass) has no effect and gives the same result. It reads the weights that
    the stage owns from their variables. State, and weights borrowed from
    another stage, are passed in as tensors.

    Args:
        stage: The `Stage` whose layers it runs.
        carried: Variables whose values are passed in, `keras.Variable`s and
            `TensorFlowState`s.
        training: `None` for Keras's default.
        stopped: The inputs of the stage that need no gradient.
        foreign: Ids of variables of other stages that it must not read.

    Attributes:
        borrowed_indices: Indices in `carried` of trainable weights (the rest is
            state).
        updated: The variables whose new values `Result.updates` holds, known
            after the first pass.
        added: The origin of each of `Result.losses`, known after the first
            pass.
        unmapped: The variables that layers have used without a value of the
            micro-batch: those of the stage that are not `carried`, and others
            that layers reach in another way. Known after the first pass.
        ends: Numbers of operations that the graph had in the last run: before
            the first layer, then after each of the stage's calls.
    """

    def __init__(
        self,
        stage: Stage,
        carried: list[keras.Variable],
        training: bool | None,
        stopped: Collection[Value],
        foreign: Collection[int],
    ):
        self.stage = stage
        self.carried = carried
        self.updated: list[keras.Variable] = []
        self.added: list[AddedLoss] = []
        self.unmapped: list[keras.Variable] = []
        self.ends: list[int] = []
        # Ids of the variables that layers assign within loops and branches,
        # and the variables.
        self._within: dict[int, keras.Variable] = {}
        self._training = training
        self._foreign = foreign
        self._stopped = [value in stopped for value in stage.inputs]
        self.borrowed_indices = [
            i for i, v in enumerate(carried) if trainable([v])
        ]
        passed = {id(v) for v in carried}
        read = [v for v in stage.owned if id(v) not in passed]
        self._weights = trainable(read)
        # Weights whose `tf.Variable`s are trainable nevertheless: without
        # `tf.stop_gradient` TensorFlow would compute gradients for them.
        self._frozen = [
            v for v in read if v.value.trainable and not v.trainable
        ]

    def on_device(self) -> AbstractContextManager:
        """Returns the scope of the stage's device."""
        return tf.device(self.stage.device)

    def __call__(
        self,
        inputs: Activations,
        carried: list,
        runner: LayerRunner | None = None,
    ) -> Result:
        values = self._inputs_by_value(inputs)
        states, mapping = self._pairs(carried)
        with (
            tf.device(self.stage.device),
            tf.name_scope(self.stage.scope),
            holding(states),
            AssignmentScope(mapping, self._foreign, self._within) as scope,
        ):
            losses, added, ends = self._run_layers(values, scope, runner)
            _check_captures(self.stage)
            for v in scope.found:
                self._within[id(v)] = v
            if scope.found:
                raise loops.AssignedWithin(
                    scope.found[0], self.stage.index, self.stage.device
                )
            assigned = self._assigned(
                [v for v, _ in states],
                ends[0],
                {id(x.handle) for x in scope.held.values()},
            )
            self.ends = ends
            self.updated = [*scope.updated.values(), *assigned]
            self.added = added
            self.unmapped = list(scope.unmapped.values())
            updates = [
                tf.stop_gradient(scope.get_current_value(v))
                for v in scope.updated.values()
            ]
            updates += [v.value.read_value() for v in assigned]
            return self._result(values, losses, updates)

    def _inputs_by_value(self, inputs: Activations) -> dict[Value, Any]:
        """Returns the inputs, with a gradient only where one is needed."""
        given = inputs.with_parts(
            tf.stop_gradient(x) if stop else x
            for x, stop in zip(
                inputs.parts(), self._stopped_parts(inputs), strict=True
            )
        )
        return dict(zip(self.stage.inputs, given.unpack(), strict=True))

    def _pairs(self, carried: list) -> tuple[list[tuple], list[tuple]]:
        """Returns pairs of a variable and the value that layers shall read.

        One list for `TensorFlowState`s, one for `keras.Variable`s. Only
        borrowed weights have a gradient.
        """
        borrowed = self.borrowed_indices
        pairs = [
            (v, value if i in borrowed else tf.stop_gradient(value))
            for i, (v, value) in enumerate(
                zip(self.carried, carried, strict=True)
            )
        ]
        states = [x for x in pairs if isinstance(x[0], TensorFlowState)]
        mapping = [x for x in pairs if not isinstance(x[0], TensorFlowState)]
        # The variables' own values, not those that an outer scope maps them to.
        mapping += [
            (v, tf.stop_gradient(upstream.tensorflow_variable(v)))
            for v in self._frozen
        ]
        return states, mapping

    def _run_layers(
        self,
        values: dict[Value, Any],
        scope: AssignmentScope,
        runner: LayerRunner | None,
    ) -> tuple[list[tf.Tensor], list[AddedLoss], list[int]]:
        """Runs the layers; returns the losses that they add, `added`, `ends`.

        Args:
            values: The stage's inputs; the results of layers are added.
            scope: The scope in which the layers run.
            runner: Runs the layers that share phases, if there are any.
        """

        def shared(node: Node) -> bool:
            return runner is not None and runner(node, values, scope)

        losses: list[tf.Tensor] = []
        added: list[AddedLoss] = []
        ends = [_num_operations()]
        for node in run_stage(self.stage, values, self._training, shared):
            ends.append(_num_operations())
            # After each call: when a layer is called again, Keras clears the
            # losses that it has added to the scope.
            for i, loss in enumerate(scope.losses):
                losses.append(loss)
                added.append(AddedLoss(node, i, adder(node.layer, loss)))
            scope.losses.clear()
        return losses, added, ends

    def _result(
        self,
        values: dict[Value, Any],
        losses: list[tf.Tensor],
        updates: list[tf.Tensor],
    ) -> Result:
        outputs = tuple(values[value] for value in self.stage.outputs)
        result = Result(Activations.of(outputs), losses, updates)
        # Each result is a distinct tensor of this graph, as updates are
        # already: a layer may return one tensor twice, or a tensor of another
        # graph.
        found = tensors((result.outputs, losses))
        return filled(result, [*map(tf.identity, found), *updates])

    def _assigned(
        self, states: list[TensorFlowState], before: int, held: set[int]
    ) -> list[TensorFlowState]:
        """Returns the variables in `states` that layers may have assigned to.

        Raises:
            ValueError: If layers have assigned to other variables.
        """
        if tf.executing_eagerly():
            return states
        graph = tf.compat.v1.get_default_graph()
        handles = {id(graph.capture(v.value.handle)): v for v in states}
        made = written(graph.get_operations()[before:])
        for handle, operation in made.items():
            if handle not in handles and handle not in held:
                raise not_followed(operation, self.stage.layers)
        return [v for handle, v in handles.items() if handle in made]

    def with_gradient(
        self,
        inputs: Activations,
        carried: list,
        run: Callable[[Activations, list], Result] | None = None,
        repeatable: bool = False,
    ) -> tuple[Result, Callable[[list], tuple[list, list]]]:
        """Runs the stage under a tape, which keeps its activations.

        Args:
            inputs: The inputs of the stage.
            carried: The values of the variables `carried`.
            run: Function that runs the stage; by default this object.
            repeatable: Whether the gradient may be asked for more than once.

        Returns:
            Tuple of the `Result` and its gradient function. That takes a
            gradient or `None` for each of `Result.targets`, and returns a list
            with a gradient or `None` for each part of the inputs, and a list
            of pairs of a variable and its gradient. The gradient of a variable
            that is in several pairs is their sum.
        """
        flat = inputs.parts()
        stopped = self._stopped_parts(inputs)
        differentiated = [
            i
            for i, x in enumerate(flat)
            if x.dtype.is_floating and not stopped[i]
        ]
        borrowed = [self.carried[i] for i in self.borrowed_indices]
        # Borrowed weights are sources twice, as the tensor passed in and as the
        # variable, which a layer's own `keras.remat` reads: see
        # `AssignmentScope.get_current_value`.
        variables = [*borrowed, *borrowed, *self._weights]
        sources = [flat[i] for i in differentiated]
        sources += [carried[i] for i in self.borrowed_indices]
        # Not `v.value`: in the scope of a stage that borrows it, a tensor.
        sources += map(
            upstream.tensorflow_variable, [*borrowed, *self._weights]
        )
        with tf.GradientTape(
            persistent=repeatable, watch_accessed_variables=False
        ) as tape:
            tape.watch(sources)
            result = (run or self)(inputs, carried)

        def gradient(gradients: list) -> tuple[list, list]:
            arriving = [
                (target, tf.cast(arrived, target.dtype))
                for target, arrived in zip(
                    result.targets, gradients, strict=True
                )
                if target.dtype.is_floating and arrived is not None
            ]
            found: list = [None] * len(sources)
            if arriving and sources:
                targets, arrived = zip(*arriving, strict=True)
                found = matrix_gradient.compute(
                    lambda: tape.gradient(
                        targets, sources, output_gradients=arrived
                    )
                )
            input_gradients: list = [None] * len(flat)
            for i, x in zip(differentiated, found, strict=False):
                if x is not None:
                    # The gradient of a gather along the rows is sparse.
                    input_gradients[i] = tf.convert_to_tensor(x)
            pairs = zip(variables, found[len(differentiated) :], strict=True)
            return input_gradients, [(v, x) for v, x in pairs if x is not None]

        return result, gradient

    def _stopped_parts(self, inputs: Activations) -> list[bool]:
        """Returns whether each part of the inputs needs no gradient."""
        return [
            stop
            for content, stop in zip(inputs.each(), self._stopped, strict=True)
            for _ in content.parts()
        ]


def _check_captures(stage: Stage) -> None:
    """Raises an error if layers have used a tensor of another stage's trace."""
    graphs = upstream.graphs_being_built()
    for x, _ in getattr(graphs[0], "captures", ()):
        if tf.is_symbolic_tensor(x) and x.graph not in graphs:
            raise ValueError(
                f"Stage {stage.index} on {stage.device} uses tensor "
                f"'{x.name}', which does not reach it as an input: a layer of "
                "another stage has kept it, as in an attribute. Return it from "
                "that layer, and give it to the layers that use it; or keep "
                "all of them in one stage, with `balance` a list of layer "
                "counts."
            )


def _num_operations() -> int:
    """Returns the number of operations of the graph being traced, or 0."""
    if tf.executing_eagerly():
        return 0
    return len(tf.compat.v1.get_default_graph().get_operations())
