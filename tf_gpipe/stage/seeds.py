"""Random numbers of layers without a seed of their own.

They come from Keras's global seed generator, or from the generators that the
functions of `random` and `np.random` share.
"""

import concurrent.futures
import contextlib
import random
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tf_gpipe import random_numbers
from tf_gpipe import upstream

# By strategy: the generator that was last seen outside of its replicas.
_shared: weakref.WeakKeyDictionary[
    tf.distribute.Strategy, keras.random.SeedGenerator
] = weakref.WeakKeyDictionary()


def global_seed() -> list[keras.Variable]:
    """Returns the state of Keras's global seed generator, made if need be.

    Keras makes the generator on first use, with a seed from Python's `random`.
    Here the same seed is computed without advancing `random`, or the initial
    weights of a model would depend on whether another model is a pipeline.

    Returns:
        List of the state variable. It is empty in a replica if there is no
        generator yet, since a replica cannot make one.
    """
    strategy = tf.distribute.get_strategy()
    in_replica = not tf.distribute.in_cross_replica_context()
    if in_replica and tf.distribute.has_strategy():
        if strategy not in _shared:
            return []
        # A replica is a thread, and Keras keeps its global state per thread.
        upstream.set_seed_generator_of_keras(_shared[strategy])
        return [_shared[strategy].state]
    generator = upstream.seed_generator_of_keras()
    if generator is None:
        generator = _made()
        upstream.set_seed_generator_of_keras(generator)
    _shared[strategy] = generator
    return [generator.state]


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """A scope after which a program draws the numbers that it would without it.

    It restores the global random generators of Python, NumPy and Keras, from
    which layers and initialisers draw. If Keras has made none yet, it has none
    afterwards.
    """
    generator = upstream.seed_generator_of_keras()
    state = None if generator is None else generator.state
    if state is not None and not upstream.has_value(state):
        state = None
    value = None if state is None else state.numpy()
    try:
        with drawn_again():
            yield
    finally:
        upstream.set_seed_generator_of_keras(generator)
        if state is not None:
            state.assign(value)


@contextlib.contextmanager
def drawn_again() -> Iterator[None]:
    """A scope for calls of layers that are not those of a step.

    Afterwards the generators that the functions of `random` and `np.random`
    share are as before. A layer that draws from them, as it is traced, then
    draws the numbers that it draws in a plain model. No other thread may draw
    from them meanwhile.
    """
    before = random_numbers.states()
    try:
        yield
    finally:
        random_numbers.set_states(before)


def _made() -> keras.random.SeedGenerator:
    """Returns the generator that Keras would make, without a draw."""
    numbers = random.Random()
    # A copy of the state. To draw and set `random` back would undo the draws
    # of other threads, which share it.
    numbers.setstate(random.getstate())

    def make() -> keras.random.SeedGenerator:
        return keras.random.SeedGenerator(numbers.randint(1, int(1e9)))

    if tf.executing_eagerly() or tf.distribute.has_strategy():
        with tf.init_scope():
            return make()
    # A `tf.function` may not make variables when it is traced again. In another
    # thread none is being traced.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
