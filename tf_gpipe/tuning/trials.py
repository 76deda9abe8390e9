"""Measured seconds of training steps of a pipeline made from copied layers."""

import functools
import gc
import time
import traceback
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.models.functional import PipelinedModel
from tf_gpipe.models.sequential import PipelinedSequential
from tf_gpipe.planning import layer_copies
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.plans import Plan
from tf_gpipe.stage import no_values

# How many steps are timed: so many, or more until they take so many seconds.
_NUM_STEPS = 3
# How many long steps a trial takes, with the first one, which is traced.
COUNT = 1 + _NUM_STEPS
_SECONDS, _MOST_STEPS = 0.5, 30


class _Clock(keras.callbacks.Callback):
    """Records the seconds of each step."""

    def on_epoch_begin(self, epoch, logs=None):
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self._start)


def step_seconds(
    model: Any, known: KnownLayers, optimizer: Any, plan: Plan
) -> float | None:
    """Measures training steps of a copy of a model.

    The copy has weights, slots and seeds of its own; the model is left
    unchanged.

    Args:
        model: As of `tf_gpipe.tune`.
        known: Its `KnownLayers`.
        optimizer: A Keras optimizer.
        plan: The `Plan` of a single replica.

    Returns:
        Float, seconds of the fastest step; `None` if a device runs out of
        memory.

    Raises:
        NoCopyError: If a layer cannot be copied.
        Exception: What a step has raised. The variables of its frames are gone.
    """
    try:
        return _fitted(_copy(model, known.input_spec, plan), known, optimizer)
    except tf.errors.ResourceExhaustedError:
        return None
    except Exception as error:
        _clear_frames(error)
        raise
    finally:
        # The copy, which reference cycles keep, has all of its memory.
        gc.collect()


def _clear_frames(error: BaseException) -> None:
    """Clears the frames of an error, and those of the errors before it.

    The copy is among their variables, which live as long as the error.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def _fitted(copy: Any, known: KnownLayers, optimizer: Any) -> float:
    """Returns the seconds of the fastest training step of a copy."""
    masked = any(
        getattr(x, "mask_zero", False)
        for node in known.graph.nodes
        for x in upstream.layers_within(node.layer)
    )
    x = keras.tree.map_structure(
        lambda s: _made_up(s, index=int(masked)), known.input_spec
    )
    y = keras.tree.map_structure(
        lambda s: tf.ones([known.rows, *[1] * (len(s.shape) - 1)]),
        known.output_spec,
    )
    copy.compile(
        upstream.unbuilt(optimizer),
        keras.tree.map_structure(lambda _: mean_square, y),
    )
    clock = _Clock()
    # `tf.data` would make one tensor of a list.
    batches = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples((x, y)))

    def shortest(count: int) -> float:
        copy.fit(
            batches.repeat(count),
            shuffle=False,
            verbose=0,
            callbacks=[clock],
        )
        return min(clock.seconds)

    shortest(1)  # This step is traced.
    seconds = shortest(_NUM_STEPS)
    more = min(int(_SECONDS / seconds), _MOST_STEPS)
    if more > _NUM_STEPS:
        seconds = min(seconds, shortest(more))
    return seconds


def _made_up(spec: keras.KerasTensor, index: int) -> tf.Tensor:
    """Returns an input, with `index` for integers.

    They may be indices of an embedding. That has a row 0, and may have no
    other; but where it masks zeros, all positions would be masked.
    """
    dtype = tf.as_dtype(spec.dtype)
    if dtype == tf.string:
        return tf.fill(spec.shape, "")
    return tf.cast(tf.fill(spec.shape, index if dtype.is_integer else 1), dtype)


def mean_square(y_true: Any, y_pred: Any) -> Any:
    """A loss for any outputs, which takes little time and memory.

    The user's loss is not known here; most take little, too.
    """
    squares = keras.ops.square(keras.ops.cast(y_pred, "float32"))
    return (
        keras.ops.mean(squares, axis=-1) if len(squares.shape) > 1 else squares
    )


def _copy(model: Any, spec: Any, plan: Plan) -> Any:
    """Returns a pipeline of copies of the layers, with weights of its own."""
    arguments = {**plan.arguments, "name": "tried"}
    copied = functools.cache(layer_copies.copied)
    if isinstance(model, upstream.Functional):
        # Without values, so that weights are initialised on the devices of
        # their stages.
        clone, scope = no_values.built(
            lambda _: upstream.with_copied_operations(model, copied), {}
        )
        made = PipelinedModel.from_model(clone, **arguments)
        scope.assign()
        return made
    layers = model
    if isinstance(model, keras.Sequential):
        layers = model.layers
    elif isinstance(model, keras.Layer):
        layers = [model]
    copies = [
        copied(x)
        for x in layers
        if not isinstance(x, (keras.KerasTensor, keras.layers.InputLayer))
    ]
    if isinstance(spec, keras.KerasTensor):
        copies.insert(0, keras.Input(spec.shape[1:], dtype=spec.dtype))
    return PipelinedSequential(copies, **arguments)
