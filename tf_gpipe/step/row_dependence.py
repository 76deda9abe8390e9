"""How outputs and losses depend on the rows of a batch, found by experiment.

A micro-batch's result is a part of the mini-batch's in one of three ways: some
of its rows, a term of a mean over rows, or a term of a sum. Keras does not say
which, so layers are run on made-up batches; `dependence` has the rules.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.graph import ROWS
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.graph import variables_of
from tf_gpipe.stage.stage import run_node
from tf_gpipe.step.batch_statistics import batch_norms
from tf_gpipe.step.dependence import Dependence
from tf_gpipe.step.dependence import dependence
from tf_gpipe.step.dependence import is_empty
from tf_gpipe.step.dependence import is_reordered
from tf_gpipe.step.made_up_batches import Trials
from tf_gpipe.step.made_up_numbers import row_axes

# Size used for unknown dimensions, such as lengths of sequences.
_SIZE = 16


class RowDependence:
    """How the values of a model depend on the rows of its inputs.

    Args:
        graph: The `Graph` of the model.
        inputs: For each of its inputs a nested structure of tensors.
        training: `None` for Keras's default.
    """

    def __init__(
        self, graph: Graph, inputs: Sequence[Any], training: bool | None
    ):
        self._graph = graph
        self._training = training
        self._given = {
            value: _specs(Activations.of(x), _of_input)
            for value, x in zip(graph.inputs, inputs, strict=True)
        }
        # The layer call that makes each value.
        self.maker = {x: node for node in graph.nodes for x in node.made}

    def axes(self, value: Value) -> list[list[int]] | None:
        """Returns which axes of each flat tensor grow with the rows.

        `None` if that is not known.
        """
        if self._like is None:
            return None
        return list(map(row_axes, _tensors(self._like[value])))

    def first_across(self) -> keras.Operation | None:
        """Returns the first layer whose result has rows in an axis but 0."""
        for node in self._graph.nodes:
            for value in node.made:
                if any(max(x, default=0) > 0 for x in self.axes(value) or ()):
                    return node.layer
        return None

    def of_losses(self, node: Node) -> list[Dependence | None]:
        """Returns the dependence of each loss that a layer call adds.

        `None` for a loss whose dependence is not known; `[]` if none is.
        """
        return self._of(
            node, lambda values, losses: [tf.reduce_sum(x) for x in losses]
        )

    def of_output(self, value: Value, i: int) -> Dependence | None:
        """Returns the dependence of the i-th flat tensor of a value.

        `None` if it is not known.
        """
        found = self._of(
            self.maker[value],
            lambda values, losses: [keras.tree.flatten(values[value])[i]],
        )
        return found[0] if found else None

    def reorders(self, value: Value, i: int) -> bool:
        """Returns whether the rows of a batch are not in order in a tensor.

        For the i-th flat tensor of a value with several rows for each row of
        the batch. `False` if that is not known.

        Layers are trusted to keep the order of their inputs. So only those are
        run that make several rows of one.
        """
        if self._like is None:
            return False
        rows = _tensors(self._like[value])[i].shape[0]
        if rows == ROWS or value not in self.maker:
            return False
        before = [
            (x, j)
            for x in self.maker[value].inputs
            for j, spec in enumerate(_tensors(self._like[x]))
            if row_axes(spec) == [0] and spec.shape[0] == rows
        ]
        if before:
            return any(self.reorders(*each) for each in before)
        nodes, given = self._since(self.maker[value], self._is_batch)
        found = self._run(
            nodes,
            given,
            lambda values, losses: [keras.tree.flatten(values[value])[i]],
            training=False,
        )
        if found is None:
            return False
        tried, by_kind = found
        return any(is_reordered(x[0], tried.tolerance) for x in by_kind)

    def _is_batch(self, value: Value) -> bool:
        """Returns whether a value has just the rows of the batch in axis 0."""
        assert self._like is not None
        return all(
            row_axes(x) == [0] and x.shape[0] == ROWS
            for x in _tensors(self._like[value])
        )

    def grows_otherwise(self, value: Value, i: int) -> bool:
        """Returns whether a tensor's shape depends on the rows in another way.

        For the i-th flat tensor of a value, if none of its axes is
        proportional to the rows.
        """
        other = self._traced(2 * ROWS + 1)
        if self._like is None or other is None:
            return False
        one, two = (_tensors(x[value])[i].shape for x in (self._like, other))
        return one != two

    @functools.cached_property
    def _like(self) -> dict[Value, Activations] | None:
        """Specs of all values for a batch of `ROWS` rows."""
        return self._traced(ROWS)

    def _traced(self, rows: int) -> dict[Value, Activations] | None:
        """Returns the specs of all values for a batch of so many rows.

        From a trace that is never run. `None` if the trace fails, for example
        because a layer requires one batch size.
        """
        found: dict[Value, Activations] = {}

        def run() -> None:
            weights = [
                (v, tf.zeros(v.shape, v.dtype))
                for v in variables_of(self._graph.nodes)
            ]
            values = {
                value: _filled(x, [_placeholder(s, rows) for s in _flat(x)])
                for value, x in self._given.items()
            }
            with keras.StatelessScope(weights):
                for node in self._graph.nodes:
                    run_node(node, values, self._training)
            for value, x in values.items():
                found[value] = _specs(Activations.of(x), _of_tensor)

        try:
            with (
                tf.init_scope(),
                upstream.losses_kept(x.layer for x in self._graph.nodes),
            ):
                tf.function(run, autograph=False).get_concrete_function()
        except Exception:
            return None
        return found

    def _of(self, node: Node, fetch: Callable) -> list[Dependence | None]:
        """Returns the dependence of each tensor that `fetch` returns.

        Args:
            node: The last layer call that is run.
            fetch: Function from the dict of values and the list of losses of
                `node` to a list of tensors.
        """
        if self._like is None:
            return []
        # Rows in another axis may be mixed: such values are made, too.
        nodes, given = self._since(
            node, lambda value: all(x == [0] for x in self.axes(value) or [[]])
        )
        found = self._in_mode(nodes, given, fetch, self._training)
        normalized = self._training is not False and batch_norms(
            x.layer for x in nodes
        )
        if not normalized or all(x is None or x.exact for x in found):
            return found
        # Batch normalisation per micro-batch is documented, and no reason to
        # call a value inexact: so it is tried in inference mode too.
        others = self._in_mode(nodes, given, fetch, training=False)
        if len(others) != len(found):
            return found
        return [
            other if other and other.exact else x
            for x, other in zip(found, others, strict=True)
        ]

    def _since(
        self, last: Node, is_given: Callable[[Value], bool]
    ) -> tuple[list[Node], list[Value]]:
        """Returns the layer calls since values that are given.

        The calls that `last` depends on, without those that make a value for
        which `is_given` is true or come before it, and a list of these values.
        """
        needed = {last}
        given: dict[Value, None] = {}
        rest = [last]
        while rest:
            for value in rest.pop().inputs:
                maker = self.maker.get(value)
                if maker is None or is_given(value):
                    given[value] = None
                elif maker not in needed:
                    needed.add(maker)
                    rest.append(maker)
        return [x for x in self._graph.nodes if x in needed], list(given)

    def _in_mode(
        self,
        nodes: list[Node],
        given: list[Value],
        fetch: Callable,
        training: bool | None,
    ) -> list[Dependence | None]:
        """Runs `nodes` from made-up values `given`; see `_of`."""
        found = self._run(nodes, given, fetch, training)
        if found is None:
            return []
        tried, by_kind = found
        columns = [list(x) for x in zip(*by_kind, strict=True)]
        # Zero up to some margin, and both a mean and a sum.
        empty = [
            i
            for i, values in enumerate(columns)
            if tried.varying[i] and tried.by_value[i] and is_empty(values)
        ]
        if empty:
            # As in `_run`, a layer may raise any error.
            with contextlib.suppress(Exception):
                for larger in tried.run_larger():
                    for i in empty:
                        columns[i].append(larger[i])
        results: list[Dependence | None] = []
        for i, values in enumerate(columns):
            if not tried.varying[i]:
                results.append(Dependence("mean", True, constant=True))
            elif i in empty and is_empty(values):
                results.append(None)
            else:
                results.append(dependence(values, tried.tolerance))
        return results

    def _run(
        self,
        nodes: list[Node],
        given: list[Value],
        fetch: Callable,
        training: bool | None,
    ) -> tuple[Trials, list] | None:
        """Returns the `Trials` of `nodes`, and what their `run_all` returns.

        `None` if they cannot be run.
        """
        assert self._like is not None
        like = [self._like[value] for value in given]
        flat = [x for values in like for x in _flat(values)]
        if any(len(row_axes(x)) > 1 for x in flat):
            return None

        def function(scope: Any, *args: tf.Tensor) -> list[tf.Tensor]:
            rest = iter(args)
            values = {
                value: _filled(x, [next(rest) for _ in _flat(x)])
                for value, x in zip(given, like, strict=True)
            }
            for node in nodes:
                scope.losses.clear()
                run_node(node, values, training)
            return fetch(values, scope.losses)

        try:
            with upstream.losses_kept(x.layer for x in nodes):
                tried = Trials(function, flat, nodes)
            return tried, tried.run_all()
        except Exception:
            # A layer may raise any error for made-up numbers.
            return None


def _tensors(values: Activations) -> list:
    return keras.tree.flatten(values.tensors)


def _flat(values: Activations) -> list:
    """Returns the leaves that are not `None`, tensors before masks."""
    return [
        x
        for x in keras.tree.flatten([values.tensors, values.masks])
        if x is not None
    ]


def _filled(like: Activations, flat: Sequence[tf.Tensor]) -> Any:
    """Returns tensors with masks attached, given a list as from `_flat`."""
    rest = iter(flat)
    tensors, masks = keras.tree.map_structure(
        lambda x: None if x is None else next(rest), [like.tensors, like.masks]
    )
    return Activations.of(tensors)._replace(masks=masks).unpack()


def _specs(values: Activations, spec: Callable) -> Activations:
    tensors, masks = keras.tree.map_structure(
        lambda x: None if x is None else spec(x), [values.tensors, values.masks]
    )
    return Activations.of(tensors)._replace(masks=masks)


def _of_input(x: Any) -> tf.TensorSpec:
    sizes = [size or _SIZE for size in x.shape[1:]]
    return tf.TensorSpec([ROWS, *sizes], x.dtype)


def _of_tensor(x: Any) -> tf.TensorSpec:
    x = tf.convert_to_tensor(x)
    return tf.TensorSpec(x.shape, x.dtype)


def _placeholder(x: tf.TensorSpec, rows: int) -> tf.Tensor:
    return tf.compat.v1.placeholder(x.dtype, [rows, *x.shape[1:]])
