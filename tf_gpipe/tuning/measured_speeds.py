"""How fast the devices here are, and the connections between them."""

import dataclasses
import functools
import timeit
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.planning.speeds import Device
from tf_gpipe.planning.speeds import Machine
from tf_gpipe.planning.speeds import Speed

_REPEATS = 5
_SIDE = 512
_PRODUCTS = 8
_FLOATS = 2**22
_OPERATIONS = 100


def measured(names: Sequence[str], memories: Sequence[int | None]) -> Machine:
    """Returns the devices of these names, measured in about a second each.

    Arithmetic is measured by products of small matrices, memory by sums of
    long vectors, both beside a function that does nothing; devices that share
    cores or memory are slower where all work at once, which is measured, too.
    """
    speeds = [_speed(name) for name in names]
    first = functools.partial(_products, names)
    together = _seconds(first) if len(names) > 1 else 0.0
    alone = max(_seconds(lambda x=name: _products([x])) for name in names)
    sharing = max(1.0, together / alone) if together else 1.0
    bandwidth, latency = None, 0.0
    if len(names) > 1:
        bandwidth, latency = _connection(names[0], names[1])
    return Machine(
        [
            Device(name, memory, speed)
            for name, memory, speed in zip(
                names, memories, _alike(speeds), strict=True
            )
        ],
        bandwidth,
        latency,
        # What differs by no more is chance.
        sharing if sharing > 1.1 else 1.0,
        # Strategies take devices of this process alone.
        replicates=all("/job:worker" not in x for x in names),
    )


def _alike(speeds: list[Speed]) -> list[Speed]:
    """Takes devices for equally fast that differ by less than a quarter."""
    fastest = max(speeds, key=lambda x: x.flops)
    if all(x.flops > 0.8 * fastest.flops for x in speeds):
        middle = sorted(speeds, key=lambda x: x.flops)[len(speeds) // 2]
        return [middle] * len(speeds)
    return speeds


def _speed(name: str) -> Speed:
    with tf.device(name):
        vector = tf.zeros((_FLOATS,))
        one = tf.zeros((1,))

    @tf.function(autograph=False)
    def nothing():
        with tf.device(name):
            return tf.identity(one)

    @tf.function(autograph=False)
    def added():
        with tf.device(name):
            return tf.reduce_sum(tf.sqrt(vector) + vector)

    @tf.function(autograph=False)
    def small():
        with tf.device(name):
            x = one
            for _ in range(_OPERATIONS):
                x = tf.sqrt(x)
            return x

    start = _seconds(nothing)
    product = max(_seconds(lambda: _products([name])) - start, 1e-6)
    # Two vectors are read, and one written, and again for the sum.
    moved = max(_seconds(added) - start, 1e-6)
    each = max(_seconds(small) - start, 0.0) / _OPERATIONS
    return dataclasses.replace(
        Speed(),
        flops=_PRODUCTS * 2 * _SIDE**3 / product,
        memory=6 * 4 * _FLOATS / moved,
        operation=each,
    )


@functools.cache
def _function(names: tuple[str, ...]) -> Callable:
    matrices = {}
    for name in names:
        with tf.device(name):
            matrices[name] = tf.zeros((_SIDE, _SIDE))

    @tf.function(autograph=False)
    def products():
        found = []
        for name in names:
            with tf.device(name):
                x = matrices[name]
                for _ in range(_PRODUCTS):
                    x = tf.matmul(x, matrices[name])
                found.append(tf.reduce_sum(x))
        return found

    return products


def _products(names: Sequence[str]) -> list[tf.Tensor]:
    return _function(tuple(names))()


def _connection(first: str, second: str) -> tuple[float | None, float]:
    """Returns bytes a second, and seconds that a transfer takes besides."""

    def there_and_back(size: int) -> float:
        with tf.device(first):
            x = tf.zeros((size,))

        @tf.function(autograph=False)
        def run():
            y = x
            for _ in range(4):
                for name in (second, first):
                    with tf.device(name):
                        # What does nothing would be taken away.
                        y = tf.sqrt(y)
            return y[:1]

        return _seconds(run) / 8

    small, large = there_and_back(1), there_and_back(_FLOATS // 4)
    rest = large - small
    return (_FLOATS / rest if rest > 0 else None), small


def _seconds(run: Callable) -> float:
    def wait() -> None:
        for x in tf.nest.flatten(run()):
            x.numpy()

    wait()
    return min(timeit.repeat(wait, number=1, repeat=_REPEATS))
