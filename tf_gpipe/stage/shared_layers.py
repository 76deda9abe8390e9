"""Layers that are alike share one trace, and one set of functions."""

import collections
from collections.abc import Hashable
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices.errors import ALIKE
from tf_gpipe.stage import likeness
from tf_gpipe.stage.function import Result
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.function_call import flatten
from tf_gpipe.stage.function_call import tensors
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.pack import unpack
from tf_gpipe.stage.phases import StagePhases
from tf_gpipe.stage.stage import Activations
from tf_gpipe.stage.stage import Stage
from tf_gpipe.stage.traced_phases import Phases

# A shorter trace is sooner made again than called.
_MIN_OPERATIONS = 32


class SharedLayers:
    """The layers of a pipeline of which several are alike.

    A giant model is one block many times over. Of those that are alike the
    first is traced, with its gradient, and cut into phases as a stage is. The
    others, on whatever device, call these phases with their own weights:

        block 0    trace -> forward, backward, weights
        block 1             forward(weights of block 1, what block 0 made)
        block 2             forward(weights of block 2, what block 1 made)

    Args:
        nodes: The calls of layers of all stages.
        seeds: Variables that any layer may draw from.
        training: `None` for Keras's default.
        splits: Whether the gradients of weights are apart.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        seeds: list[keras.Variable],
        training: bool | None,
        splits: bool,
    ):
        kinds: dict[Hashable, list] = collections.defaultdict(list)
        for node in nodes:
            alike = _likeness(node)
            if alike is not None:
                kinds[alike.form].append((node, alike))
        self._shared: dict[Node, tuple[_Shared, list[keras.Variable]]] = {}
        for kind in kinds.values():
            if len(kind) > 1:
                node, alike = kind[0]
                shared = _Shared(node, alike, seeds, training, splits)
                self._shared.update(
                    (x, (shared, alike.variables)) for x, alike in kind
                )

    def run(
        self, node: Node, values: dict[Value, Any], scope: keras.StatelessScope
    ) -> bool:
        """Calls a layer by the phases that it shares, if it shares any.

        Args:
            node: The call.
            values: The contents of its inputs. What it makes is added.
            scope: That in which the stage runs.

        Returns:
            Whether it has been called.
        """
        if node not in self._shared:
            return False
        shared, variables = self._shared[node]
        return shared.run(node, variables, values, scope)


class _Shared:
    """The phases that layers share which are alike."""

    def __init__(
        self,
        node: Node,
        alike: likeness.Likeness,
        seeds: list[keras.Variable],
        training: bool | None,
        splits: bool,
    ):
        self._node = node
        self._form, self._variables = alike
        stage = Stage(0, [""], Graph([node], node.inputs, node.made), [])
        stage.scope = ALIKE
        states = [v for v in stage.owned if not v.value.trainable]
        self._function = StageFunction(
            stage, [*seeds, *states], training, (), ()
        )
        self._phases = StagePhases(self._function, splits, jit_compile=False)
        known = {id(v) for v in [*seeds, *self._variables]}
        self._weights = stage.trainable(self._variables)
        self._serves: dict[Phases, bool] = {}
        self._never = any(id(v) not in known for v in stage.used())

    def run(
        self,
        node: Node,
        variables: list[keras.Variable],
        values: dict[Value, Any],
        scope: keras.StatelessScope,
    ) -> bool:
        pairs = list(zip(self._variables, variables, strict=True))
        own = {id(a): b for a, b in pairs}
        handles = {id(_handle(a)): _handle(b) for a, b in pairs}

        def value(variable: keras.Variable) -> tf.Tensor | None:
            return scope.get_current_value(own.get(id(variable), variable))

        # Those of another stage come as tensors.
        if self._never or any(value(v) is not None for v in self._weights):
            return False
        given = tuple(values[x] for x in node.inputs)
        if not all(isinstance(x, tf.Tensor) for x in flatten(given)):
            return False
        inputs = Activations.of(given)
        carried = [value(v) for v in self._function.carried]
        phases = self._traced(inputs, carried)
        if phases is None:
            return False
        # By which an error in it is found.
        with tf.name_scope(node.layer.name):
            result = self._called(phases, handles, inputs, carried)
        for variable, updated in zip(
            self._function.updated, result.updates, strict=True
        ):
            scope.add_update((own.get(id(variable), variable), updated))
        made = result.outputs.unpack()
        values.update(zip(node.made, made, strict=True))
        return True

    def _traced(self, inputs: Activations, carried: list) -> Phases | None:
        """Returns the phases, or `None` if the layers cannot share them."""
        try:
            phases = self._phases.traced(inputs, carried)
        except Exception:
            # The layer will raise it once more where it is called.
            self._never = True
            return None
        if phases not in self._serves:
            after = _likeness(self._node)
            weights = set(map(id, self._weights))
            self._serves[phases] = (
                phases.is_pure([id(_handle(v)) for v in self._variables])
                and len(phases.traced.operations) >= _MIN_OPERATIONS
                and not self._function.added
                and weights.isdisjoint(map(id, self._function.updated))
                # It notes nothing of its calls.
                and after is not None
                and after.form == self._form
            )
        return phases if self._serves[phases] else None

    def _called(
        self,
        phases: Phases,
        handles: dict[int, tf.Tensor],
        inputs: Activations,
        carried: list,
    ) -> Result:
        """Calls the phases, for tapes too."""
        weights = phases.weights_of(handles)
        result, stored = phases.forward(
            weights, tensors((inputs, carried)), True
        )
        parts = inputs.parts()
        floats = [i for i, x in enumerate(parts) if x.dtype.is_floating]
        trained = [v for v, _ in phases.trace.by_variable]

        def gradient(arrived: tf.Tensor) -> list:
            backward = phases.backward((True,))
            by_input, kept = backward.run(
                weights, stored, [tf.convert_to_tensor(arrived)], []
            )
            if phases.splits:
                kept = backward.weights(weights, kept, [])
            dense = unpack(
                kept[0], list(map(upstream.tensorflow_variable, backward.dense))
            )
            found = dict(zip(map(id, backward.dense), dense, strict=True))
            return [
                *(by_input[i] for i in floats),
                *(found.get(id(v)) for v in trained),
            ]

        (target,) = [x for x in result.targets if x.dtype.is_floating]
        sources = [parts[i] for i in floats]
        sources += [handles[id(_handle(v))] for v in trained]
        upstream.record_gradient([target], sources, gradient)
        return result


def _likeness(node: Node) -> likeness.Likeness | None:
    """Returns the likeness of a call: of its layer, and its arguments."""
    if not isinstance(node.layer, keras.Layer):
        return None
    places = {value: i for i, value in enumerate(node.inputs)}
    arguments = keras.tree.map_structure(
        lambda x: ("value", places[x]) if isinstance(x, Value) else x,
        (node.args, node.kwargs),
    )
    return likeness.of(node.layer, (arguments, len(node.made)))


def _handle(variable: keras.Variable) -> tf.Tensor:
    """Returns the handle of a variable, whatever it holds in a scope."""
    return upstream.tensorflow_variable(variable).handle
