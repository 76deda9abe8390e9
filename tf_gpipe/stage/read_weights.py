"""The weights that a stage reads, given to its phases as one tensor."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.function_call import FunctionCall
from tf_gpipe.stage.pack import pack
from tf_gpipe.stage.pack import unpack


class ReadWeights:
    """The weights that a traced stage reads, as a pack made once per step.

    If each call of a phase had the weights' handles as inputs, they would be
    most of the edges of a step's graph, and TensorFlow optimises, places and
    partitions a graph edge by edge.

        weights ---> pack ---+----------+----------+----> ...
                             v          v          v
                            F0.0       F0.1       B0.0

    Args:
        reads: List as from `TracedFunction.reads`.

    Attributes:
        handles: The handles of the weights, outside of the trace.
        read: The tensors of the trace that are read from them.
    """

    def __init__(self, reads: Sequence[tuple[tf.Tensor, list[tf.Tensor]]]):
        self.handles = [handle for handle, _ in reads]
        self.read = [x for _, tensors in reads for x in tensors]
        self._reads = reads
        self._packs: dict[Any, list[tf.Tensor]] = {}
        self._pack = FunctionCall(pack)

    def packed(self) -> list[tf.Tensor]:
        """Returns the pack of the weights, as `pack` returns it.

        It is made once per graph, and again after `read_again`.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph not in self._packs:
            self._packs[graph] = self.packed_of(self.handles)
            for x in self._packs[graph]:
                upstream.skip_reference_search(x.op)
        return self._packs[graph]

    def read_again(self) -> None:
        """Makes the next call of `packed` read the weights anew."""
        self._packs.clear()

    def packed_of(self, handles: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the pack of other variables in place of the weights.

        Args:
            handles: The handle that is read for each of `self.handles`.
        """
        graph = tf.compat.v1.get_default_graph()
        values = [
            tf.raw_ops.ReadVariableOp(
                resource=graph.capture(handle), dtype=tensors[0].dtype
            )
            for handle, (_, tensors) in zip(handles, self._reads, strict=True)
        ]
        # In a function of its own. If TensorFlow saw the operation that makes
        # the pack, it would note the pack's contents with each operation that
        # takes it.
        return self._pack(values)

    def unpack(self, packed: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the values in a pack, one for each tensor in `read`."""
        values = unpack(packed, [tensors[0] for _, tensors in self._reads])
        return [
            value
            for (_, tensors), value in zip(self._reads, values, strict=True)
            for _ in tensors
        ]
