"""What a mini-batch makes of the state that layers update as they run.

Each micro-batch starts from the state that the mini-batch found and takes its
own version of it through the stages. When all micro-batches are through,
their versions become one, as if the layers had seen the mini-batch as a whole.
"""

import concurrent.futures
import random
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.random.seed_generator import global_seed_generator

from tf_gpipe import replicas
from tf_gpipe.batch_norm import between_variance
from tf_gpipe.micro_batch import Split

# The generator that was last seen outside of replicas.
_shared: list[keras.random.SeedGenerator] = []

# Odd and far from small integers: users number their seeds 1, 2, 3.
_SEED_STRIDE = 1640531527


def is_seed(variable: keras.Variable) -> bool:
    """Returns whether `variable` is the state of a `SeedGenerator`."""
    return variable.name == "seed_generator_state"


def global_seed() -> list[keras.Variable]:
    """Returns the state of Keras's seed generator for layers without one.

    Keras makes it on first use, with a seed that Python draws. That draw is
    taken back, or what a model is initialised with would depend on whether
    another one is a pipeline.

    Returns:
        List of one variable; of none in a replica, which cannot make it, if
        there is none.
    """
    in_replica = not tf.distribute.in_cross_replica_context()
    if in_replica and tf.distribute.has_strategy():
        if not _shared:
            return []
        # A replica is a thread, and each has a state of Keras of its own.
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, _shared[0])
        return [_shared[0].state]
    drawn = random.getstate()
    known = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if known is None and not (
        tf.executing_eagerly() or tf.distribute.has_strategy()
    ):
        # A function that is traced again may make no variable. In a thread of
        # its own none is being traced.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            made = thread.submit(keras.random.SeedGenerator).result()
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, made)
    with tf.init_scope():
        generator = global_seed_generator()
    random.setstate(drawn)
    _shared[:] = [generator]
    return [generator.state]


def _seed_offset(number: int | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if isinstance(number, int):
        return tf.constant([number * _SEED_STRIDE % (2**31 - 1), 0], dtype)
    offset = tf.cast(number, tf.int64) * _SEED_STRIDE % (2**31 - 1)
    return tf.stack([tf.cast(offset, dtype), tf.zeros((), dtype)])


def _is_zero(number: int | tf.Tensor) -> bool:
    return isinstance(number, int) and number == 0


class StateVersions:
    """The state of each micro-batch as it travels through the stages.

    Args:
        split: `Split` of the mini-batch.
        device_of: Function from a variable to its device.
    """

    def __init__(
        self,
        split: Split,
        device_of: Callable[[keras.Variable], str],
    ):
        self._device_of = device_of
        self._split = split
        # Seeds are by number over all replicas, so that all masks differ.
        self._first = replicas.number() * split.num_micro_batches
        self._found: dict[int, tf.Tensor] = {}
        self._seeds: dict[tuple[int, int, str], tf.Tensor] = {}
        self._versions: list[dict[int, tf.Tensor]] = [
            {} for _ in range(split.num_micro_batches)
        ]
        self._updated: dict[int, keras.Variable] = {}

    def read(self, variable: keras.Variable, m: int, device: str) -> tf.Tensor:
        """Returns the version of micro-batch `m`, for a stage on `device`.

        A micro-batch starts from the state of the mini-batch, but for random
        seeds: micro-batch 0 draws with the plain model's seed, the others with
        seeds derived from it by their number alone. So masks do not depend on
        stages, schedule or rematerialisation.
        """
        key = id(variable)
        if key in self._versions[m]:
            return self._versions[m][key]
        if key not in self._found:
            with tf.device(self._device_of(variable)):
                self._found[key] = tf.stop_gradient(
                    tf.convert_to_tensor(variable.value)
                )
        found = self._found[key]
        seed = self._first + m
        if not is_seed(variable) or _is_zero(seed):
            return found
        if (key, m, device) not in self._seeds:
            # There, so that only one seed is sent to a device.
            with tf.device(device):
                self._seeds[key, m, device] = found + _seed_offset(
                    seed, found.dtype
                )
        return self._seeds[key, m, device]

    def write(
        self,
        variables: Sequence[keras.Variable],
        values: Iterable[tf.Tensor],
        m: int,
    ) -> None:
        """Records the new version of micro-batch `m`."""
        for variable, value in zip(variables, values, strict=True):
            self._updated[id(variable)] = variable
            self._versions[m][id(variable)] = value

    def commit(self, layers: Iterable[keras.Layer]) -> None:
        """Assigns to each updated variable what the mini-batch makes of it.

        Args:
            layers: The layers of the model, to find batch normalisation.
        """
        extra = self._between_variances(layers)
        merged = {}
        for key, variable in self._updated.items():
            with tf.device(self._device_of(variable)):
                merged[key] = self._merge(variable, extra.get(key))
        # Keras leaves each replica with its own, and saves the first one's.
        own = [
            key
            for key, variable in self._updated.items()
            if variable.aggregation == "none" and merged[key].dtype.is_floating
        ]
        means = replicas.reduced(
            tf.distribute.ReduceOp.MEAN,
            [(merged[key], self._updated[key].value) for key in own],
        )
        merged.update(zip(own, means, strict=True))
        for key, variable in self._updated.items():
            with tf.device(self._device_of(variable)):
                variable.assign(merged[key])

    def _values(self, key: int) -> list[tf.Tensor]:
        return [version[key] for version in self._versions]

    def _merge(
        self, variable: keras.Variable, extra: tf.Tensor | None
    ) -> tf.Tensor:
        values = self._values(id(variable))
        if is_seed(variable) and not _is_zero(self._first):
            return values[0] - _seed_offset(self._first, values[0].dtype)
        if len(values) == 1:
            return values[0]
        split = self._split
        if variable.aggregation == "sum":
            old = tf.convert_to_tensor(variable.value)
            return old + tf.add_n(
                [
                    (value - old) * tf.cast(split.valid(m), old.dtype)
                    for m, value in enumerate(values)
                ]
            )
        if not values[0].dtype.is_floating:
            # Counters and seeds: each micro-batch has counted one call.
            return values[0]
        # The weighted mean, exact where all versions agree.
        mean = values[0] + split.mean(tf.stack(values) - values[0])
        return mean if extra is None else mean + tf.cast(extra, mean.dtype)

    def _between_variances(
        self, layers: Iterable[keras.Layer]
    ) -> dict[int, tf.Tensor]:
        """Returns what moving variances lack, by variable id."""
        if len(self._versions) == 1:
            return {}
        lacking = {}
        for layer in layers:
            for x in layer._flatten_layers():
                if not isinstance(x, keras.layers.BatchNormalization):
                    continue
                if id(x.moving_mean) in self._updated:
                    with tf.device(self._device_of(x.moving_mean)):
                        lacking[id(x.moving_variance)] = between_variance(
                            tf.stack(self._values(id(x.moving_mean))),
                            self._split.mean,
                            x.momentum,
                        )
        return lacking
