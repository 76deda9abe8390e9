"""State that layers update in a step, merged over micro-batches.

Each micro-batch starts from the state before the mini-batch and has its own
version of it in all stages. After all micro-batches the versions are merged
into the state that layers would have after the mini-batch in one piece.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import replicas
from tf_gpipe.stage.graph import unique
from tf_gpipe.step import batch_statistics
from tf_gpipe.step.micro_batch import Split

# Odd and far from small integers: users number their seeds 1, 2, 3.
_SEED_STRIDE = 1640531527


class StateVersions:
    """The state variables' values of each micro-batch, and their merging.

    Args:
        split: The `Split` of the mini-batch.
        device_of: Function that returns the device of a variable.
        watched: Whether tapes around the call may differentiate by weights that
            several stages use. In training the pipeline does it itself.
    """

    def __init__(
        self,
        split: Split,
        device_of: Callable[[keras.Variable], str],
        watched: bool,
    ):
        self._device_of = device_of
        self._watched = watched
        self._split = split
        # Seeds depend on the micro-batch's number over all replicas, so that
        # all dropout masks differ.
        self._first = replicas.number() * split.num_micro_batches
        # Values before the mini-batch, by the ids of variables.
        self._before: dict[int, tf.Tensor] = {}
        self._seeds: dict[tuple[int, int, str], tf.Tensor] = {}
        self._versions: list[dict[int, tf.Tensor]] = [
            {} for _ in range(split.num_micro_batches)
        ]
        self._updated: dict[int, keras.Variable] = {}

    def read(self, variable: keras.Variable, m: int, device: str) -> tf.Tensor:
        """Returns a variable's current value in micro-batch `m`.

        For a stage on `device`. The value is that of the last stage that has
        updated the variable, or that of `start`.
        """
        if id(variable) in self._versions[m]:
            return self._versions[m][id(variable)]
        return self.start(variable, m, device)

    def start(self, variable: keras.Variable, m: int, device: str) -> tf.Tensor:
        """Returns the value that micro-batch `m` starts from, on `device`.

        Each micro-batch starts from the state before the mini-batch, except
        for random seeds: micro-batch 0 has the plain model's seed, the others
        have seeds derived from it and their index alone. So dropout masks do
        not depend on stages, schedule or rematerialisation.
        """
        key = id(variable)
        if key not in self._before:
            with tf.device(self._device_of(variable)):
                found = tf.convert_to_tensor(variable.value)
                self._before[key] = (
                    found if self._watched else tf.stop_gradient(found)
                )
        found = self._before[key]
        if not upstream.is_seed(variable):
            return found
        if (key, m, device) not in self._seeds:
            # Derived on that device, so that only one seed is sent to it.
            with tf.device(device):
                offset = self._seed_offset(m, found.dtype)
                self._seeds[key, m, device] = found + offset
        return self._seeds[key, m, device]

    def check_unmapped(
        self, variables: Iterable[keras.Variable], k: int, m: int
    ) -> None:
        """Raises an error if stage `k` would have needed values from here.

        Args:
            variables: Those that the stage has used without asking for a value
                of micro-batch `m`.
            k: Index of the stage.
            m: Index of the micro-batch, of which earlier stages have run.
        """
        for variable in variables:
            if id(variable) in self._versions[m]:
                problem = (
                    "layers of an earlier stage assign. They would see the "
                    "value before the step"
                )
            elif upstream.is_seed(variable) and len(self._versions) > 1:
                problem = (
                    "is the state of a random seed generator. All micro-"
                    "batches would draw the same numbers"
                )
            else:
                continue
            raise ValueError(
                f"Layers of stage {k} use variable '{variable.path}', which "
                f"{problem}, since none of these layers has it. Make its owner "
                "(a layer, a metric or a `keras.random.SeedGenerator`) an "
                "attribute of each layer that uses it."
            )

    def write(
        self,
        variables: Sequence[keras.Variable],
        values: Iterable[tf.Tensor],
        m: int,
    ) -> None:
        """Records micro-batch `m`'s new values of variables."""
        for variable, value in zip(variables, values, strict=True):
            self._updated[id(variable)] = variable
            self._versions[m][id(variable)] = value

    def updated(self) -> list[keras.Variable]:
        """Returns the variables that layers have updated, without seeds."""
        return [v for v in self._updated.values() if not upstream.is_seed(v)]

    def commit(self, layers: Iterable[keras.Layer]) -> None:
        """Assigns the merged value to each updated variable.

        Args:
            layers: Layers of the model: batch normalisation and layers with a
                method `merge_micro_batches` have rules of their own.
        """
        layers = list(layers)
        weighted = self._means(layers)
        merged = {}
        for key, variable in self._updated.items():
            with tf.device(self._device_of(variable)):
                merged[key] = self._merge(variable, weighted)
        merged.update(self._merged_by_layers(layers))
        # Averaged over replicas: Keras would leave each replica with its own
        # value, and save the first one's.
        own = [
            key
            for key, variable in self._updated.items()
            if variable.aggregation == "none" and _has_means(merged[key].dtype)
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
        self, variable: keras.Variable, means: dict[int, tf.Tensor]
    ) -> tf.Tensor:
        values = self._values(variable)
        if upstream.is_seed(variable):
            # Each micro-batch has counted the same calls. One is taken, without
            # its offset.
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
        # Integers are mostly counters of calls, equal in all micro-batches.
        return means.get(id(variable), values[0])

    def _merged_by_layers(
        self, layers: Iterable[keras.Layer]
    ) -> dict[int, tf.Tensor]:
        """Returns values merged by layers with `merge_micro_batches`, by id."""
        merged: dict[int, tf.Tensor] = {}
        if len(self._versions) == 1:
            return merged
        numbers = range(self._split.num_micro_batches)
        shares = [tf.cast(self._split.weight(m), "float32") for m in numbers]
        for x in (y for layer in layers for y in upstream.layers_within(layer)):
            own = {
                v.name: v
                for v in upstream.own_variables(x)
                if id(v) in self._updated
            }
            if not own or not hasattr(x, "merge_micro_batches"):
                continue
            with tf.device(self._device_of(next(iter(own.values())))):
                found = x.merge_micro_batches(
                    {name: self._before[id(v)] for name, v in own.items()},
                    [
                        {name: version[id(v)] for name, v in own.items()}
                        for version in self._versions
                    ],
                    shares,
                )
            merged.update((id(own[name]), x) for name, x in found.items())
        return merged

    def _means(self, layers: Iterable[keras.Layer]) -> dict[int, tf.Tensor]:
        """Returns weighted means over micro-batches, by variable id.

        For variables of real or complex numbers that are neither seeds nor
        sums. A mean of equal versions is exact. Moving variances are those of
        `batch_statistics.variances`.
        """
        if len(self._versions) == 1:
            return {}

        def about_first(rows: tf.Tensor) -> tf.Tensor:
            return rows[0] + self._split.mean(rows - rows[0])

        def spread(rows: tf.Tensor) -> tf.Tensor:
            mean = self._split.mean
            return mean(tf.square(rows - mean(rows)))

        means = self._of_columns(
            about_first,
            (
                v
                for v in self._updated.values()
                if v.aggregation != "sum"
                and not upstream.is_seed(v)
                and _has_means(self._values(v)[0].dtype)
            ),
        )
        norms = [
            x
            for x in batch_statistics.batch_norms(layers)
            if id(x.moving_mean) in self._updated
        ]
        spreads = self._of_columns(spread, (x.moving_mean for x in norms))
        means.update(
            batch_statistics.variances(norms, means, spreads, self._device_of)
        )
        return means

    def _of_columns(
        self,
        function: Callable[[tf.Tensor], tf.Tensor],
        variables: Iterable[keras.Variable],
    ) -> dict[int, tf.Tensor]:
        """Applies a function to the versions of each variable.

        The function is called once per device and dtype, on the variables'
        concatenated values: models have hundreds of variables.

        Args:
            function: From a tensor with a row for each micro-batch to a row.
            variables: Iterable of variables that have been updated.

        Returns:
            Dict from ids of variables to the results.
        """
        groups = collections.defaultdict(list)
        for v in unique(variables):
            with tf.device(self._device_of(v)):
                rows = tf.stack(self._values(v))
            shape = rows.shape
            # A variable of unknown shape is not concatenated with others.
            alone = None if shape.is_fully_defined() else id(v)
            groups[self._device_of(v), rows.dtype, alone].append((v, rows))
        found: dict[int, tf.Tensor] = {}
        for (device, *_), group in groups.items():
            with tf.device(device):
                made = _in_columns(function, [rows for _, rows in group])
            found.update(
                (id(v), x) for (v, _), x in zip(group, made, strict=True)
            )
        return found


def _has_means(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_complex


def _in_columns(
    function: Callable[[tf.Tensor], tf.Tensor], tensors: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Applies a function of rows to several tensors, concatenated, at once."""
    if len(tensors) == 1:
        return [function(tensors[0])]
    shapes = [x.shape[1:] for x in tensors]
    flat = [
        x if x.shape.rank == 2 else tf.reshape(x, (x.shape[0], -1))
        for x in tensors
    ]
    sizes = [x.num_elements() for x in shapes]
    row = function(tf.concat(flat, axis=1))
    return [
        x if shape.rank == 1 else tf.reshape(x, shape)
        for x, shape in zip(tf.split(row, sizes), shapes, strict=True)
    ]
