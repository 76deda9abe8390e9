"""The calls of the library, each with right arguments."""

import dataclasses
import functools
import os
import tempfile
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


@dataclasses.dataclass(frozen=True)
class Use:
    """A call, and what plain Keras does in its place.

    Attributes:
        name: String.
        arguments: Dictionary from names of arguments to functions that make
            right values.
        run: Function of the arguments that returns numbers, or a text.
        plain: Function that does the same in plain Keras, or `None` if plain
            Keras has no such call.
    """

    name: str
    arguments: dict[str, Callable[[], Any]]
    run: Callable[..., Any]
    plain: Callable[..., Any] | None = None


def dense(seed: int) -> keras.Layer:
    init = keras.initializers.GlorotUniform(seed=seed)
    return L.Dense(_DIM, kernel_initializer=init)


def layers() -> list[Any]:
    return [keras.Input((_DIM,)), dense(1), dense(2), dense(3)]


def data() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(_ROWS, _DIM)).astype("float32")


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


def _functional(arguments: dict[str, Any]) -> tuple[Any, Any]:
    inputs = keras.Input((_DIM,))
    outputs = functools.reduce(lambda x, f: f(x), layers()[1:], inputs)
    found = {"inputs": inputs, "outputs": outputs, **arguments}
    return found["inputs"], found["outputs"]


def _constructors() -> list[Use]:
    def keras_only(arguments: dict[str, Any]) -> dict[str, Any]:
        keep = ("trainable", "name")
        return {x: arguments[x] for x in keep if x in arguments}

    def functional(make: Callable, arguments: dict[str, Any]) -> list[Any]:
        inputs, outputs = _functional(arguments)
        rest = {
            x: y for x, y in arguments.items() if x not in ("inputs", "outputs")
        }
        return trained(make(inputs, outputs, **rest))

    common = {**_PIPELINE, "trainable": lambda: True, "name": lambda: "model"}
    none = {"inputs": lambda: None, "outputs": lambda: None}
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
            {**none, **common},
            lambda **kw: functional(tf_gpipe.PipelinedModel, _given(kw)),
            lambda **kw: functional(
                lambda *x, **more: keras.Model(*x, **keras_only(more)),
                _given(kw),
            ),
        ),
        Use(
            "PipelinedModel.from_model",
            {"model": plain_model, **common},
            lambda **kw: trained(tf_gpipe.PipelinedModel.from_model(**kw)),
            lambda model, **kw: trained(model),
        ),
    ]


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments without inputs and outputs that are `None`."""
    return {
        name: x
        for name, x in arguments.items()
        if x is not None or name not in ("inputs", "outputs")
    }


class _Kept:
    """A model that many uses share, with the same weights for each."""

    def __init__(self, make: Callable[[], keras.Model]):
        self._make = make
        self._model: Any = None

    def get(self) -> keras.Model:
        if self._model is None:
            self._model = self._make()
            self._weights = self._model.get_weights()
            self.compile(self._model)
        self._model.set_weights(self._weights)
        return self._model

    @staticmethod
    def compile(model: keras.Model) -> None:
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])

    def forget(self) -> None:
        self._model = None


PIPELINE = _Kept(pipeline)
PLAIN = _Kept(plain_model)


def _numbers(model: Any, made: Any) -> list[Any]:
    if isinstance(made, keras.callbacks.History):
        made = made.history
    found = [x for x in keras.tree.flatten(made) if x is not None]
    return [*found, *model.get_weights()]


def _method(name: str, arguments: dict[str, Callable[[], Any]]) -> Use:
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
        functools.partial(run, PLAIN),
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
    none = lambda: None
    x_y = {"x": data, "y": data}
    quiet = {"verbose": lambda: 0}
    fit = {
        **x_y,
        **quiet,
        "batch_size": lambda: 3,
        "epochs": lambda: 1,
        "callbacks": none,
        "validation_split": lambda: 0.0,
        "validation_data": none,
        "shuffle": lambda: False,
        "class_weight": none,
        "sample_weight": none,
        "initial_epoch": lambda: 0,
        "steps_per_epoch": none,
        "validation_steps": none,
        "validation_batch_size": none,
        "validation_freq": lambda: 1,
    }
    asked = {
        **quiet,
        "x": data,
        "batch_size": lambda: 3,
        "steps": none,
        "callbacks": none,
    }
    compiled = {
        "optimizer": lambda: "sgd",
        "loss": lambda: "mse",
        "loss_weights": none,
        "metrics": none,
        "weighted_metrics": none,
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
        _method("evaluate", {**asked, "y": data, "sample_weight": none}),
        _method("predict", asked),
        _method(
            "train_on_batch",
            {**x_y, "sample_weight": none, "class_weight": none},
        ),
        _method("test_on_batch", {**x_y, "sample_weight": none}),
        _method("predict_on_batch", {"x": data}),
        _method("__call__", {"inputs": data, "training": none, "mask": none}),
        _method("set_weights", {"weights": lambda: PLAIN.get().get_weights()}),
        _method("save", {"filepath": lambda: _path("model.keras")}),
        _method("save_weights", {"filepath": lambda: _path("x.weights.h5")}),
        _method("load_weights", {"filepath": _saved_weights}),
        _method("compute_output_shape", {"input_shape": lambda: (None, _DIM)}),
        _method("build", {"input_shape": lambda: (None, _DIM)}),
    ]


def _path(name: str) -> str:
    return os.path.join(
        tempfile.gettempdir(), f"wrong_uses_{os.getpid()}_{name}"
    )


def _saved_weights() -> str:
    PLAIN.get().save_weights(_path("y.weights.h5"))
    return _path("y.weights.h5")


def _own() -> list[Use]:
    """Returns the uses of tf_gpipe's own calls, and of `load_model`."""
    none = lambda: None

    def kept(function: Callable) -> Callable:
        def run(**kwargs: Any) -> Any:
            try:
                function(PIPELINE.get(), **kwargs)
            except BaseException:
                PIPELINE.forget()
                raise

        return run

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
            made = cls.from_model(
                plain_model(), **{x: y() for x, y in _PIPELINE.items()}
            )
        config = made.get_config()
        return trained(cls.from_config({**config, **changes}))

    def planned(**kwargs: Any) -> None:
        str(tf_gpipe.plan(**kwargs))

    plan = {x: y for x, y in _PIPELINE.items() if x not in ("devices",)}
    del plan["boundary_dtype"]
    plan = {
        **plan,
        "layers": lambda: layers()[1:],
        "input_spec": lambda: (_ROWS, _DIM),
        "num_devices": none,
        "optimizer": lambda: "adam",
        "dtype_policy": none,
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
        "num_stages": none,
        "num_micro_batches": none,
        "schedule": lambda: "1f1b",
        "remat": none,
    }

    def of_plan(path: Any) -> list[Any]:
        return [len(tf_gpipe.Plan.load(path).stages)]

    config = {x: y for x, y in _PIPELINE.items()}
    return [
        Use(
            "model.loss_and_gradients",
            {"x": data, "y": data, "sample_weight": none},
            lambda **kw: gradients(PIPELINE, **kw),
            lambda **kw: gradients(PLAIN, **kw),
        ),
        Use(
            "model.rebalance",
            {"balance": lambda: [1, 2]},
            kept(lambda model, **kw: model.rebalance(**kw)),
        ),
        Use(
            "PipelinedSequential.from_config",
            {"layers": lambda: pipeline().get_config()["layers"], **config},
            functools.partial(from_config, tf_gpipe.PipelinedSequential),
        ),
        Use(
            "PipelinedModel.from_config",
            {x: y for x, y in config.items()},
            functools.partial(from_config, tf_gpipe.PipelinedModel),
        ),
        Use("plan", plan, planned),
        Use("tune", tune, lambda **kw: str(tf_gpipe.tune(**kw))),
        Use("Plan.load", {"path": _saved_plan}, of_plan),
        Use(
            "Plan.save", {"path": _saved_plan}, lambda **kw: _plan().save(**kw)
        ),
        Use(
            "PipelinedSequential of a plan",
            {"plan": _plan, "layers": layers, "devices": none},
            lambda **kw: trained(tf_gpipe.PipelinedSequential(**kw)),
        ),
        Use(
            "verify",
            {
                "model": PIPELINE.get,
                "x": data,
                "y": data,
                "sample_weight": none,
            },
            lambda **kw: _report(tf_gpipe.verify(**kw)),
        ),
        Use(
            "connect",
            {
                "addresses": lambda: ["127.0.0.1:1"],
                "timeout": lambda: 0.1,
                "heartbeat": lambda: 30,
                "at_least": lambda: 1,
            },
            lambda **kw: tf_gpipe.connect(**kw),
        ),
        Use(
            "callbacks.Timeline",
            {
                "steps": none,
                "trace": lambda: _path("t.json"),
                "picture": none,
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
            {"filepath": _saved_model, "custom_objects": none},
            lambda **kw: trained(keras.saving.load_model(**kw)),
            lambda **kw: trained(keras.saving.load_model(**kw)),
        ),
    ]


def _plan() -> tf_gpipe.Plan:
    return tf_gpipe.plan(layers()[1:], (_ROWS, _DIM), num_stages=2)


def _saved_plan() -> str:
    _plan().save(_path("plan.json"))
    return _path("plan.json")


def _saved_model() -> str:
    PIPELINE.get().save(_path("z.keras"))
    return _path("z.keras")


def _report(report: Any) -> str:
    return str(report)


USES = [*_constructors(), *_methods(), *_own()]
