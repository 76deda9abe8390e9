"""Measured seconds of the forward and backward passes of layer calls."""

import timeit
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.partition import call_costs
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import uncounted
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.graph import variables_of
from tf_gpipe.stage.stage import run_node

_NUM_TIMINGS = 5


def traced(
    part: Graph,
    specs: Mapping[Value, Any],
    differentiated: Collection[Value],
    backward: bool = True,
) -> Callable[[str], float]:
    """Traces layer calls as in training, to measure them.

    They get made-up inputs and weights: the layers' own variables are neither
    read nor changed.

    Args:
        part: `Graph` of the calls.
        specs: Dictionary from its `Value`s to the specs of their tensors.
        differentiated: Those of `part.inputs` of which the gradients are
            computed, too.
        backward: Boolean, whether the backward pass is measured as well.

    Returns:
        Function from a device string to the seconds, as `fastest`.

    Raises:
        Exception: Any, if a layer cannot run so, or has unknown shapes.
    """
    variables = variables_of(part.nodes)

    def call(contents: list) -> list:
        values = dict(zip(part.inputs, contents, strict=True))
        for node in part.nodes:
            run_node(node, values, training=True)
        return [values[x] for x in part.returned]

    def sources(contents: list) -> list:
        pairs = zip(part.inputs, contents, strict=True)
        return call_costs.floating(
            [x for value, x in pairs if value in differentiated]
        )

    run = call_costs.forward_and_backward(call, variables, sources)

    def forward(contents: list, values: list, arriving: list) -> tf.Tensor:
        with call_costs.standing_for(variables, values):
            return _number(call(contents))

    def passes(contents: list, values: list, arriving: list) -> tf.Tensor:
        given = iter(arriving)

        def gradient(output: tf.Tensor) -> tf.Tensor:
            # Layers may return what their specs do not tell.
            found = next(given, None)
            same = found is not None and found.shape == output.shape
            return found if same else tf.ones_like(output)

        outputs, gradients, _ = run(contents, values, gradient)
        # With the outputs: TensorFlow would leave out what gradients do not
        # need, such as the forward product of a dense layer.
        return _number([outputs, gradients])

    contents, values = keras.tree.map_structure(
        _tensor_spec, ([specs[x] for x in part.inputs], variables)
    )
    # Not constants, of which TensorFlow would simplify the backward pass:
    # `x * 1`, or their sum.
    arriving = [
        tf.TensorSpec([n or 1 for n in x.shape], x.dtype)
        for x in keras.tree.flatten([specs[x] for x in part.returned])
        if tf.as_dtype(x.dtype).is_floating
    ]
    like = contents, values, arriving
    concrete = tf.function(
        passes if backward else forward, autograph=False
    ).get_concrete_function(*like)
    return lambda device: _seconds(concrete, like, device)


def visit(
    node: Node, specs: dict[Value, Any], device: str = ""
) -> tuple[float, Any]:
    """A `visit` for `layer_costs.walk`: seconds of both passes, and the specs.

    Raises:
        ValueError: If the layer cannot be measured.
    """
    _, outputs = layer_costs.specs_of(node, specs)
    part = Graph([node], node.inputs, node.made)
    with uncounted.naming(node):
        known = {**specs, **dict(node.contents(outputs))}
        return traced(part, known, node.inputs)(device), outputs


def fastest(run: Callable[[], Any]) -> float:
    """Returns the seconds of the fastest of some calls, after one that traces.

    The minimum: other work of the machine can only add to the time.
    """
    run()
    return min(timeit.repeat(run, number=1, repeat=_NUM_TIMINGS))


def overhead(device: str) -> float:
    """Returns the seconds of a call that does nothing on a device."""
    concrete = tf.function(tf.identity, autograph=False).get_concrete_function(
        tf.TensorSpec(())
    )
    return _seconds(concrete, [tf.TensorSpec(())], device)


def _seconds(concrete: Callable, like: Any, device: str) -> float:
    """Returns the seconds of a traced function, given its arguments' specs."""
    # Within `fit` Keras builds a model as it traces the step.
    with tf.init_scope(), tf.device(device):
        args = keras.tree.map_structure(_made_up, like)
        return fastest(lambda: concrete(*args).numpy())


def _number(results: Any) -> tf.Tensor:
    """Returns a number that is known once all results are.

    To wait for the results themselves would be to send them here: over a
    network if the device is a worker's.
    """
    return tf.add_n(
        [
            tf.reduce_sum(tf.cast(tf.reshape(x, (-1,))[:1], "float32"))
            for x in tf.nest.flatten(results, expand_composites=True)
            if x is not None
        ]
        or [tf.zeros(())]
    )


def _tensor_spec(like: Any) -> tf.TensorSpec:
    if None in like.shape:
        raise ValueError(f"the shape of '{like.name}' is not known")
    return tf.TensorSpec(like.shape, like.dtype)


def _made_up(like: Any) -> tf.Tensor:
    dtype = tf.as_dtype(like.dtype)
    if dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(like.shape, (0, 1)), dtype)
    return tf.zeros(like.shape, dtype)
