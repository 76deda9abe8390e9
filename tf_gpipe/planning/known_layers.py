"""A model's layers as copies without values, and their costs."""

import dataclasses
import functools
import math
from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.partition import flops
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import stage_costs
from tf_gpipe.partition.call_costs import LayerCosts
from tf_gpipe.partition.fitted_remat import FittedRemat
from tf_gpipe.partition.memory_limit import MemoryLimit
from tf_gpipe.partition.parameter_bytes import ParameterBytes
from tf_gpipe.partition.parameter_bytes import WeightBytes
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.planning import planned_graph
from tf_gpipe.schedule.tasks import Schedule


class KnownLayers:
    """Copies of a model's layers without values, and their costs.

    The arguments are those of `plan`.

    Attributes:
        graph: `Graph` of the copies.
        names: List of the names of the layers, one a call.
        weights: List of the weights that no earlier call uses, one a call.
        parameters: `ParameterBytes`.
        input_spec: Nested structure of `KerasTensor`s, the mini-batch.
        output_spec: Likewise, what the model returns for it.
        rows: Integer, rows of the mini-batch.
        nominal_length: As of `Plan`.
        sampled: List of the sizes of a micro-batch, in rows, for which layers
            are traced; their costs for others are interpolated. If empty, each
            size is traced.
    """

    def __init__(self, model, input_spec, optimizer, dtype_policy=None):
        graph, self.input_spec, left_open = planned_graph.of(model, input_spec)
        self.nominal_length: int | list[int] | None = None
        if left_open:
            first, *others = sorted(left_open)
            self.nominal_length = [first, *others] if others else first
        self.names = [node.layer.name for node in graph.nodes]
        copies, specs = planned_graph.copies(graph, optimizer, dtype_policy)
        for value, spec in specs.items():
            value.spec = spec
        self.weights: list[list] = []
        # From the id of each of the user's layers to its copy.
        own: dict[int, Any] = {}
        self._originals: dict[int, Any] = {}
        used: list[dict[Hashable, WeightBytes]] = []
        seen: set[Hashable] = set()
        for node, (copy, sizes) in zip(graph.nodes, copies, strict=True):
            keys = _keys_of_weights(node.layer, copy)
            used.append(dict(zip(keys, sizes, strict=True)))
            pairs = zip(keys, getattr(copy, "weights", []), strict=True)
            self.weights.append([v for key, v in pairs if key not in seen])
            seen.update(keys)
            if id(node.layer) not in own:
                # Equal calls share one copy.
                twin = upstream.renamed(copy, node.layer.name)
                own[id(node.layer)] = twin
                self._originals[id(twin)] = node.layer
        self.parameters = ParameterBytes(used)
        nodes = [
            dataclasses.replace(node, layer=own[id(node.layer)])
            for node in graph.nodes
        ]
        self.graph = dataclasses.replace(graph, nodes=nodes)
        self.output_spec = keras.tree.map_structure(
            lambda x: x.spec, graph.outputs
        )
        self.rows = keras.tree.flatten(graph.inputs[0].spec)[0].shape[0]
        self.sampled: list[int] = []
        # Cached by the rows of a micro-batch.
        self._traced = functools.cache(self._trace)
        self.costs = functools.cache(self._costs)

    def original(self, copy: keras.Operation) -> keras.Operation:
        """Returns the user's layer of a copy; the copy if that is not built."""
        layer = self._originals[id(copy)]
        return layer if getattr(layer, "built", True) else copy

    def micro_batch(self, num_micro_batches: int, num_replicas: int = 1) -> int:
        """Returns the rows of the largest micro-batch."""
        return math.ceil(self.rows / num_replicas / num_micro_batches)

    def stages(
        self, counts: Sequence[int], rows: int
    ) -> list[stage_costs.StageCosts]:
        """Returns the costs of stages for micro-batches of `rows` rows."""
        costs, sizes = self.costs(rows)
        return stage_costs.find(
            self.graph.parts(list(counts)), costs, sizes.__getitem__
        )

    def recomputation(
        self,
        rows: int,
        schedule: Schedule,
        limit: MemoryLimit,
        work: Sequence[tuple[float, float]] | None = None,
    ) -> FittedRemat:
        """Returns what decides the calls to recompute within a limit.

        For micro-batches of `rows` rows; `work` is as of `FittedRemat`.
        """
        # Traced, not interpolated, as models do: they must decide the same.
        costs, sizes = self._traced(rows)
        return FittedRemat(
            self.graph,
            costs,
            sizes.__getitem__,
            self.parameters,
            schedule,
            schedule.devices,
            limit,
            work,
        )

    def _trace(self, rows: int) -> tuple[list[LayerCosts], dict[Any, int]]:
        costs, specs = layer_costs.trace(self.graph, rows)
        sizes = {x: size_in_bytes(y) for x, y in specs.items()}
        return costs, sizes

    def _costs(self, rows: int) -> tuple[list[LayerCosts], dict[Any, int]]:
        """Returns the `LayerCosts` of calls, and the bytes of each `Value`."""
        if not self.sampled or rows in self.sampled:
            return self._traced(rows)
        low, high = min(self.sampled), max(self.sampled)
        (a, a_sizes), (b, b_sizes) = self._traced(low), self._traced(high)
        share = (rows - low) / (high - low)

        def between(x, y):
            if isinstance(x, flops.Traffic):
                return flops.Traffic(*map(between, x, y))
            if isinstance(x, (bool, tuple)):
                return x
            return round(x + share * (y - x))

        made: dict[int, LayerCosts] = {}
        for x, y in zip(a, b, strict=True):
            # Equal calls share one `LayerCosts`.
            if id(x) not in made:
                made[id(x)] = LayerCosts(
                    *(
                        between(getattr(x, field.name), getattr(y, field.name))
                        for field in dataclasses.fields(LayerCosts)
                    )
                )
        costs = [made[id(x)] for x in a]
        return costs, {x: between(y, b_sizes[x]) for x, y in a_sizes.items()}


def _keys_of_weights(layer: Any, copy: Any) -> list[Hashable]:
    """Returns a key of each weight of a copy, equal for weights that are one.

    Two of the user's layers may hold the same layer or, once it is built, the
    same weight; their copies hold copies of it.
    """
    weights = getattr(copy, "weights", [])
    if not weights:
        return []
    holders = upstream.layers_within(copy), upstream.layers_within(layer)
    if len(holders[0]) != len(holders[1]):
        # Layers that the layer makes as it is built, which no other has.
        return [(id(layer), i) for i, _ in enumerate(weights)]
    found: dict[int, Hashable] = {}
    for new, old in zip(*holders, strict=True):
        mine, theirs = map(upstream.own_variables, (new, old))
        for i, v in enumerate(mine):
            built = len(mine) == len(theirs)
            found.setdefault(id(v), id(theirs[i]) if built else (id(old), i))
    return [found.get(id(v), (id(layer), i)) for i, v in enumerate(weights)]
