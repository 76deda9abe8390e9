"""Layers and losses run on made-up batches, without side effects."""

import contextlib
import math
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.graph import Node
from tf_gpipe.stage.graph import variables_of
from tf_gpipe.stage.operations import functions_of
from tf_gpipe.stage.reached import follows
from tf_gpipe.stage.traced_function import TracedFunction
from tf_gpipe.step import made_up_numbers

# Rows of batches A and B. AB is A and B concatenated, and AA is A twice.
A, B = 2, 3
# Kinds of numbers of the other arguments, where some are indices of classes.
_KINDS_WITH_CLASSES = 0, 1
# Replaces all random numbers that layers draw. Dropout keeps all units then.
_DRAWN = 0.9
_DEVICE = "CPU:0"
_COMPARES = (
    "Equal",
    "NotEqual",
    "Less",
    "LessEqual",
    "Greater",
    "GreaterEqual",
)
_FINDS_NAN = "IsNan", "IsFinite"
# The most numbers for which a function looks that are tried as labels.
_MOST_LABELS = 8


class Trials:
    """Runs layers on made-up batches A, B, AB and AA.

    Values of weights and `tf.Variable`s are made up too, since many are
    initialised to zero. All random numbers are replaced by one number, so that
    they are the same for all rows. Only operations that results need are run,
    from a trace: no state changes.

    Args:
        function: Function that calls layers. It is given the `StatelessScope`
            in which it runs, then flat tensors, and returns a list of tensors.
        specs: List of the `tf.TensorSpec`s of its arguments. An axis of size
            `ROWS * k` has k elements for each row.
        nodes: The layer calls that the function makes.

    Attributes:
        varying: For each result, whether it depends on the arguments.
        by_value: For each result, whether on more than their shapes.
        tolerance: Relative difference up to which numbers count as equal.
    """

    def __init__(
        self,
        function: Callable,
        specs: Sequence[tf.TensorSpec],
        nodes: Sequence[Node],
    ):
        self._specs = specs
        self._variables = variables_of(nodes)
        self._function = function
        # A layer may compute in functions of its own, with another precision.
        self._layer_types = {
            x.layer.compute_dtype
            for x in nodes
            if isinstance(x.layer, keras.Layer)
        }
        # By number of rows; `None` for any number.
        self._traced: dict[int | None, Callable] = {}
        self.varying: list[bool] = []
        self.by_value: list[bool] = []
        self.tolerance = 0.0
        # For which the function looks among its arguments.
        self._numbers: list[float] = []
        # Outside of the graph that is being traced.
        with tf.init_scope(), tf.device(_DEVICE):
            try:
                self._traced[None] = self._trace(None)
            except Exception:
                # A layer may need a static batch size.
                for rows in (A, B, A + B, 2 * A):
                    self._traced[rows] = self._trace(rows)

    def run_all(self) -> list[list[tuple[np.ndarray, ...]]]:
        """Returns what `_run` does, for each kind of numbers.

        Any argument may be labels: see `_run_labels`.
        """
        kinds = range(made_up_numbers.KINDS)
        integers = [i for i, x in enumerate(self._specs) if x.dtype.is_integer]
        try:
            found = [self._run(kind) for kind in kinds]
        except Exception:
            if not integers:
                raise
            # They may be indices of a table of one row.
            return [self._run(kind, largest=0) for kind in kinds]
        floats = [i for i, x in enumerate(self._specs) if x.dtype.is_floating]
        for labels in (integers, *([i] for i in floats)):
            found += self._run_labels(labels, other=0)
        return found

    def run_possible(
        self, num_labels: int
    ) -> list[list[tuple[np.ndarray, ...]]]:
        """As `run_all`, without what raises an error.

        Args:
            num_labels: Integer, how many arguments, the first ones, are labels.
        """
        found = []
        for kind in range(made_up_numbers.KINDS):
            with contextlib.suppress(Exception):
                found.append(self._run(kind))
        # Of two numbers: a loss may look for 0 in all labels of a batch, and
        # take 0 and 1 for -1 and 1, as hinge losses do.
        return found + self._run_labels(range(num_labels), other=1)

    def _run_labels(
        self, labels: Collection[int], other: int
    ) -> list[list[tuple[np.ndarray, ...]]]:
        """Returns what `_run` does if some arguments are labels.

        They are indices of classes, or numbers for which the function looks: a
        label may say that it is to be ignored. Without what raises an error, as
        made-up numbers may. Labels are numbers such as these, 1 and `other`.
        """
        found: list = []
        if not labels:
            return found
        floats = any(self._specs[i].dtype.is_floating for i in labels)
        for label in (1, -1, *self._numbers):
            if math.isnan(label) and not floats:
                continue
            for kind in _KINDS_WITH_CLASSES if label == 1 else (0,):
                with contextlib.suppress(Exception):
                    numbers = label, 0 if label == 1 else other
                    found.append(self._run(kind, 1, labels, numbers))
        return found

    def run_larger(self) -> list[list[tuple[np.ndarray, ...]]]:
        """As `run_all`, with larger numbers, as those of pixels or prices."""
        return [
            self._run(made_up_numbers.KINDS + i)
            for i in range(len(made_up_numbers.LARGER))
        ]

    def _run(
        self,
        kind: int,
        largest: int = 1,
        labels: Iterable[int] = (),
        numbers: tuple[float, int] = (1, 0),
    ) -> list[tuple[np.ndarray, ...]]:
        """Returns the values of each result for A, B, AB and AA.

        `kind` says which numbers the batches have, and `largest` is the largest
        integer; see `made_up_numbers`. Arguments at the indices `labels`
        consist of `numbers` in A, and of 1 and the second of these in B.
        """
        draw = np.random.default_rng(kind)
        a, b = (
            [
                made_up_numbers.made_up(x, rows, kind, draw, sign, largest)
                for x in self._specs
            ]
            for rows, sign in ((A, 1), (B, -1))
        )
        for i in labels:
            a[i] = made_up_numbers.labels(a[i], numbers)
            b[i] = made_up_numbers.labels(b[i], (numbers[1], 1, 1))
        # What has no rows is the same for all batches.
        axes = map(made_up_numbers.row_axes, self._specs)
        b = [y if x else other for x, y, other in zip(axes, b, a, strict=True)]
        batches = [a, b, self._joined(a, b), self._joined(a, a)]
        with tf.init_scope(), tf.device(_DEVICE):
            found = []
            for batch, rows in zip(batches, (A, B, A + B, 2 * A), strict=True):
                function = self._traced.get(None) or self._traced[rows]
                values = [
                    tf.constant(x, spec.dtype)
                    for x, spec in zip(batch, self._specs, strict=True)
                ]
                found.append(list(map(_array, function(*values))))
        return list(zip(*found, strict=True))

    def _joined(self, a: list, b: list) -> list:
        return [
            np.concatenate([x, y], axis=axes[0]) if axes else x
            for x, y, axes in zip(
                a, b, map(made_up_numbers.row_axes, self._specs), strict=True
            )
        ]

    def _trace(self, rows: int | None) -> Callable:
        """Returns the function for batches of so many rows; `None` for any."""
        own: set[tf.Operation] = set()

        def call(*args: tf.Tensor) -> list[tf.Tensor]:
            values = [
                (v, made_up_numbers.weight(v.shape, v.dtype, i))
                for i, v in enumerate(self._variables)
            ]
            own.update(tf.compat.v1.get_default_graph().get_operations())
            with keras.StatelessScope(values, collect_losses=True) as scope:
                return [tf.identity(x) for x in self._function(scope, *args)]

        specs = [
            tf.TensorSpec(made_up_numbers.sized(x.shape, rows), x.dtype)
            for x in self._specs
        ]
        concrete = tf.function(call, autograph=False).get_concrete_function(
            *specs
        )
        traced = TracedFunction(concrete, [])
        given = concrete.inputs[: len(specs)]
        varying = traced.users(given)
        results = concrete.outputs
        self.tolerance = max(
            _tolerance(self._layer_types), _tolerance(_types(concrete.graph))
        )
        self.varying = [x.op in varying for x in results]
        sources = {x.op for x in given}
        self.by_value = [follows(x, sources) for x in results]
        others = [x for x in concrete.graph.get_operations() if x not in own]
        self._numbers = _looked_for(others, sources)
        # Reads of `tf.Variable`s, which are not weights of the layers.
        read = [
            x.outputs[0]
            for x in others
            if x.type == "ReadVariableOp"
            and x.outputs[0].dtype.is_floating
            and x.outputs[0].shape.is_fully_defined()
        ]
        drawn = [x for x in others if _draws(x)]

        def run(*args: tf.Tensor) -> list[tf.Tensor]:
            made = [
                made_up_numbers.weight(
                    x.shape, x.dtype, len(self._variables) + i
                )
                for i, x in enumerate(read)
            ]
            feeds, values = [*given, *read], [*args, *made]
            shapes = traced.extract(feeds, [x.inputs[0] for x in drawn])(values)
            values += [
                tf.fill(shape, tf.constant(_DRAWN, x.outputs[0].dtype))
                for x, shape in zip(drawn, shapes, strict=True)
            ]
            feeds += [x.outputs[0] for x in drawn]
            return traced.extract(feeds, results)(values)

        return tf.function(run, autograph=False, input_signature=specs)


def _array(x: tf.Tensor) -> np.ndarray:
    # NumPy does not take a bfloat16 for a number.
    return (tf.cast(x, "float32") if x.dtype == tf.bfloat16 else x).numpy()


def _looked_for(
    operations: Iterable[tf.Operation], sources: Container[tf.Operation]
) -> list[float]:
    """Returns numbers near those with which values of `sources` are compared.

    Without -1, 0 and 1; with NaN at the end if operations look for it. Of many
    numbers, such as all classes, the smallest and the largest.
    """
    compared = set(_compared(operations, sources))
    numbers = set(filter(math.isfinite, compared))
    near = sorted({x + i for x in numbers for i in (-1, 0, 1)} - {-1, 0, 1})
    if len(near) > _MOST_LABELS:
        near = sorted(numbers - {-1, 0, 1})
        half = _MOST_LABELS // 2
        near = [*near[:half], *near[half:][-half:]]
    nan = [math.nan] if any(map(math.isnan, compared)) else []
    return [*near, *nan]


def _compared(
    operations: Iterable[tf.Operation], sources: Container[tf.Operation]
) -> Iterator[float]:
    """Yields the numbers, NaN included, for which operations look."""
    for op in operations:
        if op.type in _FINDS_NAN and follows(op.inputs[0], sources):
            yield math.nan
        elif op.type in _COMPARES:
            for x, other in zip(op.inputs, reversed(op.inputs), strict=True):
                if x.shape.num_elements() != 1 or not (
                    x.dtype.is_floating or x.dtype.is_integer
                ):
                    continue
                found = tf.get_static_value(x)
                if found is not None and follows(other, sources):
                    yield float(found.item())
        # A constant has no functions, and may be large.
        for name in functions_of(op.node_def) if op.type != "Const" else ():
            function = upstream.function_of(op.graph, name)
            if function is not None:
                given = {x.op for x in function.graph.inputs}
                yield from _compared(function.graph.get_operations(), given)


def _draws(op: tf.Operation) -> bool:
    """Returns whether an operation draws random floats, given a shape."""
    return ("Random" in op.type or "TruncatedNormal" in op.type) and (
        op.op_def.input_arg[0].name == "shape"
        and len(op.outputs) == 1
        and op.outputs[0].dtype.is_floating
    )


def _types(graph: tf.Graph) -> set[str]:
    """Returns the dtypes in which a graph computes."""
    return {
        x.dtype.name
        for op in graph.get_operations()
        for x in op.outputs
        if op.type != "Placeholder"
    }


def _tolerance(types: Container[str]) -> float:
    """Returns the tolerance for what is computed in these dtypes."""
    if "bfloat16" in types:
        return 3e-2
    return 4e-3 if "float16" in types else 1e-4
