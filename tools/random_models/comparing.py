"""Compares a drawn model in plain Keras with its pipeline."""

import math
from typing import Any

import keras
import numpy as np

import tf_gpipe
from tools.random_models.drawing import Drawing
from tools.random_models.layers import Track

# Largest difference that a model can make of the rounding of float32.
_MAGNIFIED_ROUNDING = 1e-2


def trained(drawing: Drawing, pipelined: bool) -> dict[str, dict[str, Any]]:
    """Returns the numbers of training, evaluation and prediction, by kind."""
    data, batch_size = drawing.data()
    model = drawing.compiled(pipelined)

    def evaluate() -> dict[str, Any]:
        return model.evaluate(
            *data[:2],
            sample_weight=data[2],
            batch_size=batch_size,
            verbose=0,
            return_dict=True,
        )

    before = evaluate() if "evaluated_first" in drawing.has() else {}
    history = model.fit(
        *data[:2],
        sample_weight=data[2],
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    evaluated = evaluate()
    if "odd_outputs" in drawing.has():
        # Keras does not join scalars of several batches.
        predicted = model.predict_on_batch(data[0])
    else:
        predicted = model.predict(data[0], batch_size=batch_size, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    for layer in model.layers:
        if isinstance(layer, Track):
            variables += [layer.calls, layer.mean]
    return {
        "evaluate before": before,
        "fit": history.history,
        "evaluate": evaluated,
        "predict": dict(enumerate(keras.tree.flatten(predicted))),
        "variables": {i: v.numpy() for i, v in enumerate(variables)},
    }


def training_differs(drawing: Drawing) -> list[str]:
    """Returns how the pipeline's `trained` differs from the plain model's."""
    expected, received = trained(drawing, False), trained(drawing, True)
    found = []
    for kind, values in expected.items():
        for name in {**values, **received[kind]}:
            if name not in values or name not in received[kind]:
                found.append(f"{kind} {name}: not there in one of the two")
                continue
            a, b = (
                np.asarray(x[name], "float64") for x in (values, received[kind])
            )
            if a.shape != b.shape:
                found.append(f"{kind} {name}: shapes {a.shape}, {b.shape}")
            elif not np.allclose(b, a, rtol=1e-4, atol=1e-5, equal_nan=True):
                apart = np.max(np.abs(a - b))
                found.append(f"{kind} {name}: {apart:.1e} apart")
    return found


def verified(drawing: Drawing) -> Any:
    """Returns the report of `verify`."""
    data, _ = drawing.data()
    return tf_gpipe.verify(drawing.compiled(pipelined=True), *data)


def problems(drawing: Drawing) -> list[str]:
    """Returns the differences that `verify` and training find."""
    report = verified(drawing)
    found = [] if report.ok else [str(report)]
    try:
        found += training_differs(drawing)
    except Exception as e:
        found.append(f"Training raised {type(e).__name__}: {e}")
    return found


def difference(drawing: Drawing) -> tuple[str, bool]:
    """Returns what differs, and whether the rounding of float32 explains it.

    A model may magnify rounding until its numbers differ. Then they differ by
    little, and agree in float64.
    """
    # Drops the functions and layer names of earlier models.
    keras.backend.clear_session()
    try:
        report = verified(drawing)
    except Exception as e:
        return f"{type(e).__name__}: {e}", False
    if report.ok:
        return "", False
    failed = [x.difference for x in report.worst.values() if not x.ok]
    if max(failed, default=math.inf) > _MAGNIFIED_ROUNDING:
        return str(report), False
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        keras.backend.clear_session()
        return str(report), verified(drawing).ok
    finally:
        keras.config.set_floatx(floatx)
