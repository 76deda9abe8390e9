"""What an operation does when it runs, or one in a function that it runs.

Loops and branches run functions, whose operations count as well. An operation
is told by its `NodeDef`, and functions are found in a library, a dict from
names to `FunctionDef`s.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tf_gpipe.devices.functions import CALLS_PYTHON

# Operations that call Python and may give other results for the same inputs.
_MAY_DIFFER = CALLS_PYTHON - {"PyFuncStateless"}
# Prefixes of operations that draw random numbers. Others have an attribute
# "seed2".
_DRAWS = (
    "Rng",
    "StatefulRandom",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
)


def functions_of(node: Any) -> list[str]:
    """Returns the names of the functions that an operation runs."""
    return [
        function.name
        for x in node.attr.values()
        for function in (x.func, *x.list.func)
        if function.name
    ]


def may_differ(node: Any, library: Mapping[str, Any]) -> bool:
    """Returns whether an operation may give another result when run again.

    Because it draws random numbers, or calls Python.
    """

    def differs(node: Any) -> bool:
        return (
            "seed2" in node.attr
            or node.op.startswith(_DRAWS)
            or node.op in _MAY_DIFFER
        )

    return _any_within(node, library, differs)


def calls_python(node: Any, library: Mapping[str, Any]) -> bool:
    """Returns whether an operation calls Python."""
    return _any_within(node, library, lambda node: node.op in CALLS_PYTHON)


def _any_within(
    node: Any, library: Mapping[str, Any], is_so: Callable[[Any], bool]
) -> bool:
    return is_so(node) or any(
        _any_within(inner, library, is_so)
        for name in functions_of(node)
        if name in library
        for inner in library[name].node_def
    )
