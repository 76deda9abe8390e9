"""The peak memory of a graph's operations, run one by one in graph order."""

import collections
from collections.abc import Collection
from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.partition import flops
from tf_gpipe.partition.tensor_memory import memory_owner
from tf_gpipe.partition.tensor_memory import size_in_bytes

# Operations that write their result into the memory of an operand that no later
# operation reads, as their kernels do on every kind of device.
_IN_PLACE = frozenset(
    """
    Add AddN AddV2 BiasAdd Div DivNoNan Elu EluGrad Erf Exp InvGrad LeakyRelu
    LeakyReluGrad Log LogSoftmax Maximum Minimum Mul MulNoNan Neg Pow RealDiv
    Reciprocal Relu Relu6 Relu6Grad ReluGrad Rsqrt RsqrtGrad Selu SeluGrad
    Sigmoid SigmoidGrad Softmax SoftplusGrad Sqrt SqrtGrad Square
    SquaredDifference Sub Tanh TanhGrad
    """.split()
)


def peak(
    operations: Collection[tf.Operation], results: Sequence[tf.Tensor]
) -> int:
    """Returns the peak bytes of the tensors that operations make.

    The operations run one after another, in the order of their graph. A tensor
    lives until the last operation that reads it has run. Tensors that other
    operations made and the workspaces of kernels are not counted.

    Args:
        operations: Operations of one graph.
        results: Tensors that live to the end.
    """
    own = set(operations)
    if not own:
        return 0
    ordered = [x for x in next(iter(own)).graph.get_operations() if x in own]
    uses = collections.Counter(x.name for x in map(memory_owner, results))
    for op in ordered:
        uses.update({memory_owner(x).name for x in op.inputs})
    held: dict[str, int] = {}
    most = 0
    for op in ordered:
        taken = {x.name: x for x in map(memory_owner, op.inputs)}
        inside = max(
            (
                peak(graph.get_operations(), graph.outputs)
                for graph in flops.called_by(op)
            ),
            default=0,
        )
        made = {
            x.name: size_in_bytes(x)
            for x in op.outputs
            if op.type != "Placeholder"
            and x.dtype not in (tf.variant, tf.resource)
            and x.shape.rank is not None
            and memory_owner(x) is x
        }
        if op.type in _IN_PLACE:
            over = next(
                (
                    name
                    for name in taken
                    if uses[name] == 1 and held.get(name) == sum(made.values())
                ),
                None,
            )
            if over is not None:
                held[over] = 0
        held.update(made)
        most = max(most, sum(held.values()) + inside)
        uses.subtract(list(taken))
        for name in (*taken, *made):
            if uses[name] <= 0:
                held.pop(name, None)
    return most
