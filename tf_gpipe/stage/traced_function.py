"""A traced function that is cut into parts, each a function of its own."""

import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.function_call import FunctionCall
from tf_gpipe.stage.operations import calls_python
from tf_gpipe.stage.operations import may_differ
from tf_gpipe.stage.reached import reached
from tf_gpipe.stage.structures import filled
from tf_gpipe.stage.tensorflow_state import written

# Operations that read variables.
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
# Operations whose results are their inputs.
_PASS_ON = ("Identity", "IdentityN", "StopGradient", "PreventGradient")


class TracedFunction:
    """A traced function that is cut into parts, each a function of its own.

    A part computes some tensors of the traced graph from others, with only the
    operations between them:

        a --> f --> g --> h          extract([f], [h]) runs g and h

    Operations that depend on variables and constants alone are in every part
    that needs them: their results need not be fed.

    Args:
        concrete: Concrete function of `tf.function`. It is never run.
        varying: Tensors of its graph whose values differ from run to run.
        jit_compile: Whether XLA compiles the parts.
    """

    def __init__(
        self,
        concrete: Any,
        varying: Iterable[tf.Tensor],
        jit_compile: bool = False,
    ):
        self.graph = concrete.graph
        self._definition = concrete.graph.as_graph_def()
        self._library = {
            x.signature.name: x for x in self._definition.library.function
        }
        self._captures = {id(x): outer for outer, x in concrete.graph.captures}
        self._jit_compile = jit_compile
        self.operations = self.graph.get_operations()
        self._written = written(self.operations)
        # Stateful operations may return something else at each run. So may
        # reads of variables that the graph writes, but no other reads.
        stateful = {
            op
            for op in self.operations
            if op.op_def.is_stateful
            and (op.type not in _READS or self.changes(op))
        }
        own = [x for op in stateful for x in op.outputs]
        changing = self.users([*varying, *own]) | stateful
        self._constant = {op for op in self.operations if op not in changing}
        # Operations on which others have a control dependency.
        self._awaited = {x for op in self.operations for x in op.control_inputs}

    def users(self, tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
        """Returns the operations that depend on tensors or make them."""
        return reached(
            [x.op for x in tensors],
            lambda op: [user for x in op.outputs for user in x.consumers()],
        )

    def makers(
        self,
        tensors: Iterable[tf.Tensor],
        effects: Iterable[tf.Operation] = (),
    ) -> set[tf.Operation]:
        """Returns the operations that tensors and `effects` depend on.

        The makers of the tensors and `effects` are among them; operations that
        depend on variables and constants alone are left out.
        """
        return reached(
            [*(x.op for x in tensors), *effects],
            lambda op: [x.op for x in op.inputs],
            self._constant,
        )

    def changes(self, operation: tf.Operation) -> bool:
        """Returns whether an operation uses a variable the graph writes."""
        return any(id(x) in self._written for x in operation.inputs)

    def unrepeatable(
        self, operations: Iterable[tf.Operation]
    ) -> list[tf.Operation]:
        """Returns the operations that may give another result when run again.

        They draw random numbers, call Python or use variables that the graph
        writes, or are loops and branches with such operations in them.
        """
        return [
            op
            for op in operations
            if self.changes(op) or may_differ(op.node_def, self._library)
        ]

    def calls_python(self) -> bool:
        """Returns whether any operation calls Python when it runs."""
        return any(
            calls_python(op.node_def, self._library) for op in self.operations
        )

    def reads(self) -> list[tuple[tf.Tensor, list[tf.Tensor]]]:
        """Returns the variables that are read as a whole and never written.

        List of pairs: the variable's handle, outside of the trace, and the list
        of tensors of the trace that are read from it.
        """
        # Not by `Tensor.consumers`, which are in another order in each process.
        reads = collections.defaultdict(list)
        for op in self.operations:
            if op.type == "ReadVariableOp" and not self.changes(op):
                reads[id(op.inputs[0])].append(op.outputs[0])
        return [
            (outer, reads[id(x)])
            for outer, x in self.graph.captures
            if id(x) in reads
        ]

    def captured(self) -> list[tf.Tensor]:
        """Returns the tensors that the function captures from outside."""
        return [outer for outer, _ in self.graph.captures]

    def effects(self) -> set[tf.Operation]:
        """Returns the operations with side effects, which must always run."""
        return {
            op
            for op in self.graph.control_outputs
            if op not in self._constant and op.type not in _READS
        }

    def live(
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
        # Sorted, so that the same step gives the same graph.
        return sorted(found.values(), key=lambda x: (x.op.name, x.value_index))

    def extract(
        self,
        feeds: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        effects: Iterable[tf.Operation] = (),
        then: Callable | None = None,
        after: Mapping[tf.Operation, Collection[tf.Operation]] | None = None,
    ) -> Callable:
        """Returns a part as a function.

        Args:
            feeds: Tensors of the graph.
            fetches: Tensors of the graph that depend on `feeds`.
            effects: Operations of the graph that the part runs as well.
            then: Function that is called at the end of the part, with the
                values of `fetches` and any further arguments of the call.
            after: More control dependencies: dict from an operation to those
                that it waits for. Operations that are not in the part are
                ignored.

        Returns:
            Function that emits a call of the part. It takes the values of
            `feeds` and any further arguments of `then`; it returns the result
            of `then`, or without it the values of `fetches`.
        """
        after = after or {}
        known = {id(x) for x in feeds}
        sources, given, inputs = self._contents(known, fetches, effects, after)
        definition = self._definition_of(inputs, after)
        used = {x.name for xs in inputs.values() for x in xs}
        computed = [x.name for x in sources if x.name not in given]

        def run(values: Sequence[tf.Tensor], *args: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            # TensorFlow deletes functions, such as gradients of loops, with the
            # last graph that has them, which may be the traced one.
            upstream.copy_functions(self.graph, graph)
            fed = dict(zip(map(id, feeds), values, strict=True))
            found = {
                name: fed[id(x)]
                if id(x) in known
                else graph.capture(self._captures[id(x)])
                for name, x in given.items()
            }
            made = tf.graph_util.import_graph_def(
                definition,
                {name: x for name, x in found.items() if name in used},
                computed,
                name="",
            )
            found.update(zip(computed, made, strict=True))
            results = [found[x.name] for x in sources]
            for x, traced in zip(results, fetches, strict=True):
                x.set_shape(traced.shape)
            return results if then is None else then(results, *args)

        return FunctionCall(run, optimized=True, jit_compile=self._jit_compile)

    def _contents(
        self,
        known: Collection[int],
        fetches: Iterable[tf.Tensor],
        effects: Iterable[tf.Operation],
        after: Collection[tf.Operation],
    ) -> tuple[
        list[tf.Tensor],
        dict[str, tf.Tensor],
        dict[tf.Operation, list[tf.Tensor]],
    ]:
        """Returns what a part consists of.

        Args:
            known: Ids of the tensors that it is fed.
            fetches, effects, after: As in `extract`.

        Returns:
            Tuple of the tensors in place of `fetches`, without operations that
            pass on their input; a dict from their names to the tensors that
            are fed or captured; and a dict from the part's operations to their
            input tensors.
        """
        given: dict[str, tf.Tensor] = {}
        inputs: dict[tf.Operation, list[tf.Tensor]] = {}

        def source(x: tf.Tensor) -> tf.Tensor:
            while id(x) not in known and self._passes_on(x.op, after):
                x = x.op.inputs[x.value_index]
            return x

        def makers(tensors: Iterable[tf.Tensor]) -> list[tf.Operation]:
            given.update(
                (x.name, x)
                for x in tensors
                if id(x) in known or id(x) in self._captures
            )
            return [x.op for x in tensors if x.name not in given]

        def makers_of(op: tf.Operation) -> list[tf.Operation]:
            inputs[op] = list(map(source, op.inputs))
            return makers(inputs[op])

        sources = list(map(source, fetches))
        reached([*makers(sources), *effects], makers_of)
        return sources, given, inputs

    def _passes_on(
        self, op: tf.Operation, waiting: Collection[tf.Operation]
    ) -> bool:
        """Returns whether a part can leave out an operation, using its input.

        The operation returns its input, on the same device, and has no control
        dependency in either direction.
        """
        return (
            op.type in _PASS_ON
            and op not in waiting
            and not op.control_inputs
            and op not in self._awaited
            and all(x.op.device in ("", op.device) for x in op.inputs)
        )

    def _definition_of(
        self,
        inputs: Mapping[tf.Operation, Sequence[tf.Tensor]],
        after: Mapping[tf.Operation, Collection[tf.Operation]],
    ) -> Any:
        """Returns the `GraphDef` of a part.

        Args:
            inputs: Dict from the part's operations to their input tensors.
            after: As in `extract`.
        """
        kept = {op.name: xs for op, xs in inputs.items()}
        waits = {op.name: [x.name for x in xs] for op, xs in after.items()}
        definition = tf.compat.v1.GraphDef(versions=self._definition.versions)
        for node in self._definition.node:
            if node.name in kept:
                copy = definition.node.add()
                copy.CopyFrom(node)
                # Colocation groups may name operations of another part.
                copy.attr.pop("_class", None)
                copy.input[:] = [x.name for x in kept[node.name]]
                awaited = [
                    x[1:] for x in node.input if x[:1] == "^" and x[1:] in kept
                ]
                copy.input.extend(f"^{x}" for x in awaited)
                # Gradients read an activation when their own operand is there:
                # `exp(x)` after `grad`. TensorFlow may move a constant into
                # that operation and take its operand out, and `exp(x)` of all
                # layers would be computed as the phase starts.
                copy.input.extend(
                    f"^{x.op.name}"
                    for name in awaited
                    for x in kept[name]
                    if x.op.name in kept
                )
                copy.input.extend(
                    f"^{x}" for x in waits.get(node.name, ()) if x in kept
                )
        return definition


def pruned(function: Callable[[], Any]) -> Any:
    """Returns the result of a function, without operations it does not need.

    TensorFlow runs every operation of a graph that may have a side effect, even
    if no result needs it: checks of shapes, and loops that read variables, as
    in recurrent layers.
    """
    if tf.executing_eagerly():
        return function()
    concrete = tf.function(function, autograph=False).get_concrete_function()
    part = TracedFunction(concrete, []).extract([], concrete.outputs)
    return filled(concrete.structured_outputs, part([]))
