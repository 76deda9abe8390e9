"""Checks that refuse layers and stages that no pipeline can run."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.models.arguments import Arguments
from tf_gpipe.stage.stage import Stage


def check_layer(layer: keras.Operation) -> None:
    """Refuses pipelines and stateful RNNs as layers of a pipeline."""
    for x in upstream.layers_within(layer):
        if isinstance(x, Arguments):
            raise ValueError(
                f"Layer '{x.name}' is a pipeline, with stages on devices of "
                "its own, and cannot be a layer of another one. Give the "
                "outer pipeline its layers."
            )
        if isinstance(x, keras.layers.RNN) and x.stateful:
            raise ValueError(
                f"Layer '{x.name}' keeps states of the rows of a batch, which "
                "micro-batches divide. Received: stateful=True. Use False."
            )


def check_specs(layers: Sequence[keras.Operation]) -> None:
    """Refuses layers that Keras cannot call on a `KerasTensor`.

    A plain `keras.Sequential` falls back to calling its layers one by one,
    without a graph; a pipeline needs the graph.

    Args:
        layers: Sequence of layers, each called on the output of the previous
            one. Nothing is checked unless the first is an `InputLayer`.

    Raises:
        NotImplementedError: If Keras cannot infer a layer's output spec.
    """
    first, *others = layers
    if not isinstance(first, keras.layers.InputLayer):
        return
    x = first.output
    for layer in others:
        try:
            x = layer(x)
        except NotImplementedError as e:
            # Keras's own error does not tell what `call` has raised.
            cause: BaseException | None = e
            while isinstance(cause, NotImplementedError):
                cause = cause.__context__
            reason = ""
            if cause is not None:
                reason = f" That raised {type(cause).__name__}: {cause}"
            raise NotImplementedError(
                f"Layer '{layer.name}' (of type {type(layer).__name__}) does "
                "not tell the shape and dtype of what it returns, which a "
                "pipeline must know. Implement its `compute_output_spec` or "
                "`compute_output_shape`; of a layer that has neither, Keras "
                f"infers them from `call`.{reason}"
            ) from e


def check_stage(stage: Stage) -> None:
    """Refuses float8 layers, and complex tensors between stages."""
    for variable in stage.owned:
        if variable.overwrite_with_gradient:
            raise ValueError(
                f"Variable '{variable.path}' is of a layer in float8, whose "
                "scales cannot be put together from micro-batches. Use another "
                "dtype policy."
            )
    for x in keras.tree.flatten([value.spec for value in stage.outputs]):
        if tf.as_dtype(x.dtype).is_complex:
            raise ValueError(
                f"Stage {stage.index} would make complex numbers for others "
                f"('{x.name}', {x.dtype}). Cut the model elsewhere, with "
                "`balance` a list of layer counts; or make it return real "
                "numbers."
            )
