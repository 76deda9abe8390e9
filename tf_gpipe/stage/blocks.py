"""Blocks of layers that repeat in a model, such as Transformer blocks."""

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
from tf_gpipe.stage.graph import NestedInput
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.likeness import Likeness

# The longest repeating pattern that is looked for, in layer calls.
_LONGEST = 64
# The most layers of a block. With more there are fewer function calls, but
# the trace is longer.
_LAYERS = 12
# All gradients of a block are in memory before any is added to its sum. This is
# accepted for this many weights, or for this share of the stage's.
_FEW_WEIGHTS = 2**18
_SHARE = 1 / 8


def find(
    graph: Graph, counts: Sequence[int], pieces: Sequence[int]
) -> list[Graph]:
    """Returns the model cut into blocks, of which several may be alike.

    Blocks are found as patterns in the sequence of layer calls that repeat
    back to back, such as a Transformer's or residual blocks. Several
    repetitions of a short pattern form one block.

        calls     E N A + N D D + N A + N D D + N A + N D D + H
        blocks    E (N A + N D D +) (N A + N D D +) (N A + N D D +) H

    Args:
        graph: The model.
        counts: Number of layer calls of each stage.
        pieces: The same calls divided more finely, such as at the bounds of
            recomputed ranges: the number of calls of each piece.

    Returns:
        List of blocks in the order of calls. Each lies within one piece, makes
        one value that later calls take, and has a small part of the stage's
        weights. A call that is in no repetition is a block of its own.
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


def likeness_of(block: Graph) -> Likeness:
    """Returns the `Likeness` of a block: its layers and their arguments."""
    made = [value for node in block.nodes for value in node.made]
    places = {value: i for i, value in enumerate([*block.inputs, *made])}
    calls = [_call(node, places) for node in block.nodes]
    return likeness.of((calls, [places[value] for value in block.returned]))


class _Sequence:
    """The layer calls of a model in order, in which repetitions are found."""

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
        # By pattern length: from each call on, how many consecutive calls are
        # like the call that many places later.
        self._same = {
            length: _run_lengths(kind[length:] == kind[:-length])
            for length in range(1, min(_LONGEST, len(kind) // 2) + 1)
        }

    def repeated(self, start: int) -> tuple[int, int]:
        """Returns the length and the repetitions of the pattern at a call.

        Of several patterns that start there it is the one that covers the most
        calls.
        """
        best = 1, 1
        for length, same in self._same.items():
            times = int(same[start]) // length + 1 if start < len(same) else 1
            if times * length > best[0] * best[1]:
                ends = range(start, start + (times + 1) * length, length)
                ones = [
                    len(self._graph.taken(*pair)) == 1
                    for pair in itertools.pairwise(ends)
                ]
                times = [*ones, False].index(False)
                if times > 1 and times * length > best[0] * best[1]:
                    best = length, times
        return best

    def blocks(self, start: int, end: int, length: int) -> list[Graph]:
        """Returns the blocks from `start` to `end`, of a repeating pattern."""
        layers = [x.layer for x in self._graph.nodes[start : start + length]]
        size = sum(max(1, len(upstream.layers_within(x))) for x in layers)
        most = max(1, _LAYERS // size)
        # A power of two, so that blocks of all stages have the same few
        # lengths.
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
        """Returns whether calls may form one block, by the rules of `find`."""
        stage = self._stage[start]
        most = max(_FEW_WEIGHTS, _SHARE * self._of_stage[stage])
        weights = self._weights[start:end]
        nodes = self._graph.nodes[start:end]
        trained = [x.layer for x, n in zip(nodes, weights, strict=True) if n]
        return end == start + 1 or (
            self._piece[start] == self._piece[end - 1]
            and sum(weights) <= most
            # Else gradients of a layer would be summed in another order.
            and len(set(map(id, trained))) == len(trained)
            and len(self._graph.taken(start, end)) == 1
        )

    def _block(self, start: int, end: int) -> Graph:
        nodes = self._graph.nodes[start:end]
        if len(nodes) == 1:
            return Graph(nodes, nodes[0].inputs, nodes[0].made)
        return self._graph.part(start, end)


def _num_weights(layer: Any) -> int:
    """Returns the number of trainable parameters of a layer."""
    if not isinstance(layer, keras.Layer):
        return 0
    return sum(math.prod(v.shape) for v in layer.trainable_variables)


def _kind(node: Node) -> Hashable:
    """Returns a key that is equal for calls that are alike."""
    places = {value: i for i, value in enumerate(node.inputs)}
    return likeness.of(_call(node, places)).form


def _call(node: Node, places: dict[Value, int]) -> tuple:
    """Returns a call as a tuple, in which numbers stand for the values."""

    def described(x: Value | NestedInput | None) -> tuple | None:
        if isinstance(x, NestedInput):
            converted = upstream.conversion_of_inputs(x.model), x.place
            return described(x.value), described(x.mask), converted
        return None if x is None else ("value", places[x])

    return node.layer, node.filled(described), len(node.made)


def _run_lengths(same: np.ndarray) -> np.ndarray:
    """Returns, for each element, how many consecutive ones from it are true."""
    lengths = np.zeros(len(same) + 1, int)
    for i in reversed(range(len(same))):
        lengths[i] = lengths[i + 1] + 1 if same[i] else 0
    return lengths
