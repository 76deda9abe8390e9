"""Steps of Keras that TensorFlow traces once, and quickly."""

import contextlib
import functools
import gc
from collections.abc import Callable
from collections.abc import Iterator

import tensorflow as tf

from tf_gpipe.devices import placement


def traced_once(step: Callable) -> Callable:
    """Makes a step create variables outside the trace that it is in.

    TensorFlow throws away a trace that creates variables, such as those of
    metrics and optimizers, and makes a second one.
    """

    def create(next_creator, **kwargs):
        # Values that are a part of the trace are there in it alone.
        if not callable(kwargs["initial_value"]):
            return next_creator(**kwargs)
        kwargs["experimental_enable_variable_lifting"] = False
        with tf.init_scope(), placement.eagerly_alone():
            return next_creator(**kwargs)

    @functools.wraps(step)
    def run(self, data):
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(_without_garbage_collection())
            # Keras creates them before, under a strategy.
            if not tf.distribute.has_strategy():
                scopes.enter_context(tf.variable_creator_scope(create))
                scopes.enter_context(placement.eagerly_alone())
            return step(self, data)

    return run


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A scope in which Python collects no garbage while a step is traced.

    It would go through all that TensorFlow and Keras hold, again and again,
    for a tenth of the time.
    """
    if tf.executing_eagerly() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
