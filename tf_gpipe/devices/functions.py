"""Functions that are not inlined, and whose errors reach the caller.

The function of a task is called in the step's function, which TensorFlow
divides into a part for each device. When an operation of a task fails,
TensorFlow

    1. aborts the rendezvous of the task's function with the error,
    2. cancels all pending operations of the whole step,
    3. returns the error from the call of the task's function,

and each part of the step reports the first error that it meets. Most parts
are waiting for a tensor of another device, so that 2 comes before 3, and the
user sees only `CancelledError: RecvAsync is cancelled`. If the task's function
shares the step's rendezvous, 1 passes the error to all that wait there.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import watcher

# Operations that call Python, which run in the client process.
CALLS_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


class NotInlinedFunction:
    """A `tf.function` that is not inlined, and whose errors reach the caller.

    Args:
        function: Python function of nested structures of tensors.
        jit_compile: Boolean, whether XLA compiles it.
    """

    def __init__(self, function: Callable, jit_compile: bool = False):
        self._python_function = function
        self._jit_compile = jit_compile
        self._function = self._made(tells=True)
        # The traces that `_leaves_host` has already been asked about.
        self._seen: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        self.get_concrete_function(*args)
        return self._function(*args)

    def get_concrete_function(self, *args: Any) -> Any:
        """Returns the trace for these arguments, on the current device."""
        # TensorFlow would go on tracing with a lost worker, without an error.
        watcher.check()
        concrete = self._function.get_concrete_function(*args)
        if concrete in self._seen:
            return concrete
        shares = upstream.shares_rendezvous(self._function)
        if shares and _leaveshost(concrete):
            # A function on two hosts needs a rendezvous of its own: through the
            # step's, its parts would not find each other.
            self._function = self._made(tells=False)
            concrete = self._function.get_concrete_function(*args)
        self._seen.add(concrete)
        return concrete

    def traced(self) -> set[Any]:
        """Returns all traces made so far."""
        return self._seen

    def _made(self, tells: bool) -> Any:
        function = tf.function(
            self._python_function,
            autograph=False,
            jit_compile=self._jit_compile or None,
            experimental_attributes={"_noinline": True},
        )
        upstream.share_rendezvous(function, tells)
        return function


def _leaveshost(concrete: Any) -> bool:
    """Returns whether a function has operations on several hosts.

    Operations that call Python run in the client, and operations on a
    resource, such as a table, on the resource's host.
    """
    operations = concrete.graph.get_operations()
    hosts = {host(op.device) for op in operations if op.device}
    hosts |= {
        host(x.device)
        for x in concrete.captured_inputs
        if x.dtype == tf.resource and x.device
    }
    if hosts <= {host("")}:
        return False
    library = concrete.graph.as_graph_def().library
    kinds = {op.type for op in operations}
    kinds |= {node.op for f in library.function for node in f.node_def}
    return len(hosts) > 1 or bool(kinds & CALLS_PYTHON)


def host(device: str) -> tuple[str, int]:
    """Returns the job and the task of the process that has a device."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.job or "localhost", spec.task or 0
