"""The calls of the library, each with right arguments.

They run in a directory of their own, where they may write files.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L  # noqa: N812

import tf_gpipe

_ROWS = 6
_DIM = 4
# Arguments that the classes and `from_model` share.
_PIPELINE: dict[str, Callable[[], Any]] = {
    "num_stages": lambda: 2,
    "num_micro_batches": lambda: 2,
    "balance": lambda: "parameters",
    "schedule": lambda: "1f1b",
    "remat": lambda: "always",
    "devices": lambda: ["CPU:0", "CPU:1"],
    "boundary_dtype": lambda: None,
    "memory_limit": lambda: None,
    "batch_size": lambda: None,
}


def _none() -> None:
    """A right value of arguments that may be left out."""


@dataclasses.dataclass(frozen=True)
class Use:
    """A call, and what plain Keras does in its place."""

    name: str
    arguments: dict[str, Callable[[], Any]]  # functions that make right values
    run: Callable[..., Any]  # returns numbers, or a text
    plain: Callable[..., Any] | None = None  # if plain Keras has such a call


def dense(seed: int) -> keras.Layer:
    init = keras.initializers.GlorotUniform(seed=seed)
    return L.Dense(_DIM, kernel_initializer=init)


def layers() -> list[Any]:
    return [keras.Input((_DIM,)), dense(1), dense(2), dense(3)]


def data() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(_ROWS, _DIM)).astype("float32")


# Of one mini-batch.
_DATA: dict[str, Callable[[], Any]] = {
    "x": data,
    "y": data,
    "sample_weight": _none,
}


def plain_model() -> keras.Model:
    return keras.Sequential(layers())


def pipeline(made: Any = None, **kwargs: Any) -> Any:
    right = {name: make() for name, make in _PIPELINE.items()}
    made = layers() if made is None else made
    return tf_gpipe.PipelinedSequential(made, **{**right, **kwargs})


def trained(model: Any) -> list[Any]:
    """Trains a step, and returns its loss and the weights after it."""
    if not model.compiled:
        model.compile(keras.optimizers.SGD(0.1), "mse")
    loss = model.train_on_batch(data(), data())
    return [loss, *model.get_weights()]


def _constructors() -> list[Use]:
    def keras_only(arguments: dict[str, Any]) -> dict[str, Any]:
        keep = ("trainable", "name")
        return {x: arguments[x] for x in keep if x in arguments}

    def functional(
        make: Callable, inputs: Any, outputs: Any, **others: Any
    ) -> list[Any]:
        first = keras.Input((_DIM,))
        last = functools.reduce(lambda x, f: f(x), layers()[1:], first)
        inputs = first if inputs is None else inputs
        outputs = last if outputs is None else outputs
        return trained(make(inputs, outputs, **others))

    common = {**_PIPELINE, "trainable": lambda: True, "name": lambda: "model"}
    return [
        Use(
            "PipelinedSequential",
            {"layers": layers, **common},
            lambda **kw: trained(tf_gpipe.PipelinedSequential(**kw)),
            lambda layers, **kw: trained(
                keras.Sequential(layers, **keras_only(kw))
            ),
        ),
        Use(
            "PipelinedModel",
            {"inputs": _none, "outputs": _none, **common},
            functools.partial(functional, tf_gpipe.PipelinedModel),
            functools.partial(
                functional,
                lambda *x, **more: keras.Model(*x, **keras_only(more)),
            ),
        ),
        Use(
            "PipelinedModel.from_model",
            {"model": plain_model, **common},
            lambda **kw: trained(tf_gpipe.PipelinedModel.from_model(**kw)),
            lambda model, **kw: trained(model),
        ),
    ]


class _Kept:
    """A model that many uses share, with the same weights for each."""

    def __init__(self, make: Callable[[], keras.Model]):
        self._make = make
        self._model: Any = None

    def get(self) -> keras.Model:
        if self._model is None:
            self._model = self._make()
            self._weights = self._model.get_weights()
            optimizer = keras.optimizers.SGD(0.1)
            self._model.compile(optimizer, "mse", metrics=["mae"])
        self._model.set_weights(self._weights)
        return self._model

    def forget(self) -> None:
        self._model = None


PIPELINE = _Kept(pipeline)
PLAIN = _Kept(plain_model)


def _numbers(model: Any, made: Any) -> list[Any]:
    if isinstance(made, keras.callbacks.History):
        made = made.history
    found = [x for x in keras.tree.flatten(made) if x is not None]
    return [*found, *model.get_weights()]


def _method(
    name: str, arguments: dict[str, Callable[[], Any]], of_keras: bool = True
) -> Use:
    def run(kept: _Kept, **kwargs: Any) -> list[Any]:
        model = kept.get()
        try:
            return _numbers(model, getattr(model, name)(**kwargs))
        except BaseException:
            kept.forget()
            raise

    return Use(
        f"model.{name}",
        arguments,
        functools.partial(run, PIPELINE),
        functools.partial(run, PLAIN) if of_keras else None,
    )


def _compiled(make: Callable[[], keras.Model]) -> Callable[..., list[Any]]:
    def run(**kwargs: Any) -> list[Any]:
        model = make()
        model.compile(**kwargs)
        history = model.fit(
            data(), data(), batch_size=_ROWS, verbose=0, shuffle=False
        )
        return _numbers(model, history)

    return run


def _methods() -> list[Use]:
    quiet = {"verbose": lambda: 0}
    fit = {
        "x": data,
        "y": data,
        **quiet,
        "batch_size": lambda: 3,
        "epochs": lambda: 1,
        "callbacks": _none,
        "validation_split": lambda: 0.0,
        "validation_data": _none,
        "shuffle": lambda: False,
        "class_weight": _none,
        "sample_weight": _none,
        "initial_epoch": lambda: 0,
        "steps_per_epoch": _none,
        "validation_steps": _none,
        "validation_batch_size": _none,
        "validation_freq": lambda: 1,
    }
    asked = {
        **quiet,
        "x": data,
        "batch_size": lambda: 3,
        "steps": _none,
        "callbacks": _none,
    }
    compiled = {
        "optimizer": lambda: "sgd",
        "loss": lambda: "mse",
        "loss_weights": _none,
        "metrics": _none,
        "weighted_metrics": _none,
        "run_eagerly": lambda: False,
        "steps_per_execution": lambda: 1,
        "jit_compile": lambda: "auto",
        "auto_scale_loss": lambda: True,
    }
    return [
        Use(
            "model.compile",
            compiled,
            _compiled(pipeline),
            _compiled(plain_model),
        ),
        _method("fit", fit),
        _method("evaluate", {**asked, "y": data, "sample_weight": _none}),
        _method("predict", asked),
        _method("train_on_batch", {**_DATA, "class_weight": _none}),
        _method("test_on_batch", _DATA),
        _method("predict_on_batch", {"x": data}),
        _method("__call__", {"inputs": data, "training": _none, "mask": _none}),
        _method("set_weights", {"weights": lambda: PLAIN.get().get_weights()}),
        _method("save", {"filepath": lambda: "model.keras"}),
        _method("save_weights", {"filepath": lambda: "x.weights.h5"}),
        _method("load_weights", {"filepath": _saved_weights}),
        _method("compute_output_shape", {"input_shape": lambda: (None, _DIM)}),
        _method("build", {"input_shape": lambda: (None, _DIM)}),
    ]


def _saved_weights() -> str:
    PLAIN.get().save_weights("y.weights.h5")
    return "y.weights.h5"


def _own() -> list[Use]:
    """Returns the uses of tf_gpipe's own calls, and of `load_model`."""

    def gradients(kept: _Kept, x: Any, y: Any, sample_weight: Any) -> list[Any]:
        model: Any = kept.get()
        if kept is PIPELINE:
            loss, found, y_pred = model.loss_and_gradients(x, y, sample_weight)
            return [loss, *found, y_pred]
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = model.compute_loss(x, y, y_pred, sample_weight)
        return [loss, *tape.gradient(loss, model.trainable_variables), y_pred]

    def timeline(**kwargs: Any) -> None:
        callback = tf_gpipe.callbacks.Timeline(**kwargs)
        PIPELINE.get().fit(
            data(), data(), batch_size=3, verbose=0, callbacks=[callback]
        )

    def from_config(cls: Any, **changes: Any) -> list[Any]:
        made = pipeline()
        if cls is tf_gpipe.PipelinedModel:
            right = {x: y() for x, y in _PIPELINE.items()}
            made = cls.from_model(plain_model(), **right)
        config = made.get_config()
        return trained(cls.from_config({**config, **changes}))

    others = ("devices", "boundary_dtype")
    plan = {
        **{x: y for x, y in _PIPELINE.items() if x not in others},
        "layers": lambda: layers()[1:],
        "input_spec": lambda: (_ROWS, _DIM),
        "num_devices": _none,
        "optimizer": lambda: "adam",
        "dtype_policy": _none,
        "device_memory": lambda: "16GB",
        "device_flops": lambda: 1e12,
        "bandwidth": lambda: 1e9,
        "latency": lambda: 0.0,
    }
    tune = {
        **{x: plan[x] for x in ("layers", "input_spec", "optimizer")},
        **{x: plan[x] for x in ("device_memory", "bandwidth", "latency")},
        "devices": lambda: 2,
        "device_flops": lambda: 1e9,
        "budget_seconds": lambda: 0,
        "replicas": lambda: True,
        "num_stages": _none,
        "num_micro_batches": _none,
        "schedule": lambda: "1f1b",
        "remat": _none,
    }

    return [
        Use(
            "model.loss_and_gradients",
            _DATA,
            lambda **kw: gradients(PIPELINE, **kw),
            lambda **kw: gradients(PLAIN, **kw),
        ),
        _method("rebalance", {"balance": lambda: [1, 2]}, of_keras=False),
        Use(
            "PipelinedSequential.from_config",
            {"layers": lambda: pipeline().get_config()["layers"], **_PIPELINE},
            functools.partial(from_config, tf_gpipe.PipelinedSequential),
        ),
        Use(
            "PipelinedModel.from_config",
            _PIPELINE,
            functools.partial(from_config, tf_gpipe.PipelinedModel),
        ),
        Use("plan", plan, lambda **kw: str(tf_gpipe.plan(**kw))),
        Use("tune", tune, lambda **kw: str(tf_gpipe.tune(**kw))),
        Use("Plan.load", {"path": _saved_plan}, tf_gpipe.Plan.load),
        Use(
            "Plan.save", {"path": _saved_plan}, lambda **kw: _plan().save(**kw)
        ),
        Use(
            "PipelinedSequential of a plan",
            {"plan": _plan, "layers": layers, "devices": _none},
            lambda **kw: trained(tf_gpipe.PipelinedSequential(**kw)),
        ),
        Use(
            "verify",
            {"model": PIPELINE.get, **_DATA},
            lambda **kw: str(tf_gpipe.verify(**kw)),
        ),
        Use(
            "connect",
            {
                "addresses": lambda: ["127.0.0.1:1"],
                "timeout": lambda: 0.1,
                "heartbeat": lambda: 30,
                "at_least": lambda: 1,
            },
            tf_gpipe.connect,
        ),
        Use(
            "callbacks.Timeline",
            {
                "steps": _none,
                "trace": lambda: "t.json",
                "picture": _none,
                "chart": lambda: False,
            },
            timeline,
        ),
        Use(
            "Schedule",
            {
                "tasks": lambda: [["F0.0", "B0.0"], ["F1.0", "B1.0"]],
                "name": lambda: "mine",
                "description": lambda: "as on paper",
            },
            lambda **kw: trained(
                pipeline(schedule=tf_gpipe.Schedule(**kw), num_micro_batches=1)
            ),
        ),
        Use(
            "load_model",
            {"filepath": _saved_model, "custom_objects": _none},
            lambda **kw: trained(keras.saving.load_model(**kw)),
            lambda **kw: trained(keras.saving.load_model(**kw)),
        ),
    ]


def _plan() -> tf_gpipe.Plan:
    return tf_gpipe.plan(layers()[1:], (_ROWS, _DIM), num_stages=2)


def _saved_plan() -> str:
    _plan().save("plan.json")
    return "plan.json"


def _saved_model() -> str:
    PIPELINE.get().save("z.keras")
    return "z.keras"


USES = [*_constructors(), *_methods(), *_own()]
