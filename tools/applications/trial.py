"""Compares a model of `keras.applications` as a pipeline with plain Keras.

    python -m tools.applications.trial MobileNetV2 32

prints the result as JSON. Models compute in float64, where rounding explains
tiny differences only.
"""

import argparse
import json
import os
import sys
import time
import traceback

# Set before TensorFlow is imported: at start it reports a missing GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import tf_gpipe  # noqa: E402
from tf_gpipe.commands import devices  # noqa: E402
from tf_gpipe.partition import stage_costs  # noqa: E402
from tools import step_differences  # noqa: E402

ROWS = 4  # in each micro-batch
# Recipe, K and M. Any two of their values meet in one trial.
TRIALS = (
    ("whole", 2, 1),
    ("whole", 4, 2),
    ("frozen base", 4, 1),
    ("frozen base", 2, 2),
)
_RATE = 0.01
# Moving statistics below this are compared as if they were this large. Some
# means are zero but for rounding, as after a layer without a bias that follows
# a normalisation.
_LEAST = 1e-3


def make(name, size, recipe, dropout):
    """Returns a new float64 model, with the same weights every time."""
    keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    family = getattr(keras.applications, name)
    shape = (size, size, 3)
    if recipe == "whole":
        model = family(weights=None, input_shape=shape)
    else:
        base = family(
            weights=None, include_top=False, pooling="avg", input_shape=shape
        )
        base.trainable = False
        inputs = keras.Input(shape)
        outputs = keras.layers.Dense(10, activation="softmax")(
            base(inputs, training=False)
        )
        model = keras.Model(inputs, outputs)
    if not dropout:
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.Dropout):
                layer.rate = 0.0
    return model


def compiled(model):
    """Compiles a model, and returns it."""
    keras.Model.compile(
        model,
        keras.optimizers.SGD(_RATE),
        keras.losses.SparseCategoricalCrossentropy(),
    )
    model.optimizer.build(model.trainable_variables)
    return model


def images(model, rows):
    """Returns made-up images and labels."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 255, (rows, *model.input_shape[1:]))
    return x, rng.integers(0, model.output_shape[-1], rows)


def plain_step(model, x, y):
    """Returns the loss, gradients and state that the contract asks for.

    Plain Keras takes one step with each micro-batch, from the same weights.
    Losses, gradients and moving means are averaged over the micro-batches;
    moving variances are those of all rows.
    """
    start = model.get_weights()
    steps, states = [], []
    norms = {
        id(v): layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        for v in (layer.moving_mean, layer.moving_variance)
    }
    step = step_differences.step_of(model)
    for i in range(0, len(x), ROWS):
        model.set_weights(start)
        steps.append(step(x[i : i + ROWS], y[i : i + ROWS]))
        states.append({id(v): np.asarray(v) for v in norms_of(model, norms)})
    loss, gradients = keras.tree.map_structure(
        lambda *each: np.mean([np.asarray(x) for x in each], axis=0), *steps
    )
    model.set_weights(start)
    before = {id(v): np.asarray(v) for v in norms_of(model, norms)}
    state = []
    for v in norms_of(model, norms):
        layer = norms[id(v)]
        found = np.mean([x[id(v)] for x in states], axis=0)
        if v is layer.moving_variance and layer.trainable:
            mean = id(layer.moving_mean)
            old = layer.momentum * before[mean]
            means = [(x[mean] - old) / (1 - layer.momentum) for x in states]
            found += (1 - layer.momentum) * np.var(means, axis=0)
        state.append(found)
    return (loss, gradients), state


def norms_of(model, norms):
    return [v for v in model.non_trainable_variables if id(v) in norms]


def fullest(model):
    """Returns the largest stage's operations, relative to an equal share."""
    costs = stage_costs.of_graph(
        model._pipeline.graph, [len(x.nodes) for x in model.stages]
    )
    work = [x.flops for x in costs]
    return max(work) * len(work) / sum(work)


def tried(name, size, recipe, num_stages, num_micro_batches):
    """Returns the result of one trial, as a dictionary."""
    start = time.perf_counter()
    dropout = num_micro_batches == 1
    plain = compiled(make(name, size, recipe, dropout))
    x, y = images(plain, ROWS * num_micro_batches)
    expected, state = plain_step(plain, x, y)
    middle = time.perf_counter()
    model = compiled(
        tf_gpipe.PipelinedModel.from_model(
            make(name, size, recipe, dropout),
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            devices=[f"CPU:{i}" for i in range(num_stages)],
        )
    )
    received = step_differences.step_of(model)(x, y)
    received = keras.tree.map_structure(np.asarray, received)
    norms = [
        v
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        for v in (layer.moving_mean, layer.moving_variance)
    ]
    norms = norms_of(model, {id(v) for v in norms})
    differs = {"gradients": step_differences.difference([expected], [received])}
    if norms:
        differs["statistics"] = max(
            float(
                np.abs(a - np.asarray(v)).max() / max(np.abs(a).max(), _LEAST)
            )
            for a, v in zip(state, norms, strict=True)
        )
    return {
        "recipe": recipe,
        "K": num_stages,
        "M": num_micro_batches,
        "calls": sum(len(stage.nodes) for stage in model.stages),
        "fullest": fullest(model),
        "differs": differs,
        "seconds": [
            round(middle - start, 1),
            round(time.perf_counter() - middle, 1),
        ],
    }


def run(name, size, trials=TRIALS):
    """Returns the results of a model's trials, as a dictionary."""
    found = {"trials": []}
    try:
        for trial in trials:
            found["trials"].append(tried(name, size, *trial))
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        found["errors"] = {"trial": f"{trial}: {e} ({last.name})"[:600]}
    finally:
        keras.config.set_floatx("float32")
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name")
    parser.add_argument("size", type=int)
    args = parser.parse_args(argv)
    devices.ensure(max(k for _, k, _ in TRIALS))
    print(json.dumps(run(args.name, args.size)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
