"""State that layers keep in `tf.Variable`s, which Keras does not track.

Layers written for Keras 2 have such state. While a stage runs, its variables
hold the state of the micro-batch; afterwards their old values are restored.
"""

import contextlib
import re
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream

_WRITES = ("Assign", "ResourceScatter", "ResourceApply", "ResourceStrided")


class TensorFlowState:
    """A `tf.Variable` of a layer, with the attributes of a `keras.Variable`."""

    trainable = False

    def __init__(self, variable: tf.Variable):
        self.value = variable
        self.name = variable.name
        aggregation = variable.aggregation
        sums = aggregation == tf.VariableAggregation.SUM
        self.aggregation = "sum" if sums else "none"

    def assign(self, value: tf.Tensor) -> None:
        self.value.assign(value)


def find(
    layers: Iterable[keras.Layer], generators: bool = False
) -> list[tf.Variable]:
    """Returns the `tf.Variable`s that are attributes of layers.

    Those in lists, dictionaries and `tf.Module`s that are attributes too; each
    once.

    Args:
        layers: Layers, searched with the layers within them.
        generators: Boolean, whether to include the states of
            `tf.random.Generator`s, which advance from micro-batch to
            micro-batch.
    """
    found: dict[Any, tf.Variable] = {}
    for x in held(
        vars(x) for layer in layers for x in upstream.layers_within(layer)
    ):
        if generators and isinstance(x, tf.random.Generator):
            x = x.state
        if isinstance(x, tf.Variable):
            found[x.ref()] = x
    return list(found.values())


def held(
    objects: Iterable[Any], opened: tuple[type, ...] = (tf.Module,)
) -> Iterator[Any]:
    """Yields objects, those in lists and dictionaries, and so on; each once.

    Args:
        objects: The objects, such as dictionaries of attributes.
        opened: Types of objects whose attributes are yielded, too.
    """
    seen: set[int] = set()
    rest = list(objects)
    while rest:
        x = rest.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            rest += list(x.values())[::-1]
        elif isinstance(x, (list, tuple, set)):
            rest += list(x)[::-1]
        else:
            yield x
            if isinstance(x, opened):
                rest.append(vars(x))


@contextlib.contextmanager
def holding(
    values: Sequence[tuple[TensorFlowState, tf.Tensor]],
) -> Iterator[None]:
    """A scope in which variables hold other values, restored at its end."""
    before = [(x, x.value.read_value()) for x, _ in values]
    for x, value in values:
        x.assign(value)
    try:
        yield
    finally:
        for x, value in before:
            x.assign(value)


def written(operations: Iterable[tf.Operation]) -> dict[int, tf.Operation]:
    """Returns the operations that write variables.

    A dict whose keys are ids of the variables' handles, tensors of the
    operations' graph.
    """
    return {
        id(x): op
        for op in operations
        for i, x in enumerate(op.inputs)
        if x.dtype == tf.resource and _writes(op, i)
    }


def not_followed(
    operation: tf.Operation, layers: Iterable[keras.Layer]
) -> ValueError:
    """Returns the error for an assigned variable that `find` does not find.

    Args:
        operation: The operation that assigns.
        layers: Layers, one of which may be named in the operation's scopes.
    """
    # TensorFlow adds a number to repeated names of scopes.
    scopes = [re.sub(r"_\d+$", "", x) for x in operation.name.split("/")]
    scopes += operation.name.split("/")
    names = [x.name for x in layers if x.name in scopes]
    name = f"Layer '{names[-1]}'" if names else "A layer"
    return ValueError(
        f"{name} assigns to a `tf.Variable` as it runs (by operation "
        f"'{operation.name}'), which would be assigned once a micro-batch. A "
        "pipeline follows those that are attributes of a layer, where there "
        "is no strategy. Make it a weight of the layer: "
        "`self.add_weight(..., trainable=False)`."
    )


def _writes(operation: tf.Operation, place: int) -> bool:
    """Returns whether an operation writes the variable at an input's index."""
    if operation.type.startswith(_WRITES):
        return place == 0
    reads = upstream.read_only_places(operation)
    return (
        reads is not None
        and place not in reads
        and upstream.is_variable(operation.inputs[place])
    )
