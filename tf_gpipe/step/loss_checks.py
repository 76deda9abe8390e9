"""Refuses losses that cannot be put together from those of micro-batches."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.call_overrides import is_library
from tf_gpipe.stage.graph import ROWS
from tf_gpipe.stage.operations import functions_of
from tf_gpipe.stage.reached import followed_values
from tf_gpipe.stage.reached import follows
from tf_gpipe.stage.reached import reached
from tf_gpipe.stage.tensorflow_state import written
from tf_gpipe.step.dependence import compares_rows
from tf_gpipe.step.made_up_batches import Trials

# Operations with as many results as there are values of some kind.
_CHOOSE = ("DynamicPartition", "Unique", "UniqueV2", "Where")


def check_argument(given: Any, y_pred: Any) -> None:
    """Raises an error for `loss` arguments with which Keras's build fails."""
    if (
        isinstance(given, (list, tuple))
        and None in given
        and not keras.tree.is_nested(y_pred)
    ):
        raise ValueError(
            "A model with a single output has no output without a loss: "
            f"`loss` must not have `None` in it. Received: loss={given}"
        )


def check_together(losses: Sequence[keras.Loss]) -> None:
    """Raises an error for losses of a model that cannot be added."""
    # Keras adds their arrays, as NumPy does whatever their shapes are.
    if len(losses) > 1 and any(map(is_unreduced, losses)):
        raise ValueError(
            "One of several losses has reduction=None, which leaves a "
            "value a sample to be added to the other losses. Give each a "
            "`reduction`, or use schedule='gpipe'."
        )


class _Trace(NamedTuple):
    """What a trace of a loss tells about its values, one a sample."""

    shape: tf.TensorShape
    masked: bool
    assigns: bool  # variables
    mask_follows: bool  # the values of outputs
    size_follows: bool  # the values of outputs


def check_count(
    loss: keras.Loss,
    y_true: Any,
    y_pred: Any,
    weight: Any,
    num_rows: int | None,
    scope: keras.StatelessScope,
) -> bool:
    """Refuses a loss that needs the whole mini-batch.

    `scope` records the variables that the loss reads.

    Returns:
        Whether the count that the loss divides by follows from its values. It
        does, unless their number is proportional to the rows and they have no
        mask.

    Raises:
        ValueError: If the loss needs the whole mini-batch, or if
            `sample_weight` has the wrong shape.
    """
    if type(loss).__call__ is not keras.Loss.__call__:
        raise needs_whole(loss, "overrides `__call__`")
    given = converted(loss, y_true, y_pred)
    trace = _traced(loss, given, num_rows, scope)
    if trace.assigns:
        raise needs_whole(loss, "changes variables")
    if trace.shape.rank == 0:
        reason = "returns one number, not one a sample"
        of_keras = type(loss).__module__.startswith("keras.")
        ranks = [x.shape.rank for x in keras.tree.flatten(y_pred)]
        if of_keras and 1 in ranks:
            reason += (
                " (of outputs of shape (batch_size,), of which Keras's losses "
                "take the mean; make it (batch_size, 1))"
            )
        raise needs_whole(loss, reason)
    rows = trace.shape[0] if trace.shape.rank else None
    if rows is not None and rows % ROWS:
        raise needs_whole(loss, f"returns {rows} numbers for all samples")
    # Values that are chosen may be in another order.
    if isinstance(loss, keras.losses.Circle) or (
        rows is not None and _compares_samples(loss, given, num_rows)
    ):
        raise needs_whole(loss, "compares samples with one another")
    if trace.mask_follows:
        raise needs_whole(loss, "leaves out values by a mask of the outputs")
    if rows is None and is_unreduced(loss):
        raise needs_whole(
            loss, "has reduction=None and a number of values unknown"
        )
    if trace.size_follows and loss.reduction != "sum":
        raise needs_whole(loss, "chooses values by the values of the outputs")
    _check_weight(loss, trace.shape, weight)
    return rows is None or trace.masked


def _traced(
    loss: keras.Loss,
    given: list,
    num_rows: int | None,
    scope: keras.StatelessScope,
) -> _Trace:
    """Traces a loss for `ROWS` rows; the trace is never run.

    With a batch of unknown size, TensorFlow would compute the values of the
    whole mini-batch to count them.
    """

    def call(y_true, y_pred):
        with scope:
            found = keras.ops.convert_to_tensor(loss.call(y_true, y_pred))
        outputs = keras.tree.flatten(y_pred)
        mask = upstream.mask(found)
        makers = set() if mask is None else followed_values(mask)
        traces.append(
            _Trace(
                found.shape,
                mask is not None,
                bool(written(found.graph.get_operations())),
                any(x.op in makers for x in outputs),
                _sized_by(found, outputs),
            )
        )

    traces: list[_Trace] = []
    try:
        tf.function(call, autograph=False).get_concrete_function(
            *_sized(given, num_rows)
        )
    except Exception as e:
        shapes = keras.tree.map_structure(lambda x: str(x.shape), given)
        e.add_note(
            f"Raised by loss '{loss.name}', called on labels and outputs of "
            f"shapes {shapes}."
        )
        raise
    # TensorFlow traces a function that has made a variable a second time.
    return traces[-1]._replace(assigns=any(x.assigns for x in traces))


def _sized(given: list, num_rows: int | None) -> list:
    """Returns the specs of labels and outputs of `ROWS` rows."""

    def sized(x: tf.Tensor) -> tf.TensorSpec:
        # One row of labels may be broadcast to all samples.
        if not x.shape.rank or (x.shape[0] == 1 and num_rows != 1):
            return tf.TensorSpec(x.shape, x.dtype)
        return tf.TensorSpec([ROWS, *x.shape[1:]], x.dtype)

    return keras.tree.map_structure(sized, given)


def _compares_samples(
    loss: keras.Loss, given: list, num_rows: int | None
) -> bool:
    """Returns whether the values of samples depend on the rest of a batch.

    Found by experiment, with made-up labels and outputs. `False` for losses of
    Keras, and for those that fail with such numbers.
    """
    call_of_class = type(loss).call
    own = [call_of_class, getattr(loss, "fn", call_of_class)]
    if all(map(is_library, own)) or loss.dtype not in ("float32", "float64"):
        return False
    specs = _sized(given, num_rows)
    num_labels = len(keras.tree.flatten(specs[0]))

    def call(scope: keras.StatelessScope, *flat: tf.Tensor) -> list[tf.Tensor]:
        values = loss.call(*keras.tree.pack_sequence_as(specs, flat))
        return [keras.ops.convert_to_tensor(values)]

    # A loss may raise any error for made-up numbers.
    with contextlib.suppress(Exception):
        trials = Trials(call, keras.tree.flatten(specs), nodes=[])
        return any(
            compares_rows(values, trials.tolerance)
            for (values,) in trials.run_possible(num_labels)
        )
    return False


def is_unreduced(loss: keras.Loss) -> bool:
    """Returns whether a loss is one value a sample or position.

    Keras reports the mean of these values, but differentiates their sum.
    """
    return loss.reduction in ("none", None)


def converted(loss: keras.Loss, *values: Any) -> list:
    """Returns labels and outputs as Keras passes them to `loss.call`."""
    convert = functools.partial(keras.ops.convert_to_tensor, dtype=loss.dtype)
    return keras.tree.map_structure(convert, list(values))


def needs_whole(loss: Any, reason: str) -> ValueError:
    """Returns the error for a loss that needs the whole mini-batch."""
    name = getattr(loss, "name", type(loss).__name__)
    return ValueError(
        f"Loss '{name}' {reason}, so the loss of a mini-batch cannot be put "
        "together from its micro-batches, as a schedule that starts backward "
        "passes before all forward passes are done needs. Return one value a "
        "sample (leave the mean to `reduction`), or use schedule='gpipe', "
        "which computes the loss on the whole mini-batch."
    )


def _sized_by(found: tf.Tensor, given: list[tf.Tensor]) -> bool:
    """Returns whether a tensor's unknown size follows the values of others.

    Looked at are operations that make a size unknown, and of their inputs those
    that may be sizes, indices or conditions, if there are any.
    """
    if found.shape.is_fully_defined():
        return False
    sources = {x.op for x in given}
    for op in reached([found.op], lambda op: [x.op for x in op.inputs]):
        if all(x.shape.is_fully_defined() for x in op.outputs):
            continue
        names = functions_of(op.node_def)
        bodies = [upstream.function_of(op.graph, x) for x in names]
        for body in bodies:
            # From the end: the first input of a branch is not passed on.
            passed = zip(
                reversed(body.graph.inputs), reversed(op.inputs), strict=False
            )
            inner = [x for x, outer in passed if follows(outer, sources)]
            if any(_sized_by(x, inner) for x in body.graph.outputs):
                return True
        if bodies or not (
            op.type in _CHOOSE
            or all(x.shape.is_fully_defined() for x in op.inputs)
        ):
            continue
        sizes = [x for x in op.inputs if not x.dtype.is_floating]
        if any(follows(x, sources) for x in sizes or op.inputs):
            return True
    return False


def _check_weight(
    loss: keras.Loss, values: tf.TensorShape, weight: Any
) -> None:
    """Raises an error for sample weights that Keras would broadcast wrongly.

    Keras broadcasts as NumPy does, from the last axis: weights of shape (B,)
    times values of shape (B, T) fail, or weigh positions if B is T. With
    micro-batches they might not fail.
    """
    shape = tf.TensorShape(getattr(weight, "shape", ()))
    rank = values.rank
    if None in (shape.rank, rank) or shape.rank in (0, rank) or shape[0] == 1:
        return
    longer = max(shape, values, key=len)
    if abs(shape.rank - rank) > 1 or longer[-1] != 1:
        raise ValueError(
            f"`sample_weight` must have {rank} axes, as many as the values of "
            f"loss '{loss.name}', such as shape (batch_size, 1). Received: "
            f"sample_weight of shape {tuple(shape)}"
        )
