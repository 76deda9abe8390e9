"""Blocks of layers that are alike share one trace and its functions."""

import collections
import itertools
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices.errors import ALIKE
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.blocks import find
from tf_gpipe.stage.blocks import likeness_of
from tf_gpipe.stage.compared_blocks import ComparedBlock
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.gradients import GradientSum
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.likeness import Likeness
from tf_gpipe.stage.phased_call import PhasedCall
from tf_gpipe.stage.phases import Phases
from tf_gpipe.stage.phases import StagePhases
from tf_gpipe.stage.stage import Stage
from tf_gpipe.stage.stage import trainable
from tf_gpipe.stage.structures import flatten
from tf_gpipe.stage.structures import tensors

# A trace with fewer operations is not shared: to trace it again is faster than
# to call it.
_MIN_OPERATIONS = 32


def shareable(
    graph: Graph, stages: Sequence[Stage], recomputed: Sequence[Sequence[range]]
) -> list[Graph]:
    """Returns the blocks of a model that may share phases, if they are alike.

    The calls of a block are in one stage, and are recomputed together or not at
    all. A block is left out if sharing would undo recomputation: a shared block
    stores its inputs, even if the layers before it are recomputed to make them.

    Args:
        graph: The model.
        stages: All its `Stage`s.
        recomputed: For each stage, ranges of indices in `Stage.nodes`: the
            calls that are recomputed.
    """
    pieces: list[int] = []
    again: set[Node] = set()
    for stage, parts in zip(stages, recomputed, strict=True):
        bounds = {0, len(stage.nodes)}
        for part in parts:
            bounds |= {part.start, part.stop}
            again.update(stage.nodes[part.start : part.stop])
        pieces += [b - a for a, b in itertools.pairwise(sorted(bounds))]
    made = {value for node in again for value in node.made}
    return [
        block
        for block in find(graph, [len(x.nodes) for x in stages], pieces)
        if block.nodes[0] in again or made.isdisjoint(block.inputs)
    ]


class SharedLayers:
    """The blocks of a pipeline that are alike, and the phases they share.

    A giant model is one block many times over. The first of the blocks that
    are alike is traced, with its gradient, and cut into phases as a stage is.
    The others, on any device, call these phases with their own weights:

        block 0    trace -> forward, backward, weights
        block 1             forward(weights of block 1, outputs of block 0)
        block 2             forward(weights of block 2, outputs of block 1)

    Args:
        blocks: Blocks of layer calls of all stages, as from `shareable`.
        phases_of: Function that returns the `StagePhases` of a block, given as
            a `Stage`. They recompute nothing.
    """

    def __init__(
        self,
        blocks: Iterable[Graph],
        phases_of: Callable[[Stage], StagePhases],
    ):
        # The newest block, if it was run by shared phases.
        self._running: Graph | None = None
        kinds: dict[Hashable, list] = collections.defaultdict(list)
        for block in blocks:
            alike = likeness_of(block)
            kinds[alike.form].append((block, alike))
        self._block: dict[Node, tuple[_Shared, Graph, list]] = {}
        for kind in kinds.values():
            if len(kind) > 1:
                shared = _Shared(kind, phases_of)
                self._block.update(
                    (node, (shared, x, alike.variables))
                    for x, alike in kind
                    for node in x.nodes
                )

    def run(
        self, node: Node, values: dict[Value, Any], scope: keras.StatelessScope
    ) -> bool:
        """Runs a layer call by shared phases, if its block has some.

        At the first call of a block the whole block is run. This is an
        `LayerRunner`.

        Args:
            node: The layer call.
            values: Dict from values to their tensors. The block's outputs are
                added.
            scope: The scope in which the stage runs.

        Returns:
            Whether the call has been run.
        """
        if node not in self._block:
            return False
        shared, block, variables = self._block[node]
        if node is block.nodes[0]:
            ran = shared.run(block, variables, values, scope)
            self._running = block if ran else None
        return self._running is block


class _Shared:
    """The phases that blocks of one kind share."""

    def __init__(
        self,
        kind: list[tuple[Graph, Likeness]],
        phases_of: Callable[[Stage], StagePhases],
    ):
        block, alike = kind[0]
        self._block = block
        self._form = alike.form
        self._variables = alike.variables
        stage = _stage(block)
        self._phases = phases_of(stage)
        self._function = self._phases.function
        known = set(map(id, self._variables))
        self._weights = trainable(self._variables)
        self._can_share: dict[Phases, bool] = {}
        # By the first call of a block, unless all code is a library's.
        self._compared = {
            x.nodes[0]: ComparedBlock(
                x,
                each,
                self._function if x is block else phases_of(_stage(x)).function,
            )
            for x, each in kind
            if not each.of_keras
        }
        self._sharing_disabled = any(id(v) not in known for v in stage.used())

    def run(
        self,
        block: Graph,
        variables: list[keras.Variable],
        values: dict[Value, Any],
        scope: keras.StatelessScope,
    ) -> bool:
        pairs = zip(self._variables, variables, strict=True)
        own = {id(a): b for a, b in pairs}
        handles = {
            id(upstream.handle_of(v)): upstream.handle_of(own[id(v)])
            for v in self._variables
        }

        def value(variable: keras.Variable) -> tf.Tensor | None:
            return scope.get_current_value(own.get(id(variable), variable))

        # A weight with a value in the scope belongs to another stage. It has no
        # handle here to call the phases with.
        if self._sharing_disabled or any(
            value(v) is not None for v in self._weights
        ):
            return False
        given = tuple(values[x] for x in block.inputs)
        if not all(
            # Phases have no gradients of complex inputs.
            isinstance(x, tf.Tensor) and not x.dtype.is_complex
            for x in flatten(given)
        ):
            return False
        inputs = Activations.of(given)
        carried = [value(v) for v in self._function.carried]
        phases = self._traced(inputs, carried)
        if phases is None or not self._is_same(block, phases, inputs, carried):
            return False
        # The name by which an error in the block is placed.
        with tf.name_scope(block.nodes[0].layer.name):
            result = self._called(phases, handles, inputs, carried)
        for variable, updated in zip(
            self._function.updated, result.updates, strict=True
        ):
            scope.add_update((own.get(id(variable), variable), updated))
        made = result.outputs.unpack()
        values.update(zip(block.outputs, made, strict=True))
        return True

    def _traced(self, inputs: Activations, carried: list) -> Phases | None:
        """Returns the phases, or `None` if the layers cannot share them."""
        try:
            phases = self._phases.phases_for(inputs, carried)
        except Exception:
            # The layer raises it again when it is called in line.
            self._sharing_disabled = True
            return None
        if phases not in self._can_share:
            after = likeness_of(self._block)
            passed = set(map(id, self._function.carried))
            self._can_share[phases] = (
                _is_pure(
                    phases, {id(upstream.handle_of(v)) for v in self._variables}
                )
                and len(phases.traced.operations) >= _MIN_OPERATIONS
                and not self._function.added
                # The value of another variable would not be read again.
                and passed.issuperset(map(id, self._function.updated))
                # The call has changed no attribute of the layers.
                and after.form == self._form
            )
        return phases if self._can_share[phases] else None

    def _is_same(
        self,
        block: Graph,
        phases: Phases,
        inputs: Activations,
        carried: list,
    ) -> bool:
        """Returns whether a block computes what the traced one does."""
        if block is self._block or not self._compared:
            return True
        one, other = (self._compared[x.nodes[0]] for x in (self._block, block))
        try:
            return one.is_same(other, phases, inputs, carried)
        except Exception:
            # The layer raises it again when it is called in line.
            return False

    def _called(
        self,
        phases: Phases,
        handles: dict[int, tf.Tensor],
        inputs: Activations,
        carried: list,
    ) -> Result:
        """Calls the forward phase, and records its gradient on tapes."""
        read = phases.read_weights
        weights = read.packed_of(handles[id(x)] for x in read.handles)
        call = PhasedCall(
            phases, lambda: weights, tensors((inputs, carried)), remat=False
        )
        if not phases.output_gradients:
            return call.result
        targets = call.result.targets
        has_gradient = [x.dtype.is_floating for x in inputs.parts()]
        trained = [v for v, _ in phases.trace.variable_gradients]

        def gradient(arrived: tf.Tensor) -> list:
            sums = GradientSum(several=False)
            arriving = [
                tf.convert_to_tensor(arrived) if x.dtype.is_floating else None
                for x in targets
            ]
            input_gradients = call.backward(arriving, sums)
            call.weights(sums)
            found = sums.by_variable()
            return [
                *itertools.compress(input_gradients, has_gradient),
                *(found.get(id(v)) for v in trained),
            ]

        (target,) = [x for x in targets if x.dtype.is_floating]
        sources = inputs.floats()
        sources += [handles[id(upstream.handle_of(v))] for v in trained]
        upstream.record_gradient([target], sources, gradient)
        return call.result


def _is_pure(phases: Phases, handles: set[int]) -> bool:
    """Returns whether other blocks can call these phases.

    That is so if there is one differentiable result, it depends on the inputs
    and on weights with the ids `handles` alone, gradients of weights are dense,
    and nothing has side effects, draws random numbers or calls Python.
    """
    trace, traced = phases.trace, phases.traced
    read = set(map(id, phases.read_weights.handles))
    gradients = [x for _, x in trace.variable_gradients]
    return (
        len(phases.output_gradients) == min(len(trace.output_gradients), 1)
        and {*map(id, traced.captured())} <= read <= handles
        and not traced.effects()
        and not traced.unrepeatable(traced.operations)
        and not traced.calls_python()
        and not any(isinstance(x, tf.IndexedSlices) for x in gradients)
    )


def _stage(block: Graph) -> Stage:
    """Returns a block as a stage without a device."""
    stage = Stage(0, [""], block, [])
    stage.scope = ALIKE
    return stage
