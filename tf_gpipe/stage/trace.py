"""What a traced stage consists of."""

from typing import NamedTuple

from tf_gpipe.stage.function import Result


class Trace(NamedTuple):
    """Tensors of a traced stage and, if it has one, of its gradient."""

    num_inputs: int  # tensors among the stage's inputs, without `carried`
    num_forward: int  # operations of the graph in the forward pass
    ends: list[int]  # operations before the first and after each layer call
    result: Result
    # A placeholder for the gradient, or None, for each of `result.targets`.
    # This and the next two lists are empty if the trace has no gradient.
    output_gradients: list
    input_gradients: list  # a gradient or None for each flat input
    variable_gradients: list  # pairs of a variable and its gradient

    def operations_of(self, calls: range) -> range:
        """Returns the places in the graph of the operations of layer calls.

        Operations before the first call of the stage count as its own, and
        those after the last call likewise.
        """
        ends = [0, *self.ends[1:-1], self.num_forward]
        return range(ends[calls.start], ends[calls.stop])
