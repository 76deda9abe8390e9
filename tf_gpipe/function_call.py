"""Calls of one function, many times in a graph."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class FunctionCall:
    """A function that a graph calls many times: traced once, never inlined.

    It does what a `tf.function` does, for less time at each call:

    - TensorFlow infers the shapes of all that is in a function again at each
      call of it. Here the call says that it need not.
    - TensorFlow goes through the body of each function that a graph calls
      several times while it optimises the graph. Here the body is one call
      more away.

    A gradient tape does not see such a call.

    Args:
        function: Function from nested structures of tensors to another one.
        jit_compile: Boolean, whether XLA compiles it.
        finish: Function, applied to its results; XLA does not compile it.
        stateless: Boolean, whether the call tells TensorFlow that it has no
            side effects, true or not.
    """

    def __init__(
        self,
        function: Callable,
        jit_compile: bool = False,
        finish: Callable = lambda results: results,
        stateless: bool = False,
    ):
        self._type = "StatefulPartitionedCall"
        if stateless:
            self._type = "PartitionedCall"
        attributes = {"_noinline": True}
        body = tf.function(
            function,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes=attributes,
        )
        self._function = tf.function(
            lambda *args: finish(body(*args)),
            autograph=False,
            experimental_attributes=attributes,
        )

    def __call__(self, *args: Any) -> Any:
        concrete = self._function.get_concrete_function(*args)
        graph = tf.compat.v1.get_default_graph()
        concrete.add_to_graph(graph)
        inputs = [x for x in _flatten(args) if isinstance(x, tf.Tensor)]
        inputs += concrete.captured_inputs
        outputs = concrete.outputs
        call = graph.create_op(
            self._type,
            inputs,
            [x.dtype for x in outputs],
            attrs={
                "Tin": _types(inputs),
                "Tout": _types(outputs),
                "f": tf.compat.v1.AttrValue(
                    func=tf.compat.v1.NameAttrList(name=concrete.name)
                ),
                "_disable_call_shape_inference": tf.compat.v1.AttrValue(b=True),
            },
        )
        for x, inferred in zip(call.outputs, outputs, strict=True):
            x.set_shape(inferred.shape)
        found = iter(call.outputs)
        return tf.nest.pack_sequence_as(
            concrete.structured_outputs,
            [
                None if x is None else next(found)
                for x in _flatten(concrete.structured_outputs)
            ],
            expand_composites=True,
        )


def _flatten(structure: Any) -> list:
    return tf.nest.flatten(structure, expand_composites=True)


def _types(tensors: Sequence[tf.Tensor]) -> Any:
    types = [x.dtype.as_datatype_enum for x in tensors]
    value = tf.compat.v1.AttrValue
    return value(list=value.ListValue(type=types))
