"""Splits a mini-batch into micro-batches, weighs them and merges results."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.devices import replicas

# How the results of micro-batches become that of the mini-batch.
ROWS = "rows"  # one after the other
MEAN = "mean"  # over rows
SUM = "sum"
FIRST = "first"  # all have the same, but for what was drawn at random


class Split:
    """How the rows of one mini-batch are shared out among micro-batches.

    B rows over M micro-batches: the first `B % M` get one row more than the
    rest. A mini-batch with fewer rows than micro-batches leaves some without
    a row of their own. Those run on a copy of the last row, so that no layer
    sees an empty batch, and whatever they yield weighs nothing.

        B=10, M=4: 3 3 2 2          B=3, M=4: 1 1 1 (1)

    All inputs must be dense tensors whose first axis has B rows.
    """

    def __init__(self, inputs: Any, num_micro_batches: int):
        self.num_micro_batches = num_micro_batches
        self._made: dict[tuple, Any] = {}
        flat = keras.tree.flatten(inputs)
        static: set[Any] = {_static_rows(x) for x in flat} - {None}
        if len(static) > 1:
            raise ValueError(
                "All inputs of a pipeline must have the same batch size. "
                f"Received batch sizes {sorted(static)}."
            )
        rows: Any = static.pop() if static else None
        self.static_rows = rows
        self.even = bool(rows) and rows % num_micro_batches == 0
        # Whether a micro-batch may be one without rows of its own.
        self.padded = rows is None or rows < num_micro_batches
        if rows is None:
            strategy = tf.distribute.get_strategy()
            if num_micro_batches > 1 and replicas.on_tpu(strategy):
                raise ValueError(
                    "On TPUs micro-batches are cut from mini-batches of a size "
                    "that is known when the step is traced. Received one of an "
                    "unknown size. Make them with "
                    "`dataset.batch(batch_size, drop_remainder=True)`."
                )
            self.rows = tf.shape(flat[0])[0]
        elif self.even or tf.executing_eagerly():
            self.rows = tf.constant(rows)
        else:
            # Sizes that differ by one would trace every stage twice. A
            # placeholder hides them from static shapes: one trace serves both.
            self.rows = tf.compat.v1.placeholder_with_default(
                tf.constant(rows), ()
            )

    def size(self, m: int) -> Any:
        """Returns the number of rows that micro-batch `m` has of its own."""
        if self.even:
            return self.static_rows // self.num_micro_batches
        return self._here("each size", lambda: tf.unstack(self._sizes()))[m]

    def weight(self, m: int) -> tf.Tensor:
        """Returns the share of micro-batch `m` in the rows, a float64."""
        if self.even:
            return tf.constant(1.0 / self.num_micro_batches, tf.float64)
        return self._here("each weight", lambda: tf.unstack(self._weights()))[m]

    def mean(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the mean of tensors of shape `(M, ...)` by their weights."""
        if self.even:
            return tf.reduce_mean(values, axis=0)
        weights = tf.cast(self._weights(), values.dtype)
        shape = [-1] + [1] * (values.shape.rank - 1)
        return tf.reduce_sum(tf.reshape(weights, shape) * values, axis=0)

    def valid(self, m: int) -> Any:
        """Returns 1 if micro-batch `m` has rows of its own, else 0 (int32)."""
        return tf.cast(self.size(m) > 0, tf.int32) if self.padded else 1

    def take(self, values: Any, m: int) -> Any:
        """Returns the rows of micro-batch `m` of every tensor in `values`."""
        if self.num_micro_batches == 1:
            return values
        start, end = self._bounds(m)
        return keras.tree.map_structure(
            lambda x: None if x is None else x[start:end], values
        )

    def take_of_outputs(self, values: Any, m: int) -> Any:
        """As `take`, of what there is for outputs, such as labels.

        There are several rows of it for each row of the inputs, where layers
        make several of one. What Keras would broadcast stays as it is.
        """
        if self.num_micro_batches == 1:
            return values

        def cut(x: Any) -> Any:
            if x is None or tf.TensorShape(getattr(x, "shape", ())).rank == 0:
                return x
            rows = x.shape[0]
            if rows is None or self.static_rows is None:
                # With the tensor, so that no other one gets its number.
                starts, ends, _ = self._here(
                    ("bounds of outputs", id(x)),
                    lambda: (*self._bounds_of_outputs(tf.shape(x)[0]), x),
                )
                return x[starts[m] : ends[m]]
            if rows == 1 < self.static_rows:
                return x
            each = rows // max(self.static_rows, 1)
            start, end = self._bounds(m)
            return x[start * each : end * each]

        return keras.tree.map_structure(cut, values)

    def _bounds_of_outputs(self, rows: tf.Tensor) -> tuple[list, list]:
        each = rows // tf.maximum(self.rows, 1)
        starts, ends = self._all_bounds()
        # At least one row: that which Keras would broadcast.
        ends = tf.where(rows == 1, 1, ends * each)
        return tf.unstack(starts * each), tf.unstack(ends)

    def _bounds(self, m: int) -> tuple[Any, Any]:
        """Returns the first row of micro-batch `m`, and that after its last."""
        if self.even:
            size = self.size(m)
            return m * size, (m + 1) * size
        starts, ends = self._here(
            "each bound", lambda: [tf.unstack(x) for x in self._all_bounds()]
        )
        return starts[m], ends[m]

    def _all_bounds(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns `_bounds` of all micro-batches, of shape `(M,)`."""

        def make() -> tuple[tf.Tensor, tf.Tensor]:
            sizes = self._sizes()
            starts = tf.cumsum(sizes, exclusive=True)
            starts = tf.maximum(tf.minimum(starts, self.rows - 1), 0)
            return starts, starts + tf.maximum(sizes, 1)

        return self._here("bounds", make)

    def _sizes(self) -> tf.Tensor:
        """Returns `size` of all micro-batches, of shape `(M,)`."""

        def make() -> tf.Tensor:
            base = self.rows // self.num_micro_batches
            rest = self.rows % self.num_micro_batches
            more = tf.range(self.num_micro_batches) < rest
            return base + tf.cast(more, tf.int32)

        return self._here("sizes", make)

    def _weights(self) -> tf.Tensor:
        """Returns `weight` of all micro-batches, of shape `(M,)`."""

        def make() -> tf.Tensor:
            rows = tf.cast(tf.maximum(self.rows, 1), tf.float64)
            return tf.cast(self._sizes(), tf.float64) / rows

        return self._here("weights", make)

    def _here(self, name: Any, make: Callable) -> Any:
        """Returns what `make` makes, once in each graph and on each device.

        So that no device waits for another one to tell it a number.
        """
        if tf.executing_eagerly():
            return make()
        place = tf.no_op()
        key = name, place.graph, place.device
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def merge(self, parts: list[Any], kinds: Any = ROWS) -> Any:
        """Makes one structure of one structure a micro-batch.

        `kinds` says how, of each leaf if it is a structure too.
        """
        if self.num_micro_batches == 1:
            return parts[0]
        if isinstance(kinds, str):
            kinds = keras.tree.map_structure(lambda x: kinds, parts[0])
        return keras.tree.map_structure(self._merge, kinds, *parts)

    def _merge(self, kind: str, *xs: Any) -> Any:
        if xs[0] is None or kind == FIRST:
            return xs[0]
        if kind == SUM:
            return tf.add_n(
                [x * self._share(kind, m, x) for m, x in enumerate(xs)]
            )
        if kind == MEAN:
            return xs[0] + self.mean(tf.stack(xs) - xs[0])
        if self.padded:
            xs = tuple(x[:n] for x, n in zip(xs, self._own(xs), strict=True))
        return tf.concat(xs, axis=0)

    def _share(self, kind: str, m: int, like: tf.Tensor) -> tf.Tensor:
        """Returns what micro-batch `m` counts in the mini-batch's result."""
        if kind == FIRST:
            share: Any = int(m == 0)
        else:
            share = self.weight(m) if kind == MEAN else self.valid(m)
        return tf.cast(share, like.dtype)

    def unmerge(
        self, value: tf.Tensor, parts: list[tf.Tensor], kind: str = ROWS
    ) -> list:
        """Returns gradients of `parts`, given that of the merged tensor.

        Zeros for a micro-batch without rows.
        """
        if self.num_micro_batches == 1:
            return [value]
        if kind != ROWS:
            value = tf.convert_to_tensor(value)
            return [
                value * self._share(kind, m, value) for m in range(len(parts))
            ]
        found = []
        pieces = tf.split(value, self._own(parts))
        for x, piece in zip(parts, pieces, strict=True):
            if self.padded:
                rows = tf.shape(x)[0] - tf.shape(piece)[0]
                others = [[0, 0]] * (value.shape.rank - 1)
                piece = tf.pad(piece, [[0, rows], *others])
            found.append(tf.ensure_shape(piece, x.shape))
        return found

    def _own(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns how many rows of its own each micro-batch has in `parts`."""
        return [tf.shape(x)[0] * self.valid(m) for m, x in enumerate(parts)]

    def like_whole(
        self, part: tf.Tensor, m: int, kind: str = ROWS
    ) -> tf.Tensor:
        """Returns a tensor like the merged parts, of which this is the m-th.

        Its values are such as few functions fail for: 0.5 if floating-point.
        """
        shape = tf.shape(part)
        value = tf.zeros((), part.dtype)
        if part.dtype.is_floating:
            value += 0.5
        if kind != ROWS:
            return tf.ensure_shape(tf.fill(shape, value), part.shape)
        # A layer may make several rows of one.
        rows = shape[0] // tf.maximum(self.size(m), 1) * self.rows
        whole = tf.fill(tf.concat([[rows], shape[1:]], axis=0), value)
        return tf.ensure_shape(whole, [None, *part.shape[1:]])


def not_dense(x: Any) -> TypeError:
    """Returns the error for an input that is no dense tensor."""
    return TypeError(
        "A pipeline splits dense tensors along their first axis. "
        f"Received: {x} (of type {type(x).__name__})"
    )


def static_rows(inputs: Any) -> int | None:
    """Returns how many rows a mini-batch has, if that is known."""
    known = (_static_rows(x) for x in keras.tree.flatten(inputs))
    return next((x for x in known if x is not None), None)


def _static_rows(x: Any) -> int | None:
    if not isinstance(x, tf.Tensor):
        raise not_dense(x)
    if x.shape.rank == 0:
        raise ValueError(
            "Every input of a pipeline needs a batch axis to be split. "
            f"Received a scalar: {x}"
        )
    return None if x.shape.rank is None else x.shape[0]
