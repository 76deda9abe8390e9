"""Blocks of layers that repeat in a pipeline."""

import collections
import itertools
import math
from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_gpipe import upstream
from tf_gpipe.stage import likeness
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.likeness import Likeness

# Calls of layers in what repeats. A longer pattern is not looked for.
_LONGEST = 64
# Layers in a block. More make fewer calls, and a longer trace.
_LAYERS = 12
# The gradients of a block are there together before any is added to its sum.
# So many weights do not matter, or an eighth of a stage's.
_FEW_WEIGHTS = 2**18
_SHARE = 1 / 8


def find(
    graph: Graph, counts: Sequence[int], pieces: Sequence[int]
) -> list[Graph]:
    """Returns blocks that may be alike, in the order of the pipeline.

    Such as a Transformer's, or residual ones of a few calls each. In the
    sequence of all calls patterns are found that follow upon themselves. Short
    ones are a block several at a time.

        calls     E N A + N D D + N A + N D D + N A + N D D + H
        blocks    E (N A + N D D +) (N A + N D D +) (N A + N D D +) H

    Args:
        graph: The model.
        counts: How many of its calls each stage has.
        pieces: Parts of these counts, such as calls that are recomputed.

    Returns:
        List of blocks, each within a piece, with one value that others take
        and a small part of the stage's weights. Calls that repeat nothing next
        to them are a block each.
    """
    sequence = _Sequence(graph, counts, pieces)
    blocks = []
    start = 0
    while start < len(graph.nodes):
        length, times = sequence.repeated(start)
        end = start + length * times
        blocks += sequence.blocks(start, end, length)
        start = end
    return blocks


def likeness_of(block: Graph) -> Likeness | None:
    """Returns the likeness of a block: of its layers and their arguments."""
    made = [value for node in block.nodes for value in node.made]
    places = {value: i for i, value in enumerate([*block.inputs, *made])}
    calls = [_call(node, places) for node in block.nodes]
    return likeness.of((calls, [places[value] for value in block.outputs]))


class _Sequence:
    """The calls of a model, one after the other."""

    def __init__(
        self, graph: Graph, counts: Sequence[int], pieces: Sequence[int]
    ):
        self._graph = graph
        self._stage, self._piece = (
            [k for k, count in enumerate(each) for _ in range(count)]
            for each in (counts, pieces)
        )
        self._weights = [_num_weights(node.layer) for node in graph.nodes]
        self._of_stage: dict[int, int] = collections.Counter()
        for k, count in zip(self._stage, self._weights, strict=True):
            self._of_stage[k] += count
        kinds: dict[Hashable, int] = {}
        kind = np.array(
            [kinds.setdefault(_kind(x), len(kinds)) for x in graph.nodes]
        )
        # By length: how many calls from each on are as those after the length.
        self._same = {
            length: _run_lengths(kind[length:] == kind[:-length])
            for length in range(1, min(_LONGEST, len(kind) // 2) + 1)
        }

    def repeated(self, start: int) -> tuple[int, int]:
        """Returns the length of what repeats from a call on, and how often."""
        best = 1, 1
        for length, same in self._same.items():
            times = int(same[start]) // length + 1 if start < len(same) else 1
            if times * length > best[0] * best[1]:
                ends = range(start, start + (times + 1) * length, length)
                ones = [
                    len(self._taken(*pair)) == 1
                    for pair in itertools.pairwise(ends)
                ]
                times = [*ones, False].index(False)
                if times > 1 and times * length > best[0] * best[1]:
                    best = length, times
        return best

    def blocks(self, start: int, end: int, length: int) -> list[Graph]:
        """Returns the blocks of a pattern's calls, from `start` to `end`."""
        layers = [x.layer for x in self._graph.nodes[start : start + length]]
        size = sum(map(_num_layers, layers))
        most = max(1, _LAYERS // size)
        # Powers of two, so that those of all stages have the same few lengths.
        most = 2 ** int(math.log2(most))
        found = []
        while start < end:
            times = most
            while times and not (
                start + times * length <= end
                and self._is_block(start, start + times * length)
            ):
                times //= 2
            if times:
                found.append(self._block(start, start + times * length))
            else:
                found += [
                    self._block(start + i, start + i + 1) for i in range(length)
                ]
            start += max(1, times) * length
        return found

    def _is_block(self, start: int, end: int) -> bool:
        """Returns whether calls are a block: one alone, or as `find` says."""
        stage = self._stage[start]
        most = max(_FEW_WEIGHTS, _SHARE * self._of_stage[stage])
        return end == start + 1 or (
            self._piece[start] == self._piece[end - 1]
            and sum(self._weights[start:end]) <= most
            and len(self._taken(start, end)) == 1
        )

    def _taken(self, start: int, end: int) -> list[Value]:
        """Returns the values of some calls that others take."""
        return [
            value
            for node in self._graph.nodes[start:end]
            for value in node.made
            if self._graph.last.get(value, start) >= end
        ]

    def _block(self, start: int, end: int) -> Graph:
        nodes = self._graph.nodes[start:end]
        if len(nodes) == 1:
            return Graph(nodes, nodes[0].inputs, nodes[0].made)
        made = {value for node in nodes for value in node.made}
        inputs = dict.fromkeys(x for node in nodes for x in node.inputs)
        return Graph(
            nodes,
            [value for value in inputs if value not in made],
            self._taken(start, end),
        )


def _num_layers(layer: Any) -> int:
    """Returns the number of layers within one, and itself."""
    if not isinstance(layer, keras.Layer):
        return 1
    return len(upstream.layers_within(layer))


def _num_weights(layer: Any) -> int:
    """Returns how many numbers a layer trains."""
    if not isinstance(layer, keras.Layer):
        return 0
    return sum(math.prod(v.shape) for v in layer.trainable_variables)


def _kind(node: Node) -> Hashable:
    """Returns what calls must have in common to be alike."""
    places = {value: i for i, value in enumerate(node.inputs)}
    found = likeness.of(_call(node, places))
    return node if found is None else found.form


def _call(node: Node, places: dict[Value, int]) -> tuple:
    """Returns a call, with places of values in place of them."""
    arguments = keras.tree.map_structure(
        lambda x: ("value", places[x]) if isinstance(x, Value) else x,
        (node.args, node.kwargs),
    )
    return node.layer, arguments, len(node.made)


def _run_lengths(same: np.ndarray) -> np.ndarray:
    """Returns how many elements from each one on are true."""
    lengths = np.zeros(len(same) + 1, int)
    for i in reversed(range(len(same))):
        lengths[i] = lengths[i + 1] + 1 if same[i] else 0
    return lengths
