"""A user's own class of Keras model, kept when a pipeline is made of one."""

import functools
import types
from collections.abc import Callable
from collections.abc import Collection
from typing import Any

import keras

from tf_gpipe import upstream

# What computes a model's outputs, in whose place the pipeline runs.
CALLS = ("call", "__call__")

# What `compile` and `fit` leave, and what is a model's own.
_NOT_CARRIED = (
    "_auto_config",
    "_compile_config",
    "_compiled_trainable_state",
    "_distributed_dataset",
    "_eval_epoch_iterator",
    "_expected_rows",
    "_functional",
    "_predict_function",
    "_running",
    "_running_steps",
    "_test_function",
    "_traced_rows",
    "_train_function",
    "history",
    "optimizer",
    "predict_function",
    "stop_evaluating",
    "stop_predicting",
    "stop_training",
    "test_function",
    "train_function",
)


# What a pipeline has beside what its model has.
OF_PIPELINES = (
    "_config",
    "_newest_checkpoint",
    "_pipeline",
    "_record_times",
    "_stage_devices",
    "_stage_jit_compile",
    "_traced_with",
    "supports_jit",
)


def overrides(model: keras.Model, name: str) -> bool:
    """Returns whether a method or property is not Keras's, nor a pipeline's.

    Be it by the model's class or by the model alone.
    """
    if name in vars(model):
        return True
    for owner in type(model).__mro__:
        if name in vars(owner):
            return not (_is_library(owner) or upstream.only_checks(owner, name))
    return False


def kept(model: keras.Model, base: type) -> type:
    """Returns the class of a pipeline of a model.

    Args:
        model: What the pipeline is made of.
        base: `PipelinedModel`, `PipelinedSequential` or a subclass.

    Returns:
        `base`; if `model` is of a user's class, a subclass of both, with the
        name of the user's class, whose methods come first. What they get from
        `super()` is the pipeline's.

    Raises:
        TypeError: If it overrides what the pipeline replaces.
        ValueError: If it uses a name that the pipeline has for itself.
    """
    cls: Any = type(model)
    _check_calls(model)
    if issubclass(cls, base):
        if issubclass(base, keras.Sequential):
            return _without_init(cls, base)
        return cls
    if not _is_pipeline(cls):
        _check_names(model, base)
    if _is_library(cls):
        return base
    return _class_of_both(cls, base)


def check(model: keras.Model, made: keras.Model) -> None:
    """Refuses a pipeline that would lose what a model's class overrides.

    Raises:
        TypeError: If `made`, which is made of `model`, is not of its class.
    """
    _check_calls(model)
    cls = type(model)
    if not _is_library(cls) and not isinstance(made, cls):
        raise TypeError(
            f"{type(made).__name__} would lose what {cls.__name__}, the class "
            f"of model {model.name!r}, overrides. Give the model to "
            "`PipelinedSequential(model, ...)` itself, which keeps the class, "
            "or give `model.layers`, without it."
        )


def register_for_hdf5(cls: type) -> None:
    """Lets HDF5 files be loaded, which name classes without their package."""
    keras.saving.get_custom_objects()[cls.__name__] = cls


def without_pipeline(cls: type) -> type:
    """Returns the class that a pipeline keeps, or else Keras's."""
    return next(
        x
        for x in cls.__mro__
        if issubclass(x, keras.Model) and not _is_pipeline(x)
    )


def carry(
    model: keras.Model, made: keras.Model, without: Collection[str] = ()
) -> None:
    """Gives a pipeline what a model has beside the graph of its layers.

    Metrics, hyper-parameters, weights and layers that only a loss uses: all
    attributes that were set on it, and all that it tracks, in its order. Not
    what it has been compiled with.
    """
    given = {*vars(made), *without}
    sequential = isinstance(model, keras.Sequential)
    for name, value in list(vars(model).items()):
        if name in given or name in _NOT_CARRIED or name.startswith("_self_"):
            continue
        if isinstance(value, types.MethodType) and value.__self__ is model:
            value = types.MethodType(value.__func__, made)
        if sequential and not isinstance(made, keras.Sequential):
            # A `Sequential` has the weights of its stack alone.
            with upstream.untracked():
                setattr(made, name, value)
        else:
            setattr(made, name, value)
    for kind, theirs in upstream.tracked(model).items():
        if kind == "layers" and sequential:
            continue
        for x in theirs:
            upstream.track(made, kind, x)
        mine = upstream.tracked(made)[kind]
        places = {id(x): i for i, x in enumerate(theirs)}
        mine.sort(key=lambda x: places.get(id(x), len(places)))


@functools.cache
def _class_of_both(cls: type, base: Any) -> type:
    def get_config(self):
        config = super(both, self).get_config()
        if upstream.writes_hdf5():
            # An HDF5 file, which names the user's class by itself: a plain
            # model of that class is what can be loaded from it.
            return config
        # With what Keras needs to make a plain model of the user's class.
        name = upstream.registered_name(cls)
        plain = {
            "module": cls.__module__,
            "class_name": cls.__name__,
            "config": config,
            "registered_name": name if name != cls.__name__ else None,
        }
        return {"model": plain, **self._arguments()}

    def from_config(_, config, custom_objects=None):
        return base.from_config(config, custom_objects)

    def __reduce__(self):
        # Not by a class that no module has.
        load, args = super(both, self).__reduce__()
        return (getattr(base, load.__name__), *[args])

    namespace = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce__": __reduce__,
        "_keeps_class": True,
        "from_config": classmethod(from_config),
        "get_config": get_config,
    }
    if issubclass(base, keras.Sequential):
        # Which Python calls for `PipelinedSequential(model, ...)`.
        namespace["__init__"] = base.__init__
    if hasattr(cls, "save_to_preset"):
        # KerasHub's: a preset names the class that loads it.
        namespace["save_to_preset"] = _as_plain_model(cls.save_to_preset)
    both: Any = types.new_class(
        cls.__name__, (cls, base), exec_body=lambda body: body.update(namespace)
    )
    # A saved one is loaded as a pipeline, by the config above.
    upstream.register_as(both, upstream.registered_name(base))
    return both


def _as_plain_model(method: Callable) -> Callable:
    """Returns a method that the plain model of a pipeline runs."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        return method(self.to_keras(), *args, **kwargs)

    return run


@functools.cache
def _without_init(cls: Any, base: Any) -> type:
    """Returns a subclass of a pipeline, made as the pipeline is."""
    if cls.__init__ is base.__init__:
        return cls
    namespace = {
        "__doc__": cls.__doc__,
        "__init__": base.__init__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    made = types.new_class(
        cls.__name__, (cls,), exec_body=lambda body: body.update(namespace)
    )
    upstream.register_as(made, upstream.registered_name(cls))
    return made


def _check_calls(model: keras.Model) -> None:
    """Refuses a model that computes its outputs in a way of its own."""
    for name in (*CALLS, "_run_through_graph"):
        if overrides(model, name):
            raise TypeError(
                f"{type(model).__name__} overrides `{name}`, in whose place a "
                f"pipeline runs: model {model.name!r} would lose it. Make what "
                "it does layers of the model, so that it is a part of its "
                "graph; or put the model's largest stack of layers into a "
                "`PipelinedSequential`, which `call` can use as a layer."
            )


def _check_names(model: keras.Model, base: type) -> None:
    """Refuses a model with attributes that are a pipeline's own."""
    plain = (
        keras.Sequential
        if issubclass(base, keras.Sequential)
        else upstream.Functional
    )
    ours = {
        name
        for owner in base.__mro__
        if _is_pipeline(owner)
        for name in (*vars(owner), *getattr(owner, "__annotations__", ()))
        if not hasattr(plain, name) and not name.startswith("__")
    }
    theirs = {
        name
        for owner in type(model).__mro__
        if not _is_library(owner)
        for name in vars(owner)
    }
    theirs |= vars(model).keys() - set(_NOT_CARRIED)
    for name in sorted(ours & theirs):
        raise ValueError(
            f"{type(model).__name__} has an attribute `{name}`, which is the "
            f"name of one that {base.__name__} has for itself. Rename it. "
            f"Received: model={model.name!r}"
        )


def _is_pipeline(cls: type) -> bool:
    return any(x.__module__.split(".")[0] == "tf_gpipe" for x in cls.__mro__)


def _is_library(cls: type) -> bool:
    """Returns whether Keras, a pipeline or Python has made a class."""
    return cls.__module__.split(".")[0] in ("keras", "tf_gpipe", "builtins")
