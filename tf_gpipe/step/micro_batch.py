"""Splits a mini-batch into micro-batches, weighs them and merges results."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import replicas

# How the results of micro-batches are merged into that of the mini-batch.
ROWS = "rows"  # concatenated along axis 0
MEAN = "mean"  # averaged, weighted by rows
SUM = "sum"
FIRST = "first"  # the first: all are equal, except for random numbers

_OF_OUTPUTS = (
    "Labels and sample weights must have as many rows as the inputs, a "
    "multiple of them or one row. With schedule='gpipe' they may have others, "
    "if the loss takes them."
)


class Split:
    """The division of a mini-batch's rows into micro-batches.

    B rows over M micro-batches: the first `B % M` get one row more than the
    rest. If there are fewer rows than micro-batches, some micro-batches have no
    row of their own. They run on a copy of the last row, so that no layer sees
    an empty batch, and their results have weight 0.

        B=10, M=4: 3 3 2 2          B=3, M=4: 1 1 1 (1)

    All inputs must be dense tensors whose first axis has B rows.
    """

    def __init__(self, inputs: Any, num_micro_batches: int):
        self.num_micro_batches = num_micro_batches
        self._made: dict[tuple, Any] = {}
        flat = keras.tree.flatten(inputs)
        known = [_static_rows(x) for x in flat]
        static: set[Any] = set(known) - {None}
        if len(static) > 1:
            raise ValueError(
                "All inputs of a pipeline must have the same batch size. "
                f"Received batch sizes {sorted(static)}."
            )
        rows: Any = static.pop() if static else None
        self.static_rows = rows
        checked: Any = _same_rows(flat) if None in known else None
        self.even = bool(rows) and rows % num_micro_batches == 0
        # Whether a micro-batch may have no rows of its own.
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
            self.rows = checked
        elif self.even or tf.executing_eagerly():
            self.rows = tf.constant(rows)
        else:
            # Micro-batches of two sizes would need two traces of every stage. A
            # placeholder hides the sizes from static shapes: one trace serves
            # both.
            self.rows = tf.compat.v1.placeholder_with_default(
                tf.constant(rows), ()
            )

    def size(self, m: int) -> Any:
        """Returns the number of rows of micro-batch `m`, 0 if only padding."""
        if self.even:
            return self.static_rows // self.num_micro_batches
        return self._each(self._sizes)[m]

    def weight(self, m: int) -> tf.Tensor:
        """Returns micro-batch `m`'s share of the rows, a float64 scalar."""
        if self.even:
            return tf.constant(1.0 / self.num_micro_batches, tf.float64)
        return self._each(self._weights)[m]

    def mean(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the mean of a tensor of shape `(M, ...)` over axis 0.

        Weighted by the rows of micro-batches.
        """
        if self.even:
            return tf.reduce_mean(values, axis=0)
        weights = tf.cast(self._here(self._weights), values.dtype)
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
            lambda x: None if x is None else _cut(x, start, end), values
        )

    def take_of_outputs(self, values: Any, m: int) -> Any:
        """As `take`, for tensors with the rows of outputs, such as labels.

        They have several rows for each row of the inputs, if layers make
        several rows of one. A tensor that Keras would broadcast, of one row or
        without axes, is returned whole. Other numbers of rows are refused.
        """
        if self.num_micro_batches == 1:
            return values

        def cut(x: Any) -> Any:
            if x is None or tf.TensorShape(getattr(x, "shape", ())).rank == 0:
                return x
            rows = x.shape[0]
            if rows is None or self.static_rows is None:
                # `x` is kept with them, so that no other tensor gets its id.
                starts, ends, _ = self._here(
                    lambda: (*self._bounds_of_outputs(tf.shape(x)[0]), x),
                    ("bounds of outputs", id(x)),
                )
                return _cut(x, starts[m], ends[m])
            if rows == 1 < self.static_rows:
                return x
            each = rows // max(self.static_rows, 1)
            if rows < self.static_rows or each * self.static_rows != rows:
                raise ValueError(
                    f"{_OF_OUTPUTS} Received {rows} rows, for inputs of "
                    f"{self.static_rows} rows."
                )
            start, end = self._bounds(m)
            return _cut(x, start * each, end * each)

        return keras.tree.map_structure(cut, values)

    def _bounds_of_outputs(self, rows: tf.Tensor) -> tuple[list, list]:
        each = rows // tf.maximum(self.rows, 1)
        fits = (rows == 1) | ((rows >= self.rows) & (each * self.rows == rows))
        received = [_OF_OUTPUTS, "Received rows, and rows of inputs:"]
        check = tf.debugging.Assert(fits, [*received, rows, self.rows])
        with tf.control_dependencies([check]):
            each = tf.identity(each)
        starts, ends = self._here(self._all_bounds)
        # A tensor of one row is taken whole, as Keras would broadcast it.
        ends = tf.where(rows == 1, 1, ends * each)
        return tf.unstack(starts * each), tf.unstack(ends)

    def _bounds(self, m: int) -> tuple[Any, Any]:
        """Returns the index of micro-batch `m`'s first row, and its end."""
        if self.even:
            size = self.size(m)
            return m * size, (m + 1) * size
        starts, ends = self._each(self._all_bounds)
        return starts[m], ends[m]

    def _all_bounds(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the starts and ends of all micro-batches, shape `(M,)`."""
        sizes = self._here(self._sizes)
        starts = tf.cumsum(sizes, exclusive=True)
        starts = tf.maximum(tf.minimum(starts, self.rows - 1), 0)
        return starts, starts + tf.maximum(sizes, 1)

    def _sizes(self) -> tf.Tensor:
        """Returns `size` of all micro-batches, shape `(M,)`."""
        base = self.rows // self.num_micro_batches
        rest = self.rows % self.num_micro_batches
        more = tf.range(self.num_micro_batches) < rest
        return base + tf.cast(more, tf.int32)

    def _weights(self) -> tf.Tensor:
        """Returns `weight` of all micro-batches, shape `(M,)`."""
        rows = tf.cast(tf.maximum(self.rows, 1), tf.float64)
        return tf.cast(self._here(self._sizes), tf.float64) / rows

    def _each(self, make: Callable) -> Any:
        """As `_here`, with a list in place of each tensor of shape `(M,)`."""
        return self._here(
            lambda: tf.nest.map_structure(tf.unstack, self._here(make)),
            ("each", make),
        )

    def _here(self, make: Callable, name: Any = None) -> Any:
        """Returns `make()`, called once per graph and device.

        Each device computes its own, so that none waits for another's result.

        Args:
            make: Function without arguments.
            name: Identifies `make`, if it is another object in each call.
        """
        if tf.executing_eagerly():
            return make()
        place = tf.no_op()
        key = name or make, place.graph, place.device
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def merge(self, parts: list[Any], kinds: Any = ROWS) -> Any:
        """Merges the nested structures of all micro-batches into one.

        Args:
            parts: A nested structure for each micro-batch.
            kinds: How to merge: `ROWS`, `MEAN`, `SUM` or `FIRST`; one for all
                leaves, or a structure of them.
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
                [x * self.share(kind, m, x) for m, x in enumerate(xs)]
            )
        if kind == MEAN:
            return xs[0] + self.mean(tf.stack(xs) - xs[0])
        if self.padded:
            xs = tuple(x[:n] for x, n in zip(xs, self._own(xs), strict=True))
        return tf.concat(xs, axis=0)

    def share(self, kind: str, m: int, like: tf.Tensor) -> tf.Tensor:
        """Returns the factor of micro-batch `m` in the merged result.

        For a mean its share of the rows. For a sum 1, or 0 without rows of its
        own.

        Args:
            kind: `MEAN`, `SUM` or `FIRST`.
            m: Index of the micro-batch.
            like: Tensor that has the factor's dtype.
        """
        if kind == FIRST:
            share: Any = int(m == 0)
        else:
            share = self.weight(m) if kind == MEAN else self.valid(m)
        return tf.cast(share, like.dtype)

    def unmerge(
        self, value: tf.Tensor, parts: list[tf.Tensor], kind: str
    ) -> list:
        """Returns the gradients of `parts`, given that of the merged tensor.

        They are zero for a micro-batch without rows of its own.

        Args:
            value: Gradient of the merged tensor.
            parts: The tensors of all micro-batches.
            kind: How they were merged.
        """
        if self.num_micro_batches == 1:
            return [value]
        if kind != ROWS:
            value = tf.convert_to_tensor(value)
            return [
                value * self.share(kind, m, value) for m in range(len(parts))
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
        """Returns the number of rows in `parts` that are not padding."""
        return [tf.shape(x)[0] * self.valid(m) for m, x in enumerate(parts)]

    def like_whole(self, part: tf.Tensor, m: int, kind: str) -> tf.Tensor:
        """Returns a stand-in for a merged tensor, given its m-th part.

        It has the shape and dtype. Floating-point values are 0.5, for which
        few functions fail.
        """
        shape = tf.shape(part)
        value = tf.zeros((), part.dtype)
        if part.dtype.is_floating:
            value += 0.5
        if kind != ROWS:
            return tf.ensure_shape(tf.fill(shape, value), part.shape)
        # A layer may make several rows of one input row.
        rows = shape[0] // tf.maximum(self.size(m), 1) * self.rows
        whole = tf.fill(tf.concat([[rows], shape[1:]], axis=0), value)
        return tf.ensure_shape(whole, [None, *part.shape[1:]])


def not_dense(x: Any) -> TypeError:
    """Returns the error for an input that is no dense tensor."""
    return TypeError(
        "A pipeline splits dense tensors along their first axis. Make others "
        "dense before they reach the model, by `tf.sparse.to_dense` or the "
        f"`to_tensor` of a ragged tensor. Received: {x} (of type "
        f"{type(x).__name__})"
    )


def static_rows(inputs: Any) -> int | None:
    """Returns the number of rows of a mini-batch, or `None` if not static."""
    known = (_static_rows(x) for x in keras.tree.flatten(inputs))
    return next((x for x in known if x is not None), None)


def _cut(x: tf.Tensor, start: Any, end: Any) -> tf.Tensor:
    """Returns rows, cut on the tensor's device, so that only these are sent."""
    with upstream.beside(x):
        return x[start:end]


def _same_rows(inputs: list[tf.Tensor]) -> tf.Tensor:
    """Returns the rows of inputs, checked to be equal when the step runs."""
    rows = [tf.shape(x)[0] for x in inputs]
    if len(rows) == 1:
        return rows[0]
    check = tf.debugging.Assert(
        tf.reduce_all(tf.stack(rows[1:]) == rows[0]),
        [
            "All inputs of a pipeline must have the same batch size. "
            "Received batch sizes:",
            *rows,
        ],
    )
    with tf.control_dependencies([check]):
        return tf.identity(rows[0])


def _static_rows(x: Any) -> int | None:
    if not isinstance(x, tf.Tensor):
        raise not_dense(x)
    if x.shape.rank == 0:
        raise ValueError(
            f"Inputs of a pipeline need a batch axis. Received a scalar: {x}"
        )
    return None if x.shape.rank is None else x.shape[0]
