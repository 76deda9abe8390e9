"""The phases of a stage as functions, traced once for all micro-batches."""

import functools
import itertools
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe.clock import Clock
from tf_gpipe.function_call import FunctionCall
from tf_gpipe.gradients import Gradients
from tf_gpipe.pack import pack
from tf_gpipe.pack import unpack
from tf_gpipe.stage import Activations
from tf_gpipe.stage_function import Result
from tf_gpipe.stage_function import StageFunction
from tf_gpipe.traced_function import TracedFunction

# From a `Result` and a nested structure of tensors to a gradient or `None` for
# each of its targets, and a nested structure of tensors.
Turn = Callable[[Result, Any], tuple[list, Any]]


class StagePhases:
    """The phases of a stage as functions, traced once for all micro-batches.

    They are cut from a trace of the stage with its gradient:

        inputs ------> forward ------> result
                          | stored
                          v
        gradients <--- backward <----- gradients
        of inputs         | kept       of the result
                          v
                       weights ------> gradients of weights

    No two of them compute the same, unless remat asks for it: then the
    forward phase stores nothing, and a phase of its own recomputes what it
    would have stored. Where the gradients of weights need not be apart, the
    backward phase computes them.

    Args:
        function: `StageFunction`.
        splits: Boolean, whether the gradients of weights are apart.
        jit_compile: Boolean, whether XLA compiles the phases.
        clock: `Clock` that takes times within phases, or `None`.
        turn: What `at_once` does between forward and backward.
    """

    def __init__(
        self,
        function: StageFunction,
        splits: bool,
        jit_compile: bool,
        clock: Clock | None,
        turn: Turn,
    ):
        self.function = function
        self._splits = splits
        # XLA knows no clock.
        self._clock = None if jit_compile else clock
        self._turn = turn
        trace = functools.partial(
            tf.function,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes={"_noinline": True},
        )
        self._plain = trace(function)
        self._differentiated = trace(self._differentiate)
        self._turned = trace(self._forward_backward)
        # Both by the graph of a trace.
        self._upstream: dict[Any, list] = {}
        self._cuts: dict[Any, Any] = {}

    def __call__(self, inputs: Activations, carried: list) -> Result:
        """Runs the stage, for no backward pass of the pipeline."""
        with self.function.on_device():
            return self._plain(inputs, carried)

    def start(
        self, inputs: Activations, carried: list, remat: bool
    ) -> "PhasedCall":
        """Runs the stage forward.

        Args:
            inputs: `Activations`.
            carried: List with the values of what the function carries.
            remat: Boolean, whether `PhasedCall.recompute` will run it again.
        """
        given = inputs, carried
        with self.function.on_device():
            concrete = self._differentiated.get_concrete_function(*given)
            graph = concrete.graph
            if graph not in self._cuts:
                upstream = self._upstream[graph]
                self._cuts[graph] = _Cut(
                    self.function, concrete, upstream, self._splits
                )
            return PhasedCall(self._cuts[graph], _tensors(given), remat)

    def at_once(
        self, inputs: Activations, carried: list, arguments: Any
    ) -> "TurnedCall":
        """Runs the stage forward, then at once backward.

        Args:
            inputs: `Activations`.
            carried: List with the values of what the function carries.
            arguments: Nested structure of tensors for the turn.
        """
        given = inputs, carried, arguments
        with self.function.on_device():
            concrete = self._turned.get_concrete_function(*given)
            graph = concrete.graph
            if graph not in self._cuts:
                feeds = _arguments(concrete)
                traced = TracedFunction(concrete, feeds)
                made, dense, sparse = _made(concrete)
                self._cuts[graph] = _Backward(
                    traced,
                    feeds,
                    made,
                    _Weights(self.function.dense, dense),
                    _Weights(self.function.sparse, sparse),
                    traced.effects(),
                    self._splits,
                )
            return TurnedCall(self._cuts[graph], _tensors(given))

    def outputs_like(
        self, inputs: Activations, carried: list
    ) -> Activations | None:
        """Returns zeros shaped like the outputs, without running the stage.

        `None` where the shapes are not known before it runs.
        """
        with self.function.on_device():
            concrete = self._plain.get_concrete_function(inputs, carried)
        outputs = concrete.structured_outputs.outputs
        specs = keras.tree.flatten(outputs.tensors)
        if not all(spec.shape.is_fully_defined() for spec in specs):
            return None
        tensors = keras.tree.map_structure(
            lambda spec: tf.zeros(spec.shape, spec.dtype), outputs.tensors
        )
        return outputs._replace(tensors=tensors)

    def _differentiate(self, inputs: Activations, carried: list) -> tuple:
        with self.function.on_device():
            result, gradient = self.function.differentiable(inputs, carried)
            # Of what arrives later: they are fed to parts of the trace.
            upstream = [
                tf.compat.v1.placeholder(x.dtype, x.shape)
                if x.dtype.is_floating
                else None
                for x in result.targets
            ]
            self._upstream[tf.compat.v1.get_default_graph()] = upstream
            by_input, gradients = gradient(upstream)
            return result, by_input, *gradients

    def _forward_backward(
        self, inputs: Activations, carried: list, arguments: Any
    ) -> tuple:
        with self.function.on_device():
            result, gradient = self.function.differentiable(inputs, carried)
            times = []
            if self._clock is not None:
                outputs = keras.tree.flatten(result.outputs.tensors)
                times = [self._clock.stamp(outputs)]
            # Or the stamp would wait for a thread while those work.
            with tf.control_dependencies(times):
                upstream, rest = self._turn(result, arguments)
                by_input, gradients = gradient(upstream)
            return (result, times, rest, by_input), *gradients


class PhasedCall:
    """A micro-batch on its way through the phases of a stage.

    Attributes:
        result: `Result`.
    """

    def __init__(self, cut: "_Cut", inputs: list[tf.Tensor], remat: bool):
        self._cut = cut
        self._inputs = inputs
        self._stored: list[tf.Tensor] = []
        # Known once the backward phase has run.
        self._backward: Any = None
        self._rest: Any = None
        if remat:
            self.result = cut.forward(inputs)
        else:
            self.result, self._stored = cut.storing(inputs)

    def recompute(self) -> list[tf.Tensor]:
        """Runs the stage again. Returns what the backward phase needs."""
        self._stored = self._cut.store(self._inputs)
        return self._stored

    def backward(self, upstream: list) -> list:
        """Runs the backward phase.

        Args:
            upstream: List with a tensor or `None` for each of the result's
                targets.

        Returns:
            List with a gradient or `None` for each flat input.
        """
        targets = self.result.targets
        floats = [i for i, x in enumerate(targets) if x.dtype.is_floating]
        arrived = tuple(upstream[i] is not None for i in floats)
        self._backward = self._cut.backward(arrived)
        values = [
            tf.zeros_like(targets[i])
            if upstream[i] is None
            else tf.cast(upstream[i], targets[i].dtype)
            for i in floats
        ]
        by_input, self._rest = self._backward(self._stored, values)
        return by_input

    def weights(self) -> tuple[Gradients, list, list]:
        """Returns the gradients of weights, after the backward phase.

        Returns:
            Tuple of `Gradients`, the list of the variables of the dense ones,
            and that of the sparse ones.
        """
        return self._backward.weights(self._rest)


class TurnedCall:
    """A micro-batch that has gone through a stage and at once back.

    Attributes:
        result: `Result`.
        times: List with the time of the turn, if it is taken.
        rest: What the turn has returned besides gradients.
        input_gradients: List with a gradient or `None` for each flat input.
    """

    def __init__(self, backward: "_Backward", inputs: list[tf.Tensor]):
        self._backward = backward
        made, self._rest = backward([], inputs)
        self.result, self.times, self.rest, self.input_gradients = made

    def weights(self) -> tuple[Gradients, list, list]:
        """As that of `PhasedCall`."""
        return self._backward.weights(self._rest)


class _Made(NamedTuple):
    """Some of what a traced function returns."""

    structure: Any
    tensors: list[tf.Tensor]  # the leaves of `structure` that are not None

    def filled(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Returns the structure with other tensors."""
        found = iter(tensors)
        return tf.nest.pack_sequence_as(
            self.structure,
            [None if x is None else next(found) for x in _flat(self.structure)],
            expand_composites=True,
        )


class _Weights(NamedTuple):
    """Gradients of weights in a traced function, and whose they are."""

    variables: list[keras.Variable]
    made: _Made  # a list with one a variable

    def of(self, operations: Collection[tf.Operation]) -> "_Weights":
        """Returns those that operations make."""
        variables, structure, tensors = [], [], []
        rest = list(self.made.tensors)
        for variable, like in zip(
            self.variables, self.made.structure, strict=True
        ):
            size = len(_flat(like))
            own, rest = rest[:size], rest[size:]
            if any(x.op in operations for x in own):
                variables.append(variable)
                structure.append(like)
                tensors += own
        return _Weights(variables, _Made(structure, tensors))


class _Cut:
    """The phases of a stage, cut from a trace.

    Args:
        function: `StageFunction`.
        concrete: The trace: a concrete function that returns the result, the
            gradients of inputs, and `Gradients`.
        upstream: List of the placeholders in it of gradients of the result,
            `None` where there are none.
        splits: Boolean, whether the gradients of weights are apart.
    """

    def __init__(
        self,
        function: StageFunction,
        concrete: Any,
        upstream: list,
        splits: bool,
    ):
        self._function = function
        self._splits = splits
        self._splits = splits
        self._inputs = _arguments(concrete)
        self._result, self._by_input, dense, sparse = _made(concrete)
        self._dense = _Weights(function.dense, dense)
        self._sparse = _Weights(function.sparse, sparse)
        self._upstream = [x for x in upstream if x is not None]
        self._traced = TracedFunction(
            concrete, [*self._inputs, *self._upstream]
        )
        late = self._traced.users(self._upstream)
        effects = self._traced.effects()
        self._early_effects = effects - late
        self._late_effects = effects & late
        fetches = self._by_input.tensors + dense.tensors + sparse.tensors
        early = self._traced.makers(fetches, self._late_effects) - late
        # What is there once the stage has run.
        self._stored = self._traced.handed(fetches, early, self._late_effects)
        self._backward: dict[tuple, _Backward] = {}
        self.forward = FunctionCall(self._forward)
        self.storing = FunctionCall(self._forward_storing)
        self.store = FunctionCall(self._store)

    def _forward(self, inputs: list[tf.Tensor]) -> Result:
        part = self._traced.part(
            self._inputs, self._result.tensors, self._early_effects
        )
        return self._result.filled(part(inputs))

    def _forward_storing(self, inputs: list[tf.Tensor]) -> tuple:
        part = self._traced.part(
            self._inputs,
            self._result.tensors + self._stored,
            self._early_effects,
        )
        found = part(inputs)
        size = len(self._result.tensors)
        return self._result.filled(found[:size]), pack(found[size:])

    def _store(self, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return pack(self._traced.part(self._inputs, self._stored)(inputs))

    def backward(self, arrived: tuple[bool, ...]) -> "_Backward":
        """Returns the backward phase.

        Args:
            arrived: For each placeholder of a gradient, whether there is one.
                What depends on none that is there is `None`, as by a tape.
        """
        if arrived not in self._backward:
            there = itertools.compress(self._upstream, arrived)
            alive = self._traced.users(there)
            by_input = [
                x if x is not None and x.op in alive else None
                for x in self._by_input.filled(self._by_input.tensors)
            ]
            self._backward[arrived] = _Backward(
                self._traced,
                self._stored + self._upstream,
                _Made(by_input, [x for x in by_input if x is not None]),
                self._dense.of(alive),
                self._sparse.of(alive),
                self._late_effects,
                self._splits,
                stored=self._stored,
            )
        return self._backward[arrived]


class _Backward:
    """The backward phase of a stage, or both passes at once, and after that
    the phase of weights.

    Args:
        traced: `TracedFunction`.
        feeds: List of tensors of the graph that the phase is fed.
        made: `_Made`, what it returns besides gradients of weights.
        dense: `_Weights`.
        sparse: `_Weights`.
        effects: Operations with side effects that it runs.
        splits: Boolean, whether the gradients of weights are apart.
        stored: List of the first ones of `feeds`, which come in a pack.
    """

    def __init__(
        self,
        traced: TracedFunction,
        feeds: list[tf.Tensor],
        made: _Made,
        dense: _Weights,
        sparse: _Weights,
        effects: Collection[tf.Operation],
        splits: bool,
        stored: Sequence[tf.Tensor] = (),
    ):
        self._traced = traced
        self._feeds = feeds
        self._stored = stored
        self._made = made
        self._dense = dense
        self._sparse = sparse
        self._effects = effects
        self._gradients = dense.made.tensors + sparse.made.tensors
        self._splits = splits
        # What the phase of weights is fed.
        self._kept: list[tf.Tensor] = []
        if splits:
            done = {x.op for x in feeds}
            done |= traced.makers(made.tensors, effects)
            self._kept = traced.handed(self._gradients, done)
        self._run = FunctionCall(self._phase)
        self._run_weights = FunctionCall(self._phase_of_weights)

    def __call__(
        self, packed: list[tf.Tensor], values: list[tf.Tensor]
    ) -> tuple[Any, Any]:
        """Runs the phase.

        Args:
            packed: The pack of the values of `stored`.
            values: List of the values of the other feeds.

        Returns:
            Tuple of the values of `made`, and what `weights` takes.
        """
        return self._run(packed, values)

    def weights(self, rest: Any) -> tuple[Gradients, list, list]:
        """Returns the gradients of weights, and whose they are."""
        gradients = self._run_weights(rest) if self._splits else rest
        return gradients, self._dense.variables, self._sparse.variables

    def _phase(self, packed: list[tf.Tensor], values: list[tf.Tensor]) -> tuple:
        rest = self._kept if self._splits else self._gradients
        part = self._traced.part(
            self._feeds, self._made.tensors + rest, self._effects
        )
        found = part([*unpack(packed, self._stored), *values])
        size = len(self._made.tensors)
        made, found = self._made.filled(found[:size]), found[size:]
        return made, pack(found) if self._splits else self._packed(found)

    def _phase_of_weights(self, packed: list[tf.Tensor]) -> Gradients:
        part = self._traced.part(self._kept, self._gradients)
        return self._packed(part(unpack(packed, self._kept)))

    def _packed(self, found: list[tf.Tensor]) -> Gradients:
        size = len(self._dense.variables)
        return Gradients(
            self._dense.made.filled(found[:size]),
            self._sparse.made.filled(found[size:]),
        ).packed()


def _arguments(concrete: Any) -> list[tf.Tensor]:
    """Returns the inputs of a trace, without those that it has captured."""
    size = len(concrete.inputs) - len(concrete.captured_inputs)
    return concrete.inputs[:size]


def _made(concrete: Any) -> list[_Made]:
    """Returns what a trace returns, a tuple, one by one."""
    found, rest = [], list(concrete.outputs)
    for structure in concrete.structured_outputs:
        size = sum(x is not None for x in _flat(structure))
        found.append(_Made(structure, rest[:size]))
        rest = rest[size:]
    return found


def _flat(structure: Any) -> list:
    return tf.nest.flatten(structure, expand_composites=True)


def _tensors(structure: Any) -> list[tf.Tensor]:
    # What else there may be, such as numbers, is a part of the trace.
    return [x for x in _flat(structure) if isinstance(x, tf.Tensor)]
