"""Comparison of traces: do two functions compute the same of their variables?

The names of operations and functions, which contain those of layers, are left
out.
"""

import hashlib
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import tensorflow as tf

# Attributes of operations and functions that name others of the graph.
_NAMES = frozenset(
    (
        *("_class", "_user_specified_name"),
        *("forward_function_name", "backward_function_name"),
    )
)
# Names a Python function that makes the operation's gradient.
_GRADIENT = "_gradient_op_type"


class Description(NamedTuple):
    """What a traced graph computes. Equal ones compute the same."""

    operations: bytes
    captures: tuple
    outputs: Any
    # Whether Python functions make gradients of operations. If so, the graphs
    # are the same, but their gradients may differ.
    has_custom_gradients: bool


def described(
    graph: Any,
    outputs: Any,
    captured: Callable[[tf.Tensor], Hashable],
    num_operations: int | None = None,
) -> Description:
    """Returns the `Description` of a graph.

    Args:
        graph: The `tf.Graph` of a concrete function.
        outputs: Nested structure of the graph's tensors and other objects.
        captured: Function from each tensor that the graph captures to an object
            that is equal for tensors which stand for each other.
        num_operations: Integer, how many operations of the graph are described,
            from the first one on. `None` for all of them.
    """
    definition = graph.as_graph_def()
    nodes = definition.node[:num_operations]
    numbers = _numbers(nodes)

    def place(x: Any) -> Any:
        if not isinstance(x, tf.Tensor):
            return x
        return numbers[x.op.name], x.value_index

    functions = _Functions(definition.library.function)
    operations = _digest(functions.operations(nodes, numbers))
    return Description(
        operations,
        tuple(
            (place(x), captured(outer))
            for outer, x in graph.captures
            if x.op.name in numbers
        ),
        tf.nest.map_structure(place, outputs),
        functions.have_custom_gradients,
    )


class _Functions:
    """Descriptions of operations, and of the functions that these call."""

    def __init__(self, definitions: Iterable[Any]):
        self._definitions = {x.signature.name: x for x in definitions}
        self._found: dict[str, Hashable] = {}
        self.have_custom_gradients = False

    def operations(
        self, nodes: Iterable[Any], numbers: Mapping[str, int]
    ) -> tuple:
        """Describes operations, of a graph or of a function's body."""
        return tuple(
            (
                x.op,
                x.device,
                tuple(_numbered(name, numbers) for name in x.input),
                self._attributes(x.attr),
            )
            for x in nodes
        )

    def _attributes(self, attributes: Mapping[str, Any]) -> tuple:
        self.have_custom_gradients |= _GRADIENT in attributes
        return tuple(
            (name, self._value(attributes[name]))
            for name in sorted(attributes)
            if name != _GRADIENT and name not in _NAMES
        )

    def _value(self, value: Any) -> Hashable:
        called = [value.func] if value.HasField("func") else value.list.func
        if called:
            return tuple(
                (self._function(x.name), self._attributes(x.attr))
                for x in called
            )
        # Shortened: it may hold a large constant.
        return _digest(value.SerializeToString(deterministic=True))

    def _function(self, name: str) -> Hashable:
        if name not in self._definitions:
            return name
        if name not in self._found:
            # A function that calls itself is described by its name there.
            self._found[name] = name
            described = self._described(self._definitions[name])
            self._found[name] = _digest(described)
        return self._found[name]

    def _described(self, function: Any) -> tuple:
        arguments = function.signature.input_arg
        numbers = _numbers([*arguments, *function.node_def])
        return (
            tuple(x.type for x in arguments),
            self.operations(function.node_def, numbers),
            tuple(
                _numbered(function.ret[x.name], numbers)
                for x in function.signature.output_arg
            ),
            tuple(
                sorted(map(numbers.__getitem__, function.control_ret.values()))
            ),
            self._attributes(function.attr),
        )


def _digest(description: Hashable) -> bytes:
    return hashlib.sha256(repr(description).encode()).digest()


def _numbers(nodes: Iterable[Any]) -> dict[str, int]:
    """Returns numbers in place of names, for operations and arguments."""
    return {x.name: i for i, x in enumerate(nodes)}


def _numbered(name: str, numbers: Mapping[str, int]) -> tuple:
    """Returns the name of an input, with a number for that of its operation.

    Names are such as "x", "x:1", "x:output:0" and, of a control dependency,
    "^x".
    """
    operation, *place = name.removeprefix("^").split(":")
    return name[:1] == "^", numbers[operation], *place
