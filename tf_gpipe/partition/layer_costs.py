"""FLOPs and bytes of the layer calls of a graph, each of equal calls once."""

import math
from collections.abc import Callable
from collections.abc import Hashable
from typing import Any

import keras

from tf_gpipe import progress
from tf_gpipe import upstream
from tf_gpipe.partition import uncounted
from tf_gpipe.partition.call_costs import Specs
from tf_gpipe.partition.call_costs import trace_call
from tf_gpipe.stage import likeness
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import NestedInput
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value

# Stands for every unknown size of a tensor except that of its batch axis.
NOMINAL_LENGTH = 128
# Rows of a micro-batch where the model's inputs do not fix the batch size.
NOMINAL_ROWS = 32

# From the settings that traces depend on to the results for layers of Keras
# alone, in any graph, by the `key` of calls. At this many all are forgotten.
_of_keras: dict[tuple, dict[Hashable, tuple]] = {}
_MOST_OF_KERAS = 1000


def rows_of_micro_batch(size: int | None, num_micro_batches: int) -> int:
    """Returns the rows of the largest micro-batch of a batch.

    Args:
        size: Integer, the batch size; `None`, if it is unknown, leads to
            `NOMINAL_ROWS`.
        num_micro_batches: Integer.
    """
    if size is None:
        return NOMINAL_ROWS
    return math.ceil(size / num_micro_batches)


def trace(
    graph: Graph, rows: int | None = None, length: int = NOMINAL_LENGTH
) -> tuple[list, Specs]:
    """Returns the `LayerCosts` of each call, and the specs of all values.

    Nothing is allocated or run: the layers must be built, but their variables
    need no values. The costs are cached for as long as the graph lives, those
    of Keras's own layers also for other graphs. For `rows` and `length` see
    `walk`.

    Raises:
        ValueError: If the costs of a layer cannot be found.
    """
    settings = upstream.settings_of_traces()
    shared = None
    if settings is not None:
        formats = keras.config.floatx(), keras.config.image_data_format()
        shared = _of_keras.setdefault((settings, formats), {})
        if len(shared) > _MOST_OF_KERAS:
            shared.clear()
    found, specs = walk(
        graph, trace_call, rows, length, graph.known_costs, shared
    )
    # Equal calls share one `LayerCosts`.
    alone = {id(x): x.forward_alone() for x in found}
    return [
        x if differentiated else alone[id(x)]
        for x, differentiated in zip(found, graph.differentiated(), strict=True)
    ], specs


def walk(
    graph: Graph,
    visit: Callable[[Node, Specs], tuple],
    rows: int | None = None,
    length: int = NOMINAL_LENGTH,
    known: dict[Hashable, tuple] | None = None,
    shared: dict[Hashable, tuple] | None = None,
) -> tuple[list, Specs]:
    """Visits each layer call of a graph, with the specs of its inputs.

    Equal calls (see `key`) are visited once, so that a thousand equal blocks
    take no longer than one.

    Args:
        graph: `Graph` of built layers.
        visit: Function of a `Node` and a dictionary from `Value`s to specs.
            It returns a result of any kind and the specs of the outputs.
        rows: Integer, the batch size; by default that of the graph's inputs,
            or 1 where it is unknown.
        length: Integer, stands for all other unknown sizes, of the graph's
            inputs and of the outputs of layers.
        known: Dictionary from keys of calls to what `visit` returned, a cache
            that is read and added to.
        shared: Like `known`, for calls of Keras's own layers, in any graph.
            Defaults to `known`.

    Returns:
        List with the result of `visit` for each call, and a dictionary from
        all `Value`s to their specs.
    """
    known = {} if known is None else known
    shared = known if shared is None else shared
    specs = {
        value: _with_sizes(_with_rows(value.spec, rows), 1, length)
        for value in graph.inputs
    }
    tensors = keras.tree.flatten(list(specs.values()))
    batch = {n for x in tensors for n in x.shape[:1]}
    found = []
    for node in progress.track(graph.nodes, "looking at layers"):
        form, of_keras = key(node, specs)
        cache = shared if of_keras else known
        one = cache.get(form)
        if one is None:
            one = cache[form] = visit(node, specs)
        result, outputs = one
        found.append(result)
        outputs = _with_sizes(outputs, max(batch, default=1), length)
        specs.update(node.contents(outputs))
    return found, specs


def specs_of(node: Node, specs: Specs) -> tuple[None, Any]:
    """A `visit` for `walk`: no result, and the output specs."""
    args, kwargs = node.arguments(specs)
    with uncounted.naming(node):
        return None, upstream.spec_function(node.layer)(*args, **kwargs)


def _with_rows(spec: Any, rows: int | None) -> Any:
    """Returns a spec with the batch size `rows`; unchanged if it is `None`."""
    return keras.tree.map_structure(
        lambda x: keras.KerasTensor(
            (*(rows or n for n in x.shape[:1]), *x.shape[1:]), x.dtype
        ),
        spec,
    )


def _with_sizes(spec: Any, rows: int, length: int) -> Any:
    """Returns a spec with `rows` and `length` in place of unknown sizes."""

    def filled(x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor) or None not in x.shape:
            return x
        shape = [n or (length if i else rows) for i, n in enumerate(x.shape)]
        return keras.KerasTensor(shape, x.dtype)

    return keras.tree.map_structure(filled, spec)


def key(node: Node, specs: Specs) -> tuple[Hashable, bool]:
    """Returns a key that is the same for calls with the same costs.

    They are calls of layers with equal attributes, on equal arguments: tensors
    of equal dtypes and shapes. The Boolean tells whether the key may outlive
    the layers: all their code is that of libraries.
    """
    numbers = {value: i for i, value in enumerate(node.inputs)}

    def described(x: Value | NestedInput) -> list:
        return [
            *((numbers[value], _described(specs[value])) for value in x.values),
            _described(x.content(specs)),
        ]

    layer = node.layer
    # Until it is built, a layer alone knows what it will train.
    trained = [x.trainable for x in upstream.layers_within(layer)]
    arguments = node.filled(described)
    found = likeness.of((layer, trained, arguments), in_costs=True)
    return found.form, found.of_keras


def _described(spec: Any) -> Any:
    return keras.tree.map_structure(
        lambda x: f"{x.dtype}{tuple(x.shape)}", spec
    )
