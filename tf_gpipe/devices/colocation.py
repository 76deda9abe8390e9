"""Puts operations outside of the pipeline on the devices of their inputs."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import placement
from tf_gpipe.devices import replicas
from tf_gpipe.devices import slots

# Operations whose branches are graphs of their own.
_CONTROL_FLOW = ("If", "StatelessIf", "While", "StatelessWhile")


def following_inputs() -> contextlib.AbstractContextManager:
    """Returns a scope that puts operations on their largest input's device.

    A variable counts as the largest, since it cannot move. Operations in an
    inner `tf.device` scope stay on that device; eager operations stay where
    TensorFlow puts them.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf.compat.v1.get_default_graph().device(_Follower())


def colocate(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer update each variable on that variable's device.

    Without it TensorFlow would run all updates on the first device: the
    gradients, slots and weights of all stages would travel there at each step,
    and have to fit there. Results do not change. Slots that `apply` makes are
    where their weights are. It replaces methods of the optimizer, and of those
    that it wraps; a second call does nothing.
    """
    for x in slots.with_inner(optimizer):
        if not hasattr(x.apply, "colocates"):
            _colocate(x)


def _colocate(optimizer: keras.optimizers.Optimizer) -> None:
    # Keras sums the gradients of all stages over replicas at once, which would
    # gather them on one device.
    upstream.sum_gradients_by(optimizer, replicas.sum_gradients)
    for name in upstream.UPDATES:
        update = functools.partial(
            _reading_once, optimizer, getattr(optimizer, name)
        )
        setattr(optimizer, name, update)
    keras_apply = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        # A user's step may be the first to tell which weights are trained. With
        # a strategy, Keras has built the optimizer before.
        if (
            trainable_variables
            and not optimizer.built
            and not tf.distribute.has_strategy()
        ):
            trainable_variables = list(trainable_variables)
            strategy = tf.distribute.get_strategy()
            slots.build_for(strategy, optimizer, trainable_variables)
        with following_inputs(), placement.eagerly_alone():
            return keras_apply(grads, trainable_variables)

    apply.colocates = True  # type: ignore[attr-defined]
    optimizer.apply = apply


def _reading_once(
    optimizer: keras.optimizers.Optimizer,
    method: Callable[..., None],
    *args: Any,
) -> None:
    """Calls a method of an optimizer, and reads each of its scalars only once.

    Scalars such as the learning rate are otherwise read for each weight. Each
    read is another tensor, and another message if the weight is on another
    host.

    Args:
        optimizer: The optimizer.
        method: Its method that updates weights.
        *args: Arguments of the method.
    """
    # Each replica has a copy of the scalars on its own device.
    if tf.executing_eagerly() or tf.distribute.has_strategy():
        return method(*args)
    scalars = [
        (x, tf.convert_to_tensor(x.value))
        for x in upstream.scalars_of(optimizer)
    ]
    with _Reading(scalars):
        method(*args)


class _Reading(keras.StatelessScope):
    """A stateless scope that holds values to read, and assigns at once."""

    def add_update(self, update: Any) -> None:
        variable, value = update
        upstream.tensorflow_variable(variable).assign(value)
        # From now on it is read again.
        self.state_mapping.pop(id(variable), None)


class _Follower:
    """Device function: maps an operation to the device of its largest input."""

    def __init__(self) -> None:
        self._outer: dict[int, tf.Tensor] = {}

    def __call__(self, op: tf.Operation) -> str:
        if op.device or op.type in _CONTROL_FLOW:
            return op.device
        largest_first = sorted(op.inputs, key=_size, reverse=True)
        return next(filter(None, map(self._device, largest_first)), "")

    def _device(self, tensor: tf.Tensor) -> str:
        """Returns the device of a tensor; an empty string if it is unknown."""
        if tensor.device:
            return tensor.device
        if tensor.op.type == "ReadVariableOp":
            # TensorFlow ignores device scopes for it, and runs it where the
            # variable is.
            return self._device(tensor.op.inputs[0])
        if tensor.op.type != "Placeholder":
            return ""
        if id(tensor) not in self._outer:
            self._outer.update((id(y), x) for x, y in tensor.graph.captures)
        outer = self._outer.get(id(tensor))
        return "" if outer is None else self._device(outer)


def _size(tensor: tf.Tensor) -> float:
    if tensor.dtype == tf.resource:
        return float("inf")  # A variable stays where it is.
    return tensor.shape.num_elements() or 0
