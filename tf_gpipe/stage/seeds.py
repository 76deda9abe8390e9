"""The random seed of layers that have none of their own, as Keras keeps it."""

import concurrent.futures
import random
import weakref

import keras
import tensorflow as tf

from tf_gpipe import upstream

# The generator that was last seen outside of a strategy's replicas.
_shared: weakref.WeakKeyDictionary[
    tf.distribute.Strategy, keras.random.SeedGenerator
] = weakref.WeakKeyDictionary()


def global_seed() -> list[keras.Variable]:
    """Returns the state of Keras's seed generator for layers without one.

    Keras makes it on first use, with a seed that Python draws. Here that
    number is foretold and not drawn, or what a model is initialised with would
    depend on whether another one is a pipeline. A replica cannot make it: the
    list is empty there if there is none.
    """
    strategy = tf.distribute.get_strategy()
    in_replica = not tf.distribute.in_cross_replica_context()
    if in_replica and tf.distribute.has_strategy():
        if strategy not in _shared:
            return []
        # A replica is a thread, and each has a state of Keras of its own.
        upstream.set_seed_generator_of_keras(_shared[strategy])
        return [_shared[strategy].state]
    generator = upstream.seed_generator_of_keras()
    if generator is None:
        generator = _made()
        upstream.set_seed_generator_of_keras(generator)
    _shared[strategy] = generator
    return [generator.state]


def _made() -> keras.random.SeedGenerator:
    """Returns the generator that Keras would make, and draws nothing."""
    numbers = random.Random()
    # All threads draw from one state: set back, it would undo their draws.
    numbers.setstate(random.getstate())

    def make() -> keras.random.SeedGenerator:
        return keras.random.SeedGenerator(numbers.randint(1, int(1e9)))

    if tf.executing_eagerly() or tf.distribute.has_strategy():
        with tf.init_scope():
            return make()
    # A function that is traced again may make no variable. In a thread of
    # its own none is being traced.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
