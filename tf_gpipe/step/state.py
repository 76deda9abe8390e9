"""What a mini-batch makes of the state that layers update as they run.

Each micro-batch starts from the state that the mini-batch found and takes its
own version of it through the stages. When all micro-batches are through,
their versions become one, as if the layers had seen the mini-batch as a whole.
"""

import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import replicas
from tf_gpipe.step.micro_batch import Split

# Odd and far from small integers: users number their seeds 1, 2, 3.
_SEED_STRIDE = 1640531527


def batch_norms(
    layers: Iterable[keras.Layer],
) -> list[keras.layers.BatchNormalization]:
    """Returns the batch normalisation among layers and within them."""
    return [
        x
        for layer in layers
        for x in upstream.layers_within(layer)
        if isinstance(x, keras.layers.BatchNormalization)
    ]


def check(layer: keras.Layer) -> None:
    """Refuses batch normalisation whose statistics micro-batches can't give."""
    for x in batch_norms([layer]):
        if x.renorm:
            raise ValueError(
                f"Layer '{x.name}' is a BatchNormalization with renorm=True, "
                "whose statistics cannot be put together from micro-batches. "
                "Use renorm=False, or num_micro_batches=1."
            )


class StateVersions:
    """The state of each micro-batch as it travels through the stages."""

    def __init__(
        self, split: Split, device_of: Callable[[keras.Variable], str]
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
        """Returns the version of micro-batch `m`, for a stage on `device`."""
        if id(variable) in self._versions[m]:
            return self._versions[m][id(variable)]
        return self.start(variable, m, device)

    def start(self, variable: keras.Variable, m: int, device: str) -> tf.Tensor:
        """Returns the version that micro-batch `m` starts from, on `device`.

        A micro-batch starts from the state of the mini-batch, but for random
        seeds: micro-batch 0 draws with the plain model's seed, the others with
        seeds derived from it by their number alone. So masks do not depend on
        stages, schedule or rematerialisation.
        """
        key = id(variable)
        if key not in self._found:
            with tf.device(self._device_of(variable)):
                self._found[key] = tf.stop_gradient(
                    tf.convert_to_tensor(variable.value)
                )
        found = self._found[key]
        if not _is_seed(variable):
            return found
        if (key, m, device) not in self._seeds:
            # There, so that only one seed is sent to a device.
            with tf.device(device):
                offset = self._seed_offset(m, found.dtype)
                self._seeds[key, m, device] = found + offset
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

        The model's `layers` tell which variables are of batch normalisation,
        and of layers that know better what micro-batches make together.
        """
        layers = list(layers)
        lacking = self._between_variances(layers)
        merged = {}
        for key, variable in self._updated.items():
            with tf.device(self._device_of(variable)):
                merged[key] = self._merge(variable, lacking.get(key))
        merged.update(self._merged_by_layers(layers))
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

    def _seed_offset(self, m: int, dtype: tf.DType) -> tf.Tensor:
        number = self._first + m
        if tf.is_tensor(number):
            number = tf.cast(number, tf.int64)
        return tf.cast(
            tf.stack([number * _SEED_STRIDE % (2**31 - 1), 0]), dtype
        )

    def _values(self, variable: keras.Variable) -> list[tf.Tensor]:
        return [version[id(variable)] for version in self._versions]

    def _merge(
        self, variable: keras.Variable, lacking: tf.Tensor | None
    ) -> tf.Tensor:
        values = self._values(variable)
        if _is_seed(variable):
            # Each micro-batch has counted one call.
            return values[0] - self._seed_offset(0, values[0].dtype)
        if len(values) == 1:
            return values[0]
        if variable.aggregation == "sum":
            old = tf.convert_to_tensor(variable.value)
            return old + tf.add_n(
                [
                    (value - old) * tf.cast(self._split.valid(m), old.dtype)
                    for m, value in enumerate(values)
                ]
            )
        if not values[0].dtype.is_floating:
            # As a rule a counter of calls.
            return values[0]
        # The weighted mean, exact where all versions agree.
        mean = values[0] + self._split.mean(tf.stack(values) - values[0])
        return mean if lacking is None else mean + tf.cast(lacking, mean.dtype)

    def _merged_by_layers(
        self, layers: Iterable[keras.Layer]
    ) -> dict[int, tf.Tensor]:
        """Returns what layers with a `merge_micro_batches` make of versions."""
        merged: dict[int, tf.Tensor] = {}
        if len(self._versions) == 1:
            return merged
        numbers = range(self._split.num_micro_batches)
        shares = [tf.cast(self._split.weight(m), "float32") for m in numbers]
        every = map(upstream.layers_within, layers)
        for x in itertools.chain.from_iterable(every):
            own = {
                v.name: v
                for v in upstream.own_variables(x)
                if id(v) in self._updated
            }
            if not own or not hasattr(x, "merge_micro_batches"):
                continue
            with tf.device(self._device_of(next(iter(own.values())))):
                found = x.merge_micro_batches(
                    {name: self._found[id(v)] for name, v in own.items()},
                    [
                        {name: version[id(v)] for name, v in own.items()}
                        for version in self._versions
                    ],
                    shares,
                )
            merged.update((id(own[name]), x) for name, x in found.items())
        return merged

    def _between_variances(
        self, layers: Iterable[keras.Layer]
    ) -> dict[int, tf.Tensor]:
        """Returns what means of moving variances lack, by variable id.

        A micro-batch with mean u_m and variance s_m, of weight w_m, moves the
        statistics to `a * old + (1 - a) * (u_m, s_m)`, a being the momentum.
        The variance of the mini-batch, with mean u, is

            sum_m w_m * s_m  +  sum_m w_m * (u_m - u)^2

        The weighted mean of the moved variances has the first term. This is
        the second one, times (1 - a), taken from the moved means, which lie
        (1 - a) times as far apart as the u_m do.
        """
        lacking: dict[int, tf.Tensor] = {}
        if len(self._versions) == 1:
            return lacking
        mean = self._split.mean
        for x in batch_norms(layers):
            if id(x.moving_mean) not in self._updated:
                continue
            with tf.device(self._device_of(x.moving_mean)):
                means = tf.stack(self._values(x.moving_mean))
                spread = mean(tf.square(means - mean(means)))
                if x.momentum < 1:
                    spread /= 1.0 - x.momentum
                lacking[id(x.moving_variance)] = spread
        return lacking


def _is_seed(variable: keras.Variable) -> bool:
    return variable.name == "seed_generator_state"
