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
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream

# The bytes of gradients in one all-reduce between hosts, if none are given.
_BYTES_PER_PACK = 32 * 2**20


def count(strategy: tf.distribute.Strategy | None) -> int:
    """Returns how many replicas a strategy has in this process.

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


def fed(inputs: Any) -> Any:
    """Returns a replica's inputs on the device of the first stage."""
    strategy = tf.distribute.get_strategy()
    if not on_tpu(strategy):
        return inputs
    return tf.nest.map_structure(
        lambda x: strategy.experimental_assign_to_logical_device(x, 0), inputs
    )


def within_one() -> bool:
    """Returns whether the current code runs in a replica of a strategy."""
    return (
        tf.distribute.has_strategy()
        and not tf.distribute.in_cross_replica_context()
    )


def several() -> bool:
    """Returns whether the current code runs in one of several replicas."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def current() -> int:
    """Returns the index of the current replica among those of this process.

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
    """Returns the index of the current replica among all replicas.

    It is 0 outside of replicas. On TPUs, where all replicas run one program,
    it is a tensor.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    found = context.replica_id_in_sync_group
    static = tf.get_static_value(found)
    return found if static is None else int(static)


def variables_on(
    devices: Sequence[str],
) -> contextlib.AbstractContextManager:
    """Returns a scope that makes variables on given devices, one a replica.

    Raises:
        RuntimeError: If called in a replica.
    """
    if not tf.distribute.has_strategy():
        return tf.device(devices[0])
    if not tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "A pipeline cannot be built within a replica. Build it under "
            "`strategy.scope()`: give it an `Input` as its first layer, or "
            "call `model.build(input_shape)`."
        )

    strategy = tf.distribute.get_strategy()
    if on_tpu(strategy):
        logical = int(devices[0].rpartition(":")[2])
        return strategy.extended.experimental_logical_device(logical)

    def create(next_creator, **kwargs):
        # A stand-in for the variable that strategies expect here: they read
        # only its devices.
        kwargs["colocate_with"] = upstream.colocation_target(devices)
        return next_creator(**kwargs)

    return tf.variable_creator_scope(create)


def devices_of(variable: tf.Variable) -> list[str]:
    """Returns the devices of a variable, one for each replica."""
    if isinstance(variable, tf.distribute.DistributedValues):
        strategy = variable.distribute_strategy
        return [x.device for x in strategy.experimental_local_results(variable)]
    return [variable.device]


def sum_gradients(pairs: Iterable[tuple]) -> list[tuple]:
    """Sums gradients over replicas, each on the devices of its stage.

    `tf.distribute` would move the gradients of all stages to the first device
    of each replica, and sum them there.

    Args:
        pairs: Iterable of tuples of a gradient or `None` and a variable.

    Returns:
        List of such tuples, with the sums. Outside of replicas the gradients
        are unchanged.
    """
    pairs = list(pairs)
    given = [pair for pair in pairs if pair[0] is not None]
    sums = iter(reduced(tf.distribute.ReduceOp.SUM, given))
    return [(None if x is None else next(sums), v) for x, v in pairs]


def reduced(op: tf.distribute.ReduceOp, pairs: Sequence[tuple]) -> list:
    """Returns sums or means over replicas, each on its variable's devices.

    Args:
        op: `tf.distribute.ReduceOp.SUM` or `MEAN`.
        pairs: List of tuples of a tensor and a variable.
    """
    context = tf.distribute.get_replica_context()
    values = [value for value, _ in pairs]
    if context is None or not tf.distribute.has_strategy() or not pairs:
        return values
    if not isinstance(context.strategy, tf.distribute.MirroredStrategy):
        # Only the strategy's own all-reduce makes hosts agree on an order. It
        # sums on the first device of each host, and in packs, so that this
        # device never holds a copy of all gradients.
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=upstream.bytes_per_pack(context.strategy)
            or _BYTES_PER_PACK
        )
        return context.all_reduce(op, values, options)
    # Tensors that are reduced together are packed, so they need one dtype.
    by_devices: dict[tuple, list[int]] = {}
    for i, (value, variable) in enumerate(pairs):
        key = tuple(devices_of(variable)), value.dtype
        by_devices.setdefault(key, []).append(i)

    def merge(strategy, values):
        found: dict[int, Any] = {}
        for (devices, dtype), places in by_devices.items():
            parts = _cross_device_ops(strategy, devices, dtype).batch_reduce(
                op, [(values[i], pairs[i][1]) for i in places]
            )
            found.update(zip(places, parts, strict=True))
        return [found[i] for i in range(len(values))]

    return context.merge_call(merge, args=(values,))


def _cross_device_ops(
    strategy: tf.distribute.Strategy, devices: Sequence[str], dtype: tf.DType
) -> tf.distribute.CrossDeviceOps:
    """Returns the all-reduce over given devices: the user's, or the best one.

    NCCL lacks bfloat16, and cannot use the logical devices that a GPU has been
    split into.
    """
    given = upstream.sums_over_replicas(strategy)
    if given is not None:
        return given
    if (
        dtype == tf.bfloat16
        or len(set(devices)) < len(devices)
        or not all("GPU" in device for device in devices)
        or len(tf.config.list_physical_devices("GPU"))
        != len(tf.config.list_logical_devices("GPU"))
    ):
        return tf.distribute.ReductionToOneDevice()
    return tf.distribute.NcclAllReduce()


class SeveralHosts(upstream.Mixin):
    """Mixin: makes `keras.Model.fit` work with replicas on several hosts."""

    def _make_function(self, step_function):
        if not isinstance(
            self._distribute_strategy,
            tf.distribute.MultiWorkerMirroredStrategy,
        ):
            return super()._make_function(step_function)

        def with_axis(data):
            # Keras averages the logs of several hosts along their first axis,
            # which scalars lack.
            return keras.tree.map_structure(
                lambda x: tf.reshape(x, (1,)) if x.shape.rank == 0 else x,
                step_function(data),
            )

        return super()._make_function(with_axis)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self._distribute_strategy
        if strategy is None:
            return
        if iterator is not None:
            # Keras averages a batch over replicas, only to learn its shape,
            # and fails if replicas are on several hosts.
            for _, _, steps in iterator:
                data_batch = keras.tree.map_structure(
                    lambda x: strategy.experimental_local_results(x)[0],
                    next(steps),
                )
                break
            iterator = None
        if not self.built:
            # Built here, because Keras would build the model in a scope in
            # which no weight gets a value.
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data_batch)
            with strategy.scope():
                self._pipeline_for(x)
        super()._maybe_symbolic_build(iterator, data_batch)
