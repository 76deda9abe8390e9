"""Measured speed of this machine's devices and of their connections."""

import dataclasses
import functools
import math
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.devices.functions import host
from tf_gpipe.partition import measured_calls
from tf_gpipe.planning.speeds import Device
from tf_gpipe.planning.speeds import Machine
from tf_gpipe.planning.speeds import Speed
from tf_gpipe.planning.speeds import replicate

_PRODUCTS = 8
_OPERATIONS = 100
# Sides of matrices and lengths of vectors. The first size is used that keeps a
# device busy for `_BUSY_SECONDS`, much longer than launching the operations.
_SIDES = 512, 1024, 2048, 4096, 8192
_FLOATS = 2**22, 2**24, 2**26
_BUSY_SECONDS = 1e-3
# Bytes that are sent there and back, for each element of a vector.
_BYTES = 8 * 4
# How long they are sent while matrices are multiplied.
_SENDING_SECONDS = 0.1
# Devices are alike if none has a smaller share of the fastest one's speed.
_SIMILAR = 0.8


def measured(names: Sequence[str], memories: Sequence[int | None]) -> Machine:
    """Measures devices, in about a second each, and their connection.

    Arithmetic is measured by matrix products, memory by sums of vectors, both
    less the time of a function that does nothing. The slowdown of devices that
    share cores or memory is measured with all working at once. The connection
    is that of the first device to the first of another process, or else to the
    second; between processes also how long it keeps a device from other work.
    """
    speeds, sides = zip(*_speeds(names), strict=True)
    # The size that keeps the fastest device busy.
    side = max(sides)
    together = _seconds(_products(names, side)) if len(names) > 1 else 0.0
    alone = max(_seconds(_products([name], side)) for name in names)
    sharing = max(1.0, together / alone) if together else 1.0
    bandwidth, latency, handling = None, 0.0, 0.0
    if len(names) > 1:
        ends = _ends(names)
        bandwidth, latency = _connection(*ends)
        if len(set(map(host, ends))) > 1:
            product = 2 * side**3 / speeds[0].flops
            handling = _handling(*ends, bandwidth, side, product)
    return Machine(
        [
            Device(name, memory, speed)
            for name, memory, speed in zip(
                names, memories, _alike(speeds), strict=True
            )
        ],
        bandwidth,
        latency,
        # A smaller slowdown is noise.
        sharing if sharing > 1.1 else 1.0,
        handling=handling,
        replicates=replicate(names),
    )


def _speeds(names: Sequence[str]) -> list[tuple[Speed, int]]:
    """Returns `_speed` of each device, measured twice for slow ones.

    Other programs may have held a device up for a moment.
    """
    found = [_speed(name) for name in names]
    fastest = max(speed.flops for speed, _ in found)
    return [
        x
        if x[0].flops > _SIMILAR * fastest
        else max(x, _speed(name), key=lambda pair: pair[0].flops)
        for name, x in zip(names, found, strict=True)
    ]


def _alike(speeds: Sequence[Speed]) -> list[Speed]:
    """Returns the median speed for all, if none is a quarter slower."""
    fastest = max(speeds, key=lambda x: x.flops)
    if all(x.flops > _SIMILAR * fastest.flops for x in speeds):
        middle = sorted(speeds, key=lambda x: x.flops)[len(speeds) // 2]
        return [middle] * len(speeds)
    return list(speeds)


def _speed(name: str) -> tuple[Speed, int]:
    """Returns a device's speed, and the side of matrices that keep it busy."""
    start = measured_calls.overhead(name)
    side, product = _busy(functools.partial(_products, [name]), _SIDES, start)
    floats, moved = _busy(functools.partial(_sums, name), _FLOATS, start)
    each = max(_seconds(_launches(name)) - start, 0.0) / _OPERATIONS
    speed = dataclasses.replace(
        Speed(),
        flops=_PRODUCTS * 2 * side**3 / product,
        # Six passes over a vector: the square root, the addition and the
        # reduction read four and write two.
        memory=6 * 4 * floats / moved,
        operation=each,
    )
    return speed, side


def _busy(
    make: Callable[[int], Callable], sizes: Sequence[int], start: float
) -> tuple[int, float]:
    """Returns the first size that keeps a device busy, and its seconds.

    Args:
        make: Function that takes a size and returns the function to time.
        sizes: List of integers.
        start: Float, seconds of overhead, which are subtracted.
    """
    for size in sizes:
        seconds = max(_seconds(make(size)) - start, 1e-6)
        if seconds >= _BUSY_SECONDS:
            break
    return size, seconds


def _launches(name: str) -> Callable:
    """Returns a function that is bound by the launch of operations."""
    with tf.device(name):
        one = tf.zeros((1,))

    @tf.function(autograph=False)
    def launches():
        with tf.device(name):
            x = one
            for _ in range(_OPERATIONS):
                # TensorFlow would make one operation of a chain of those with
                # one argument.
                x = tf.maximum(x, one)
            return x

    return launches


def _sums(name: str, floats: int) -> Callable:
    """Returns a function that is bound by the memory of a device."""
    with tf.device(name):
        vector = tf.zeros((floats,))

    @tf.function(autograph=False)
    def added():
        with tf.device(name):
            return tf.reduce_sum(tf.sqrt(vector) + vector)

    return added


def _products(
    names: Sequence[str], side: int, count: int = _PRODUCTS
) -> Callable:
    """Returns a function that multiplies matrices on all devices at once."""
    matrices = {}
    for name in names:
        with tf.device(name):
            matrices[name] = tf.zeros((side, side))

    @tf.function(autograph=False)
    def products():
        found = []
        for name in names:
            with tf.device(name):
                x = matrices[name]
                for _ in range(count):
                    x = tf.matmul(x, matrices[name])
                found.append(tf.reduce_sum(x))
        return found

    return products


def _connection(first: str, second: str) -> tuple[float, float]:
    """Returns the bandwidth in bytes a second, and the latency in seconds."""
    there = functools.partial(_there_and_back, first, second)
    latency = _seconds(there(2))
    floats, seconds = _busy(there, [x // 4 for x in _FLOATS], latency)
    # Without the operations themselves.
    seconds -= _seconds(_there_and_back(first, first, floats))
    return _BYTES * floats / max(seconds, 1e-6), latency / 8


def _ends(names: Sequence[str]) -> tuple[str, str]:
    """Returns the devices between which the connection is measured.

    Those of two processes, if there are: their connection is slower.
    """
    first, second, *_ = names
    others = (x for x in names if host(x) != host(first))
    return first, next(others, second)


def _handling(
    first: str, second: str, bandwidth: float, side: int, product: float
) -> float:
    """Returns the seconds that a byte sent or received keeps a device busy.

    The processors of workers copy what they send, and what they receive, while
    their stage waits. The device multiplies matrices, for much longer than the
    transfers take, and the same operations run with and without transfers.

    Args:
        first: String, the device that is measured.
        second: String, the device at the other end.
        bandwidth: Float, bytes a second from one to the other.
        side: Integer, the sides of the matrices.
        product: Float, seconds that it takes to multiply two.
    """
    size = int(_SENDING_SECONDS * bandwidth) // _BYTES
    size = min(max(size, 2), _FLOATS[-1])
    count = math.ceil(2 * _SENDING_SECONDS / product)
    alone, with_transfers = (
        _seconds(_working(first, second, size, side, count, sends))
        for sends in (False, True)
    )
    taken = with_transfers - alone
    # Less is noise.
    return taken / (_BYTES * size) if taken > 0.03 * alone else 0.0


def _working(
    first: str, second: str, size: int, side: int, count: int, sends: bool
) -> Callable:
    """Returns a function that multiplies matrices, and reverses vectors.

    It reverses four on each device, of `size` floats, which are sent from one
    to the other in between if `sends`.
    """
    multiply = _products([first], side, count)
    if sends:
        reverse = [_there_and_back(first, second, size)]
    else:
        reverse = [_there_and_back(x, x, size, 2) for x in (first, second)]

    @tf.function(autograph=False)
    def run():
        return multiply(), [each() for each in reverse]

    return run


def _there_and_back(
    first: str, second: str, size: int, count: int = 4
) -> Callable:
    """Returns a function that sends `size` floats, at least 2, back and forth.

    `count` times, so that there are two transfers for each.
    """
    with tf.device(first):
        x = tf.zeros((size,))

    @tf.function(autograph=False)
    def run():
        y = x
        for _ in range(count):
            for name in (second, first):
                with tf.device(name):
                    # TensorFlow would remove an `identity`, and make one
                    # operation on one device of several like `sqrt`.
                    y = tf.reverse(y, [0])
        return y[:1]

    return run


def _seconds(run: Callable) -> float:
    """Returns the seconds of the fastest call of a function of tensors."""
    return measured_calls.fastest(
        lambda: [x.numpy() for x in tf.nest.flatten(run())]
    )
