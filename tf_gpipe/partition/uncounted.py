"""What is said of a layer whose costs cannot be found."""

import contextlib
from collections.abc import Iterator

import keras

from tf_gpipe.stage.graph import Node


@contextlib.contextmanager
def naming(node: Node) -> Iterator[None]:
    """Returns a scope whose errors say which layer has no cost."""
    try:
        yield
    except Exception as e:
        repair = (
            "costs with a function `cost(layer, input_shape)`, or the split as "
            "a list of layer counts."
        )
        specs = keras.tree.flatten([value.spec for value in node.inputs])
        if any(None in x.shape[1:] for x in specs if x is not None):
            # Too long, it may be, for a table of positions, or too short.
            repair = (
                "Sizes of its inputs that are not known count as the model's "
                "`nominal_length`: if it takes no such input, give another. Or "
                f"give {repair}"
            )
        else:
            repair = f"Give {repair}"
        raise ValueError(
            f"The cost of layer '{node.layer.name}' (of type "
            f"{type(node.layer).__name__}) cannot be found: {e}. {repair}"
        ) from e
