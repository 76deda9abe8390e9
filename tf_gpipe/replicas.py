"""Replicas of a pipeline under a `tf.distribute` strategy.

Each replica is a pipeline of its own, on a row of devices of its own:

                  stage 0   stage 1   stage 2
    replica 0      GPU:0     GPU:1     GPU:2
    replica 1      GPU:3     GPU:4     GPU:5

A variable of a stage has one component a replica, on that replica's device of
that stage. Without a strategy there is one replica.
"""

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# Of gradients that hosts exchange at once.
_BYTES_PER_PACK = 32 * 2**20


def count(strategy: tf.distribute.Strategy | None) -> int:
    """Returns how many replicas a strategy has in this process.

    Args:
        strategy: A `tf.distribute` strategy, or `None`.

    Raises:
        ValueError: If a pipeline cannot be a replica of the strategy.
    """
    if strategy is None:
        return 1
    if not isinstance(
        strategy,
        (
            tf.distribute.MirroredStrategy,
            tf.distribute.MultiWorkerMirroredStrategy,
            tf.distribute.TPUStrategy,
        ),
    ):
        raise ValueError(
            "A pipeline can be a replica of a tf.distribute.MirroredStrategy, "
            "MultiWorkerMirroredStrategy or TPUStrategy. Received: "
            f"{type(strategy).__name__}"
        )
    return len(strategy.extended.worker_devices)


def on_tpu(strategy: tf.distribute.Strategy | None) -> bool:
    """Returns whether stages are the logical cores of a TPU replica."""
    return isinstance(strategy, tf.distribute.TPUStrategy)


def core(index: int) -> str:
    """Returns the device of a TPU replica's logical core, for `tf.device`.

    Which core of the machine it is, the strategy's
    `tf.tpu.experimental.DeviceAssignment` says for each replica.
    """
    return tf.compat.v1.tpu.core(index)


def fed(inputs: Any) -> Any:
    """Returns inputs of a replica where the first stage reads them."""
    strategy = tf.distribute.get_strategy()
    if not on_tpu(strategy):
        return inputs
    return tf.nest.map_structure(
        lambda x: strategy.experimental_assign_to_logical_device(x, 0), inputs
    )


def within_xla() -> bool:
    """Returns whether XLA compiles what is being traced as a whole.

    As it does for TPUs, and in a `tf.function` with `jit_compile=True`.
    """
    return not tf.executing_eagerly() and GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def on_several_hosts(strategy: tf.distribute.Strategy | None) -> bool:
    """Returns whether the replicas of a strategy are on several hosts."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def several() -> bool:
    """Returns whether this is one of several replicas."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def current() -> int:
    """Returns the number of the current replica among this process's.

    It is 0 outside of replicas, and on TPUs, whose logical cores have the
    same names in all of them.
    """
    context = tf.distribute.get_replica_context()
    if (
        context is None
        or not tf.distribute.has_strategy()
        or on_tpu(context.strategy)
    ):
        return 0
    return number() % count(context.strategy)


def number() -> Any:
    """Returns the number of the current replica among all.

    It is 0 outside of replicas. On TPUs, where all replicas run one program,
    it is a tensor.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    static = tf.get_static_value(context.replica_id_in_sync_group)
    if static is None:
        return context.replica_id_in_sync_group
    return int(static)


@contextlib.contextmanager
def variables_on(devices: Sequence[str]) -> Iterator[None]:
    """Returns a scope that makes variables on given devices.

    Args:
        devices: List of device names, one a replica.

    Raises:
        RuntimeError: If it is entered in a replica.
    """
    if not tf.distribute.has_strategy():
        with tf.device(devices[0]):
            yield
        return
    if not tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "A pipeline cannot be built within a replica. Build it under "
            "`strategy.scope()`: give it an `Input` as its first layer, or "
            "call `model.build(input_shape)`."
        )

    strategy = tf.distribute.get_strategy()
    if on_tpu(strategy):
        logical = int(devices[0].rpartition(":")[2])
        with strategy.extended.experimental_logical_device(logical):
            yield
        return

    def create(next_creator, **kwargs):
        return next_creator(**{**kwargs, "colocate_with": _Row(devices)})

    with tf.variable_creator_scope(create):
        yield


def devices_of(variable: tf.Variable) -> list[str]:
    """Returns where a variable is: a device for each replica."""
    if isinstance(variable, tf.distribute.DistributedValues):
        strategy = variable.distribute_strategy
        return [x.device for x in strategy.experimental_local_results(variable)]
    return [variable.device]


def sum_gradients(pairs: Iterable[tuple]) -> list[tuple]:
    """Sums gradients over replicas, those of each stage on its devices.

    `tf.distribute` would move the gradients of all stages to the first device
    of each replica, and sum them there.

    Args:
        pairs: Iterable of tuples of a gradient or `None` and a variable.

    Returns:
        List of such tuples. Outside of replicas it is what was given.
    """
    pairs = list(pairs)
    there = [i for i, (gradient, _) in enumerate(pairs) if gradient is not None]
    sums = _reduced(tf.distribute.ReduceOp.SUM, [pairs[i] for i in there])
    for i, x in zip(there, sums, strict=True):
        pairs[i] = x, pairs[i][1]
    return pairs


def mean(pairs: Iterable[tuple]) -> list[tf.Tensor]:
    """Returns means over replicas, each on the devices of its variable.

    Args:
        pairs: Iterable of tuples of a tensor and a variable.
    """
    return _reduced(tf.distribute.ReduceOp.MEAN, list(pairs))


def _reduced(op: tf.distribute.ReduceOp, pairs: list[tuple]) -> list:
    context = tf.distribute.get_replica_context()
    values = [value for value, _ in pairs]
    if context is None or not tf.distribute.has_strategy() or not pairs:
        return values
    if not isinstance(context.strategy, tf.distribute.MirroredStrategy):
        # Hosts have to agree on an order, which the strategy sees to. It sums
        # on the first device of each, which should not hold a copy of all.
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=_BYTES_PER_PACK
        )
        return context.all_reduce(op, values, options)
    # Tensors that are summed at once are packed, which needs one dtype.
    by_devices: dict = {}
    for i, (value, variable) in enumerate(pairs):
        key = tuple(devices_of(variable)), value.dtype
        by_devices.setdefault(key, []).append(i)

    def merge(strategy, values):
        results = [None] * len(values)
        for (devices, dtype), places in by_devices.items():
            reduced = _cross_device_ops(strategy, devices, dtype).batch_reduce(
                op, [(values[i], pairs[i][1]) for i in places]
            )
            for i, x in zip(places, reduced, strict=True):
                results[i] = x
        return results

    return context.merge_call(merge, args=(values,))


def _cross_device_ops(
    strategy: tf.distribute.Strategy, devices: Sequence[str], dtype: tf.DType
) -> tf.distribute.CrossDeviceOps:
    """Returns what sums over given devices: the user's, or the best one.

    NCCL knows no bfloat16, and takes a device for a whole GPU: not for one of
    several that a GPU has been split into.
    """
    given = strategy.extended._cross_device_ops
    if isinstance(
        given, (tf.distribute.ReductionToOneDevice, tf.distribute.NcclAllReduce)
    ):
        return given
    whole = len(tf.config.list_physical_devices("GPU")) == len(
        tf.config.list_logical_devices("GPU")
    )
    if (
        whole
        and dtype != tf.bfloat16
        and len(set(devices)) == len(devices)
        and all("GPU" in device for device in devices)
    ):
        return tf.distribute.NcclAllReduce()
    return tf.distribute.ReductionToOneDevice()


class _Row:
    """What strategies take for a variable with a component on each device."""

    def __init__(self, devices: Sequence[str]):
        self._devices = devices
