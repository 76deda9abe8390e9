"""Compares one model of KerasHub as a pipeline with the same in plain Keras.

    python -m tools.keras_hub.trial BertBackbone BertTextClassifier

prints the result as JSON. Without a task, the backbone alone is tried.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings

# Set before TensorFlow is imported: at start it reports a missing GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402
import keras_hub  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tf_gpipe  # noqa: E402
from tf_gpipe.commands import devices  # noqa: E402
from tf_gpipe.stage import model_graph  # noqa: E402
from tools import step_differences  # noqa: E402
from tools.keras_hub import backbones  # noqa: E402
from tools.keras_hub import data  # noqa: E402
from tools.keras_hub import table  # noqa: E402
from tools.keras_hub import tiny  # noqa: E402

STAGES = (2, 4)
STEPS = 3
# Arguments of tasks beside the backbone.
_ARGUMENTS = {
    "dropout": 0.0,
    "num_classes": 3,
    "preprocessor": None,
    "backbone_hidden_size": 16,
    "num_centroids": 4,
    "centroid_intermediate_top_k": 2,
    "depth_estimation_type": "relative",
    "drop_rate": 0.0,
    "use_ordered_embeddings": False,
}

_GENERATE = (keras_hub.models.CausalLM, keras_hub.models.Seq2SeqLM)


def make(backbone, task, dtype="float32"):
    """Returns a new model, with the same weights every time.

    The model has been called once, eagerly: some models keep what their first
    call makes, which must not be a tensor of a graph.
    """
    keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx(dtype)
    keras.utils.set_random_seed(1)
    model = backbones.make(backbone)
    if task is not None:
        tasks = backbones.tasks_of(backbone)
        (cls,) = (x for x in tasks if x.__name__ == task)
        known = tiny.arguments(cls)
        given = {k: v for k, v in _ARGUMENTS.items() if k in known}
        model = cls(backbone=model, compile=False, **given)
    model(data.inputs(model), training=False)
    return model


def pipelined(model, num_stages, **kwargs):
    """Returns a pipeline of a model, and the warnings while it was made."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made = tf_gpipe.PipelinedModel.from_model(
            model,
            num_stages=num_stages,
            # The table tells how equal the stages' parameters are.
            balance="parameters",
            devices=[f"CPU:{i}" for i in range(num_stages)],
            **kwargs,
        )
    return made, [str(x.message) for x in found]


def micro_batches(model):
    """Returns how many to use: 1 if rows of a batch depend on one another."""
    layers = list(model._flatten_layers())
    norms = (keras.layers.BatchNormalization,)
    # Routers add losses that compare the tokens of a batch.
    kinds = [type(x).__name__ for x in layers]
    routers = any("Moe" in x for x in kinds)
    # Drops rows at random in training.
    routers = routers or "DropPath" in kinds
    # Its positions follow from all rows.
    routers = routers or "XLNetEncoder" in kinds
    # These compare all texts with all images.
    pairs = any("LIP" in x and "Head" in x for x in kinds)
    if routers or pairs or any(isinstance(x, norms) for x in layers):
        return 1
    return 2


def compile_for_numbers(model):
    """Compiles with SGD and the mean squared error of every output."""
    keras.Model.compile(model, keras.optimizers.SGD(1e-3), "mse")
    model.optimizer.build(model.trainable_variables)


def numbers(found, backbone, task):
    """Compares training steps, and puts the differences into `found`.

    Two stages are compared in float32; four in float64, or in float32 if plain
    Keras fails in float64.

    Returns:
        Tuple of the pipeline with two stages, the plain model, and its inputs
        and targets.
    """
    try:
        plain, x, y, expected = trained(backbone, task, "float32")
    except Exception as e:
        raise RuntimeError(f"plain Keras fails: {told(e)[-300:]}") from e
    rows = found["micro_batches"] = micro_batches(plain)
    try:
        doubles = trained(backbone, task, "float64")
    except Exception as e:
        doubles = None
        found["float64"] = f"plain Keras: {told(e)}"
    else:
        if _computes_in_float32(*doubles[:2]):
            found["float64"] = "plain Keras computes in float32, too"
    made = []
    for k, dtype in (
        (STAGES[0], "float32"),
        (STAGES[1], "float64" if doubles else "float32"),
    ):
        if dtype == "float64":
            _, x_k, y_k, expected_k = doubles
        else:
            x_k, y_k, expected_k = x, y, expected
        model = make(backbone, task, dtype)
        # Some models have fewer layers than stages.
        stages = min(k, len(model_graph.of_model(model).nodes))
        model, told_of = pipelined(model, stages, num_micro_batches=rows)
        compile_for_numbers(model)
        place = found[f"K={k}"] = {
            "calls": sum(len(x.nodes) for x in model.stages),
            "parameters": [x.count_params() for x in model.stages],
            "warnings": told_of,
        }
        received = step_differences.train(model, x_k, y_k, STEPS)
        place[dtype] = step_differences.difference(expected_k, received)
        if place[dtype] > table.LIMITS[dtype]:
            same = (backbone, task, dtype, x_k, y_k)
            place["as written"] = as_written(*same, stages, rows)
            if place["as written"] > table.LIMITS[dtype]:
                place["rounding"] = rounding(*same, expected_k)
        made.append(model)
    keras.config.set_floatx("float32")
    return made[0], plain, x, y


def trained(backbone, task, dtype):
    """Returns a trained plain model, its data, and what `train` returned."""
    plain = make(backbone, task, dtype)
    x = data.inputs(plain)
    y = data.targets(
        keras.tree.map_structure(np.asarray, plain(x, training=False))
    )
    compile_for_numbers(plain)
    return plain, x, y, step_differences.train(plain, x, y, STEPS)


def rounding(backbone, task, dtype, x, y, expected):
    """Returns the difference that rounding alone makes in a plain model.

    That is the larger of two: between graph and eager execution, which rewrites
    nothing; and after moving each weight to the next larger or smaller number.
    """
    model = make(backbone, task, dtype)
    compile_for_numbers(model)
    tf.config.run_functions_eagerly(True)
    try:
        eager = step_differences.train(model, x, y, STEPS)
    finally:
        tf.config.run_functions_eagerly(False)
    model = make(backbone, task, dtype)
    rng = np.random.default_rng(2)
    for variable in model.trainable_variables:
        value = np.asarray(variable)
        towards = rng.choice([-np.inf, np.inf], value.shape)
        variable.assign(np.nextafter(value, towards.astype(value.dtype)))
    compile_for_numbers(model)
    changed = step_differences.train(model, x, y, STEPS)
    return max(
        step_differences.difference(expected, x) for x in (eager, changed)
    )


def as_written(backbone, task, dtype, x, y, num_stages, num_micro_batches):
    """Returns the difference that is left if TensorFlow rewrites no graph.

    TensorFlow rewrites graphs before it runs them: it folds constants, and
    fuses and reorders operations. A pipeline's graphs are not the plain
    model's, so that rewriting, and thereby rounding, differ. Here neither is
    rewritten, and the plain model takes the mean over the same micro-batches.
    """
    no_rewriting = {"disable_meta_optimizer": True}
    tf.config.optimizer.set_experimental_options(no_rewriting)
    try:
        model = make(backbone, task, dtype)
        compile_for_numbers(model)
        expected = step_differences.train(model, x, y, STEPS, num_micro_batches)
        model, _ = pipelined(
            make(backbone, task, dtype),
            num_stages,
            num_micro_batches=num_micro_batches,
        )
        compile_for_numbers(model)
        return step_differences.difference(
            expected, step_differences.train(model, x, y, STEPS)
        )
    finally:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": False}
        )


def _computes_in_float32(model, x):
    """Returns whether a float64 model computes anything in float32."""
    x = keras.tree.map_structure(tf.convert_to_tensor, x)
    graph = tf.function(lambda x: model(x)).get_concrete_function(x).graph
    return any(
        y.dtype == tf.float32
        for op in graph.get_operations()
        if op.type not in ("Const", "Placeholder")
        for y in op.outputs
    )


def _has_a_loss_of_its_own(backbone, task):
    (cls,) = (x for x in backbones.tasks_of(backbone) if x.__name__ == task)
    return cls.compute_loss is not keras.Model.compute_loss


def told(error):
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[-400:]}"


def uses(found, backbone, task, model, plain, x, y):
    """Tries what people do with a model, and puts the results into `found`.

    Each use is tried with the pipeline of two stages, then with its
    `to_keras()`, then with plain Keras, until one works.
    """
    plain.set_weights(model.get_weights())
    for name, use in USES.items():
        if name == "generate" and not isinstance(plain, _GENERATE):
            continue
        # LoRA trains: a difference in float32 may be rounding, so float64 is
        # tried next, in place of `to_keras()`.
        ways = [
            ("pipeline", lambda: (model, plain)),
            ("to_keras()", lambda: (model.to_keras(), plain)),
            ("plain Keras", lambda: (plain, plain)),
        ]
        if name == "enable_lora":
            ways[1:] = [
                ("float64 pipeline", lambda: _doubles(backbone, task)),
                ("plain Keras", lambda: (make(backbone, task),) * 2),
            ]
        for kind, subjects in ways:
            try:
                use(*subjects(), x, y)
            except Exception as e:
                found.setdefault("errors", {})[f"{name}, {kind}"] = told(e)
                continue
            found[name] = kind if kind != "plain Keras" else "differs"
            break
        else:
            found[name] = "plain Keras fails"
        keras.config.set_floatx("float32")


def _doubles(backbone, task):
    """Returns a pipeline and a plain model in float64."""
    plain = make(backbone, task, "float64")
    model = make(backbone, task, "float64")
    rows = micro_batches(model)
    return pipelined(model, STAGES[0], num_micro_batches=rows)[0], plain


def _same(expected, received):
    def check(a, b):
        a, b = np.asarray(a), np.asarray(b)
        largest = np.abs(a).max(initial=1.0) if a.dtype.kind == "f" else 1.0
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * largest)

    keras.tree.map_structure(check, expected, received)


def _predict(model, plain, x, y):
    _same(plain(x, training=False), model.predict(x, verbose=0))


def _generate(model, plain, x, y):
    found = []
    for each in (plain, model):
        each.compile(sampler="greedy")
        prompt = data.inputs(each, prompt=True)
        found.append(each.generate(prompt, stop_token_ids=None))
    _same(*found)


def _preset(model, plain, x, y):
    folder = tempfile.mkdtemp()
    model.save_to_preset(folder)
    loaded = type(plain).from_preset(folder)
    if isinstance(loaded, tf_gpipe.models.pipelined.Pipelined):
        raise ValueError("What is loaded is a pipeline.")
    _same(plain(x, training=False), loaded(x, training=False))


def _export(model, plain, x, y):
    folder = tempfile.mkdtemp()
    model.export(folder, verbose=False)
    served = tf.saved_model.load(folder)
    _same(plain(x, training=False), served.serve(x))


def _frozen(model):
    """Returns the variables that are not trained, without seeds."""
    seeds = ("seed_generator_state",)
    return [v for v in model.non_trainable_variables if v.name not in seeds]


def _lora(model, plain, x, y):
    for each in dict.fromkeys((plain, model)):
        getattr(each, "backbone", each).enable_lora(rank=2)
        compile_for_numbers(each)
    frozen = [np.asarray(v) for v in _frozen(model)]
    for a, b in zip(model.variables, plain.variables, strict=True):
        b.assign(a.value)
    for each in (model, plain):
        each.fit(x, y, batch_size=data.ROWS, epochs=2, verbose=0)
    if micro_batches(model) > 1:  # no statistics of batches
        for a, b in zip(frozen, _frozen(model), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))
    for a, b in zip(model.variables, plain.variables, strict=True):
        _same(b, a)


USES = {
    "predict": _predict,
    "save_to_preset": _preset,
    "export": _export,
    # These two change the models, so they come last.
    "enable_lora": _lora,
    "generate": _generate,
}


def run(backbone, task=None):
    """Returns the results of a model's trial, as a dictionary."""
    start = time.perf_counter()
    found = {}
    if task is not None and _has_a_loss_of_its_own(backbone, task):
        # Such a loss needs boxes, or permutations of tokens.
        found["trains"] = "the backbone alone"
        task = None
    try:
        made = numbers(found, backbone, task)
        uses(found, backbone, task, *made)
    except Exception as e:
        step = "numbers" if "K=4" not in found else "uses"
        found.setdefault("errors", {})[step] = told(e)
    finally:
        keras.config.set_floatx("float32")
    found["seconds"] = round(time.perf_counter() - start, 1)
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("backbone")
    parser.add_argument("task", nargs="?")
    args = parser.parse_args(argv)
    devices.ensure(max(STAGES))
    print(json.dumps(run(args.backbone, args.task)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
