"""Compares training steps of a model and its pipeline, gradient by gradient."""

import math
from operator import itemgetter

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe

# Gradients below this share of the largest are compared as if they were that
# large. Some are zero but for rounding, such as the gradient of the keys' bias
# in attention.
_NOISE = 1e-3


def step_of(model, parts=1):
    """Returns a function that trains one step and returns loss and gradients.

    With a plain model, both are means over `parts` equal parts of the batch.
    """

    def loss_and_gradients(x, y):
        with tf.GradientTape() as tape:
            made = model(x, training=True)
            loss = model.compute_loss(x, y, made, training=True)
        return loss, tape.gradient(loss, model.trainable_variables)

    # As in Keras's `fit`, AutoGraph does not rewrite Python's conditions.
    @tf.function(autograph=False)
    def step(x, y):
        if isinstance(model, tf_gpipe.models.pipelined.Pipelined):
            loss, gradients, _ = model.loss_and_gradients(x, y)
        else:
            size = keras.tree.flatten(x)[0].shape[0] // parts
            cuts = [slice(i * size, (i + 1) * size) for i in range(parts)]
            found = [
                loss_and_gradients(
                    *keras.tree.map_structure(itemgetter(cut), (x, y))
                )
                for cut in cuts
            ]
            loss, gradients = (
                keras.tree.map_structure(lambda *t: _mean(t), *each)
                for each in zip(*found, strict=True)
            )
        gradients = [
            None if g is None else tf.convert_to_tensor(g) for g in gradients
        ]
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss, [
            tf.zeros(v.shape, v.dtype) if g is None else g
            for g, v in zip(gradients, model.trainable_variables, strict=True)
        ]

    return lambda x, y: step(
        *keras.tree.map_structure(tf.convert_to_tensor, (x, y))
    )


def train(model, x, y, steps, parts=1):
    """Trains `steps` steps, and returns loss and gradients of each."""
    step = step_of(model, parts)
    return [
        keras.tree.map_structure(np.asarray, step(x, y)) for _ in range(steps)
    ]


def _mean(tensors):
    if tensors[0] is None:
        return None
    return sum(map(tf.convert_to_tensor, tensors)) / len(tensors)


def difference(expected, received):
    """Returns the largest relative difference of a loss or a gradient.

    A gradient's difference is relative to its largest entry.
    """
    worst = 0.0
    for (loss, ours), (other, theirs) in zip(expected, received, strict=True):
        worst = max(worst, abs(loss - other) / max(abs(loss), 1e-30))
        largest = max((np.abs(g).max() for g in ours if g.size), default=0.0)
        for a, b in zip(ours, theirs, strict=True):
            if not a.size:
                continue
            scale = max(np.abs(a).max(), _NOISE * largest, 1e-30)
            found = np.abs(a - b).max() / scale
            worst = max(worst, found if math.isfinite(found) else math.inf)
    return float(worst)
