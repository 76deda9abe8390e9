"""Makes TensorFlow trace a Keras step once instead of twice."""

import contextlib
import functools
import gc
from collections.abc import Callable
from collections.abc import Iterator

import tensorflow as tf

from tf_gpipe.devices import placement


def traced_once(step: Callable) -> Callable:
    """Wraps a step so that variables it creates are made outside its trace.

    TensorFlow throws away a trace that creates variables, such as those of
    metrics and optimizers, and traces the step a second time.
    """

    def create(next_creator, **kwargs):
        # An initial value that is a tensor of the trace exists only in it.
        if not callable(kwargs["initial_value"]):
            return next_creator(**kwargs)
        kwargs["experimental_enable_variable_lifting"] = False
        with tf.init_scope(), placement.eagerly_alone():
            return next_creator(**kwargs)

    @functools.wraps(step)
    def run(self, data):
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(_without_garbage_collection())
            # Under a strategy Keras has created them before the trace.
            if not tf.distribute.has_strategy():
                scopes.enter_context(tf.variable_creator_scope(create))
                scopes.enter_context(placement.eagerly_alone())
            return step(self, data)

    return run


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A scope that turns Python's garbage collection off during a trace.

    Collections would visit all objects of TensorFlow and Keras over and over,
    and take a tenth of the time of tracing.
    """
    if tf.executing_eagerly() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
