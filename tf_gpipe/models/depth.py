"""The repair added to errors of models deeper than the recursion limit."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def naming_recursion_limit() -> Iterator[None]:
    """A scope that adds the repair to a `RecursionError`.

    Keras walks a graph from its outputs to its inputs by recursion.
    """
    try:
        yield
    except RecursionError as e:
        e.add_note(
            "Keras goes through layers that follow one another by recursion, "
            "and this model has more of them than Python's recursion limit of "
            f"{sys.getrecursionlimit()} allows. Raise the limit before the "
            "layers are called: `sys.setrecursionlimit(100_000)`. Plain Keras "
            "needs that, too."
        )
        raise
