"""Docstrings of pipelines that are taken from other classes."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from tf_gpipe.stage.call_overrides import is_ours


def with_keras_docstrings(cls: type) -> type:
    """Class decorator: copies Keras's docstrings to overriding methods.

    Python inherits a docstring only where it can find the class that defines
    the method, which Keras's decorators hide: `help(model.fit)` would be
    empty. A method whose arguments are `(self, *args, **kwargs)` gets Keras's
    signature, too.
    """
    for name in dir(cls):
        owners = [c for c in cls.__mro__ if name in vars(c)]
        if name.startswith("_") or not is_ours(owners[0]):
            continue
        mine: Any = vars(owners[0])[name]
        mine = getattr(mine, "__func__", mine)
        theirs = [vars(c)[name] for c in owners if not is_ours(c)]
        words = [x.__doc__ for x in theirs if x.__doc__]
        if words and not getattr(mine, "__doc__", None):
            mine.__doc__ = inspect.cleandoc(words[0])
        if theirs and _passes_on(mine):
            mine.__signature__ = inspect.signature(theirs[0])
    return cls


def _passes_on(method: Any) -> bool:
    """Returns whether a method's arguments are `(self, *args, **kwargs)`."""
    if not inspect.isfunction(method):
        return False
    kinds = [x.kind for x in inspect.signature(method).parameters.values()]
    return kinds[1:] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]


def with_arguments_of(other: type) -> Callable[[type], type]:
    """Returns a class decorator: lists the arguments of another pipeline.

    From `num_stages` to `plan`, in place of the line `**others` in `Args`.
    """

    def decorate(cls: type) -> type:
        shared = re.search(
            "^ +num_stages: .*?(?=^ +trainable: )",
            other.__doc__ or "",
            re.MULTILINE | re.DOTALL,
        )
        # Python leaves out docstrings with -OO.
        if shared and cls.__doc__:
            cls.__doc__ = re.sub(
                r" +\*\*others: .*\n", lambda _: shared[0], cls.__doc__
            )
        return cls

    return decorate
