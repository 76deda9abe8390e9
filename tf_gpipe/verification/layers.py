"""The search for layers whose numbers differ from the plain model's.

Outputs and gradients of each layer are compared by themselves, so that a
difference that is small beside the rest of the model is found.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import progress
from tf_gpipe import upstream
from tf_gpipe.schedule import schedules
from tf_gpipe.stage import tensorflow_state
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.stage import Stage
from tf_gpipe.stage.stage import run_node
from tf_gpipe.step.batch_statistics import batch_norms
from tf_gpipe.step.engine import MiniBatch
from tf_gpipe.step.running import StageMode
from tf_gpipe.verification.report import differences
from tf_gpipe.verification.report import largest
from tf_gpipe.verification.steps import Variables

# The seed of the made-up gradients of outputs.
_SEED = 31


class Layers:
    """The layers of a built pipeline, run and compared on one mini-batch.

    Args:
        model: The pipeline.
        variables: `Variables` of the model.
        x: Inputs of the model.
        tolerance: Float, the largest relative difference that is rounding.

    Attributes:
        names: List of the names of the layers, in order.
        notes: List of strings, which layers could not be compared, and why.
    """

    def __init__(
        self, model: Any, variables: Variables, x: Any, tolerance: float
    ):
        self._model = model
        self._variables = variables
        pipeline, self._inputs = model._pipeline_for(x)
        rows = keras.tree.flatten(self._inputs)[0].shape[0]
        self._pipeline = pipeline.with_rows(rows)
        self._tolerance = tolerance
        self.names = list(
            dict.fromkeys(node.layer.name for node in self._graph.nodes)
        )
        self.notes: list[str] = []

    @property
    def _graph(self) -> Graph:
        return self._pipeline.graph

    def with_batch_norms(self) -> list[str]:
        """Returns the names of layers with trainable batch normalisation."""
        found = [
            node.layer.name
            for node in self._graph.nodes
            if _trained_norms(node)
        ]
        return list(dict.fromkeys(found))

    def of(self, name: str) -> str | None:
        """Returns the name of the first layer with the variable `name`."""
        variable = self._variables.find(name)
        for node in self._graph.nodes:
            if any(v is variable for v in _state_of(node)):
                return node.layer.name
        return None

    def alone(self, training: bool) -> list[str]:
        """Returns the names of layers that differ when each is run by itself.

        Each layer gets the inputs that it has in the plain model: the whole
        mini-batch in plain Keras, and micro-batches in a pipeline of this layer
        only. Its outputs, added losses and state are compared, and in training
        the gradients of its weights and inputs.
        """
        self._variables.restore()
        found: list[str] = []
        values = dict(zip(self._graph.inputs, self._inputs, strict=True))
        m = self._pipeline.schedule.num_micro_batches
        for node in progress.track(self._graph.nodes, "comparing layers"):
            name = node.layer.name
            # Both runs of the layer get the inputs as they are now.
            inputs = [values[x] for x in node.inputs]
            whole, drawn, repeats = self._whole(node, values, training)
            norms = training and bool(_trained_norms(node))
            depends = m > 1 and (drawn or norms)
            if name in found or depends or not repeats:
                continue
            try:
                parts = self._parts(node, inputs, training)
            except Exception as e:
                first, *_ = str(e).strip().splitlines() or [""]
                self.notes.append(
                    f"Layer '{name}' could not be run by itself: "
                    f"{type(e).__name__}: {first}"
                )
                continue
            if self._differ(whole, parts):
                found.append(name)
        self._variables.restore()
        return found

    def through(self, training: bool) -> str | None:
        """Returns the first layer whose output is another in the pipeline.

        The same stages run forward in one pipeline that returns the outputs of
        all layers.
        """
        self._variables.restore()
        values = dict(zip(self._graph.inputs, self._inputs, strict=True))
        for node in self._graph.nodes:
            run_node(node, values, training)
        self._variables.restore()
        made = [value for node in self._graph.nodes for value in node.made]
        pipeline = _returning(self._pipeline, made)

        def forward():
            run = self._model._mini_batch(pipeline, self._inputs, training)
            run.forward(tape=False)
            return run.outputs.whole().unpack()

        if not self._model.run_eagerly:
            forward = tf.function(forward, autograph=False)
        received = dict(zip(made, forward(), strict=True))
        for node in self._graph.nodes:
            for value in node.made:
                a, b = _flat(values[value]), _flat(received[value])
                floor = 1e-3 * largest(a.values())
                found = differences(a, b, self._tolerance, floor=floor)
                if not all(x.ok for x in found):
                    return node.layer.name
        return None

    def _whole(
        self, node: Node, values: dict[Value, Any], training: bool
    ) -> tuple[dict[str, dict[str, np.ndarray]], bool, bool]:
        """Runs a layer in plain Keras, and adds its outputs to `values`.

        Returns:
            Tuple of the arrays to compare, see `_compared`; whether the layer
            drew random numbers of Keras; and whether a second run, with the
            same state and seeds, has the same outputs.
        """
        layer = node.layer
        state_of = _state_of(node)
        before = [_numbers(v) for v in state_of]
        seeds = [v for v in self._variables if upstream.is_seed(v)]
        drawn_before = [_numbers(v) for v in seeds]
        floats = _floats([values[x] for x in node.inputs])
        weights = getattr(layer, "trainable_variables", [])
        with tf.GradientTape() as tape:
            tape.watch(floats)
            run_node(node, values, training)
            made = [values[x] for x in node.made]
            losses = [tf.reduce_sum(x) for x in _added(layer)]
            targets = [*_floats(made), *losses]
        drawn = any(
            not np.array_equal(x, _numbers(v))
            for x, v in zip(drawn_before, seeds, strict=True)
        )
        input_gradients: list = [None] * len(floats) * training
        weight_gradients: list = [None] * len(weights) * training
        if training and targets:
            input_gradients, weight_gradients = tape.gradient(
                targets,
                (floats, [v.value for v in weights]),
                output_gradients=[
                    *_made_up_gradients(_floats(made)),
                    *map(tf.ones_like, losses),
                ],
            )
        found = _compared(
            made,
            losses,
            floats,
            input_gradients,
            weights,
            weight_gradients,
            state_of,
        )
        self._assign([*state_of, *seeds], [*before, *drawn_before])
        again = dict(values)
        run_node(node, again, training)
        repeated = _flat([again[x] for x in node.made])
        repeats = all(
            x.ok
            for x in differences(found["output"], repeated, self._tolerance)
        )
        self._assign(state_of, before)
        return found, drawn, repeats

    def _parts(
        self, node: Node, inputs: list, training: bool
    ) -> dict[str, dict[str, np.ndarray]]:
        """Runs a layer in micro-batches; returns the arrays to compare."""
        m = self._pipeline.schedule.num_micro_batches
        # A pipeline of this layer alone, which returns the layer's outputs.
        graph = Graph([node], node.inputs, node.made)
        device = next(
            stage.devices
            for stage in self._pipeline.stages
            if node in stage.nodes
        )
        stage = Stage(0, device, graph, [])
        pipeline = Pipeline(
            graph, (stage,), schedules.get("gpipe", 1, m), "always", None
        )
        state_of = _state_of(node)
        before = [_numbers(v) for v in state_of]
        floats = _floats(inputs)
        weights = getattr(node.layer, "trainable_variables", [])
        input_gradients: list = []
        weight_gradients: list = []
        try:
            run = MiniBatch(
                pipeline, tuple(inputs), training, stages=StageMode.INLINE
            )
            run.forward(tape=training)
            outputs, losses = run.outputs.whole(), run.added.totals()
            made = outputs.tensors
            if training:
                made_up = iter(_made_up_gradients(_floats(made)))
                run.backward(
                    [
                        next(made_up)
                        if i == 0 and x.dtype.is_floating
                        else None
                        for parts in outputs.by_tensor()
                        for i, x in enumerate(parts)
                    ],
                    [tf.ones_like(x) for x in losses],
                )
                given = Activations.of(inputs).by_tensor()
                input_gradients = [
                    gradient
                    for (i, x), gradient in zip(
                        [pair for parts in given for pair in enumerate(parts)],
                        run.exchange.input_gradients(),
                        strict=True,
                    )
                    if i == 0 and x.dtype.is_floating
                ]
                by_id = run.gradients()
                weight_gradients = [by_id.get(id(v)) for v in weights]
            run.commit_state()
            return _compared(
                made,
                losses,
                floats,
                input_gradients,
                weights,
                weight_gradients,
                state_of,
            )
        finally:
            self._assign(state_of, before)

    def _differ(self, whole: dict, parts: dict) -> bool:
        """Returns whether two runs of a layer differ beyond rounding."""
        gradients = {**whole["input"], **whole["weight"]}
        outputs = 1e-3 * largest(whole["output"].values())
        floors = {
            "output": outputs,
            "input": 1e-2 * largest(gradients.values()),
            "weight": 1e-2 * largest(gradients.values()),
            "loss": 1e-6,
            # A statistic of numbers that cancel out consists of rounding.
            "state": max(1e-6, outputs),
        }
        return not all(
            x.ok
            for kind in whole
            for x in differences(
                whole[kind], parts[kind], self._tolerance, floor=floors[kind]
            )
        )

    def _assign(self, variables: list, values: list) -> None:
        for v, value in zip(variables, values, strict=True):
            v.assign(value)


def _returning(pipeline: Pipeline, made: list[Value]) -> Pipeline:
    """Returns a pipeline of the same stages that returns the values `made`."""
    graph = dataclasses.replace(pipeline.graph, outputs=made)
    parts = graph.parts([len(stage.nodes) for stage in pipeline.stages])
    stages: list[Stage] = []
    for k, part in enumerate(parts):
        stages.append(Stage(k, pipeline.stages[k].devices, part, stages))
    return dataclasses.replace(pipeline, graph=graph, stages=tuple(stages))


def _state_of(node: Node) -> list:
    """Returns all variables of a layer, weights and `tf.Variable`s too."""
    if not isinstance(node.layer, keras.Layer):
        return []
    return [*node.layer.variables, *tensorflow_state.find([node.layer])]


def _trained_norms(node: Node) -> list:
    return [x for x in batch_norms([node.layer]) if x.trainable]


def _added(layer: Any) -> list[tf.Tensor]:
    """Returns the losses that a layer added in its last call."""
    return [
        loss
        for x in upstream.layers_within(layer)
        for loss in upstream.own_losses(x)
    ]


def _compared(
    made: Any,
    losses: list[tf.Tensor],
    inputs: list[tf.Tensor],
    input_gradients: list,
    weights: list[keras.Variable],
    weight_gradients: list,
    state_of: list,
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the arrays by which two runs of a layer are compared, by kind."""
    return {
        "output": _flat(made),
        "loss": _flat([tf.add_n(losses)] if losses else []),
        "input": _gradients(inputs, input_gradients),
        "weight": _gradients([v.value for v in weights], weight_gradients),
        "state": {
            str(i): _numbers(v)
            for i, v in enumerate(state_of)
            if not upstream.is_seed(v)
        },
    }


def _floats(x: Any) -> list[tf.Tensor]:
    return [t for t in keras.tree.flatten(x) if t.dtype.is_floating]


def _made_up_gradients(tensors: list[tf.Tensor]) -> Iterator[tf.Tensor]:
    """Yields made-up gradients of tensors, the same ones in each call."""
    numbers = np.random.default_rng(_SEED)
    for x in tensors:
        drawn = numbers.standard_normal(tuple(x.shape))
        yield tf.cast(tf.constant(drawn, tf.float64), x.dtype)


def _gradients(sources: list, gradients: list) -> dict[str, np.ndarray]:
    """Returns gradients as arrays, by number; zeros for `None`."""
    return {
        str(i): np.zeros(tuple(source.shape), source.dtype.as_numpy_dtype)
        if gradient is None
        else np.asarray(tf.convert_to_tensor(gradient))
        for i, (source, gradient) in enumerate(
            zip(sources, gradients, strict=False)
        )
    }


def _flat(x: Any) -> dict[str, np.ndarray]:
    return {str(i): np.asarray(t) for i, t in enumerate(keras.tree.flatten(x))}


def _numbers(v: Any) -> np.ndarray:
    return np.array(v.numpy())
