"""A traced function, of which parts run as functions of their own."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.atomic_function import (
    AtomicFunction,
)

from tf_gpipe.function_call import emit_call
from tf_gpipe.function_call import has_side_effects


class TracedFunction:
    """A traced function, of which parts run as functions of their own.

    A part computes some tensors of the traced graph from others, by those
    operations alone that are between them:

        a --> f --> g --> h          part([f], [h]) runs g and h

    What follows from variables and constants alone every part has for itself,
    and need not be fed.

    Args:
        concrete: Concrete function of `tf.function`. It is never run.
        varying: List of its graph's tensors that are not the same at every
            time a part runs.
    """

    def __init__(self, concrete: Any, varying: Iterable[tf.Tensor]):
        self._concrete = concrete
        self._graph = concrete.graph
        self._definition = concrete.function_def
        # Of the inputs' operations, the names that the definition has.
        self._arguments = {
            x.op.name: arg
            for x, arg in zip(
                concrete.graph.inputs,
                self._definition.signature.input_arg,
                strict=True,
            )
        }
        self._captures = {id(x): outer for outer, x in concrete.graph.captures}
        varying_operations = self.users(varying)
        self._constant = {
            op
            for op in self._graph.get_operations()
            if op not in varying_operations
            and (not op.op_def.is_stateful or op.type == "ReadVariableOp")
        }
        self._num_parts = 0

    def users(self, tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
        """Returns the operations that follow from tensors, their own too."""
        return _reach(
            [x.op for x in tensors],
            lambda op: [user for x in op.outputs for user in x.consumers()],
        )

    def makers(
        self,
        tensors: Iterable[tf.Tensor],
        effects: Iterable[tf.Operation] = (),
    ) -> set[tf.Operation]:
        """Returns the operations that tensors follow from.

        Without those that every part has for itself.

        Args:
            tensors: Tensors of the graph.
            effects: Operations of the graph, which are returned as well.
        """
        return _reach(
            [*(x.op for x in tensors), *effects],
            lambda op: [x.op for x in op.inputs],
            self._constant,
        )

    def effects(self) -> set[tf.Operation]:
        """Returns the operations that must run whoever uses their results."""
        return {
            op
            for op in self._graph.control_outputs
            if op not in self._constant and op.type != "ReadVariableOp"
        }

    def handed(
        self,
        fetches: Sequence[tf.Tensor],
        done: Collection[tf.Operation],
        effects: Iterable[tf.Operation] = (),
    ) -> list[tf.Tensor]:
        """Returns the results of `done` operations that `fetches` need.

        A part that is fed these runs none of `done` again.
        """
        rest = self.makers(fetches, effects) - set(done)
        needed = [*fetches, *(x for op in rest for x in op.inputs)]
        found = {
            id(x): x
            for x in needed
            if x.op not in rest and x.op not in self._constant
        }
        # A set of operations has no order, and the same step the same graph.
        return sorted(found.values(), key=lambda x: (x.op.name, x.value_index))

    def part(
        self,
        feeds: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        effects: Iterable[tf.Operation] = (),
    ) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
        """Returns a part as a function.

        Args:
            feeds: List of tensors of the graph.
            fetches: List of tensors of the graph, that follow from `feeds`.
            effects: Operations of the graph that the part runs as well.

        Returns:
            Function that emits a call of the part: from the list of values of
            `feeds` to those of `fetches`.
        """
        effects = list(effects)
        known = {id(x) for x in feeds}
        captured: dict[int, tf.Tensor] = {}

        def before(tensors: Iterable[tf.Tensor]) -> list[tf.Operation]:
            captured.update(
                {id(x): x for x in tensors if id(x) in self._captures}
            )
            return [
                x.op
                for x in tensors
                if id(x) not in known and id(x) not in self._captures
            ]

        operations = _reach(
            [*before(fetches), *effects], lambda op: before(op.inputs)
        )
        definition = self._cut(
            [*feeds, *captured.values()], fetches, operations, effects
        )
        function = self._function(definition)
        outer = [self._captures[i] for i in captured]

        def call(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            # Which keeps it, and what it calls, as long as it is needed.
            graph = tf.compat.v1.get_default_graph()
            graph._add_function_recursive(function)
            return emit_call(
                definition.signature.name,
                [*values, *outer],
                fetches,
                stateless=not has_side_effects(operations),
                xla=definition.attr["_XlaMustCompile"].b,
            )

        return call

    def _cut(
        self,
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
        operations: Collection[tf.Operation],
        effects: Collection[tf.Operation],
    ) -> function_pb2.FunctionDef:
        """Returns the definition of a part."""
        self._num_parts += 1
        part = function_pb2.FunctionDef()
        part.signature.name = (
            f"{self._definition.signature.name}_part_{self._num_parts}"
        )
        part.signature.is_stateful = self._definition.signature.is_stateful
        for key, value in self._definition.attr.items():
            part.attr[key].CopyFrom(value)
        names = {}
        for i, x in enumerate(inputs):
            name = f"input_{i}"
            names[self._endpoint(x)] = name
            arg = part.signature.input_arg.add()
            if x.op.name in self._arguments:
                # With what is known of a variable that it is a handle of.
                arg.CopyFrom(self._arguments[x.op.name])
            arg.name = name
            arg.type = x.dtype.as_datatype_enum
            shapes = part.arg_attr[i].attr["_output_shapes"].list.shape
            shapes.add().CopyFrom(x.shape.as_proto())
        kept = {op.name for op in operations}
        for node in self._definition.node_def:
            if node.name not in kept:
                continue
            copy = part.node_def.add()
            copy.CopyFrom(node)
            # Colocation with operations that may be in another part.
            copy.attr.pop("_class", None)
            del copy.input[:]
            copy.input.extend(
                names.get(x, x)
                for x in node.input
                if not x.startswith("^") or x[1:] in kept
            )
        for i, x in enumerate(outputs):
            arg = part.signature.output_arg.add()
            arg.name = f"output_{i}"
            arg.type = x.dtype.as_datatype_enum
            endpoint = self._endpoint(x)
            part.ret[arg.name] = names.get(endpoint, endpoint)
        for op in effects:
            part.signature.control_output.append(op.name)
            part.control_ret[op.name] = op.name
        return part

    def _function(self, definition: function_pb2.FunctionDef) -> Any:
        """Returns a function of a definition, which TensorFlow then knows.

        Nothing public does this.
        """
        context.context().add_function_def(definition)
        return AtomicFunction(
            definition.signature.name,
            context.context(),
            self._concrete.function_type,
            list(self._graph._functions.values()),
        )

    def _endpoint(self, tensor: tf.Tensor) -> str:
        """Returns what a tensor is called in the function's definition."""
        op = tensor.op
        if op.name in self._arguments:
            return self._arguments[op.name].name
        index = tensor.value_index
        for arg in op.op_def.output_arg:
            size = 1
            if arg.number_attr:
                size = op.get_attr(arg.number_attr)
            elif arg.type_list_attr:
                size = len(op.get_attr(arg.type_list_attr))
            if index < size:
                return f"{op.name}:{arg.name}:{index}"
            index -= size
        raise AssertionError(f"{tensor} is no output of its operation")


def _reach(
    start: Iterable[tf.Operation],
    following: Callable[[tf.Operation], Iterable[tf.Operation]],
    without: Collection[tf.Operation] = (),
) -> set[tf.Operation]:
    """Returns the operations that are reached from some."""
    found: set[tf.Operation] = set()
    rest = list(start)
    while rest:
        op = rest.pop()
        if op not in found and op not in without:
            found.add(op)
            rest += following(op)
    return found
