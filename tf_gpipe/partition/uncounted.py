"""The error for a layer whose costs cannot be found."""

import contextlib
from collections.abc import Iterator

import keras

from tf_gpipe.stage.graph import Node


class UncountedError(ValueError):
    """The costs of a layer cannot be found.

    Attributes:
        reason: String, the message without the advice on how to give costs.
    """

    def __init__(self, reason: str, repair: str):
        super().__init__(f"{reason} {repair}")
        self.reason = reason


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """A scope that takes no costs: where it lacks one, users must choose."""
    try:
        yield
    except UncountedError as error:
        raise UncountedError(
            error.reason, "Choose the arguments of the pipeline yourself."
        ) from error


@contextlib.contextmanager
def naming(node: Node) -> Iterator[None]:
    """A scope that replaces any exception by one that names the layer.

    Raises:
        UncountedError: In place of whatever is raised within the scope.
    """
    try:
        yield
    except Exception as e:
        reason = (
            f"The cost of layer '{node.layer.name}' (of type "
            f"{type(node.layer).__name__}) cannot be found: {e}."
        )
        repair = (
            "costs with a function `cost(layer, input_shape)`, or the split as "
            "a list of layer counts."
        )
        specs = keras.tree.flatten([value.spec for value in node.inputs])
        if any(None in x.shape[1:] for x in specs if x is not None):
            # The layer may refuse `nominal_length` because it is longer than
            # its table of positions, or too short.
            reason += (
                " Sizes of its inputs that are not known count as the model's "
                "`nominal_length`: if it takes no such input, give another."
            )
            raise UncountedError(reason, f"Or give {repair}") from e
        raise UncountedError(reason, f"Give {repair}") from e
