"""Classes derived from a user's own model class and a pipeline's class.

`from_model` makes an instance of such a class, so that the pipeline keeps the
methods and attributes of the user's model.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage import call_overrides

# Attributes of Keras that are not copied: those that `compile` and `fit` set,
# and records of the model itself (its graph, its constructor arguments).
_NOT_CARRIED = (
    "_auto_config",
    "_compile_config",
    "_compiled_trainable_state",
    "_distributed_dataset",
    "_eval_epoch_iterator",
    "_functional",
    "history",
    "optimizer",
    "predict_function",
    "stop_evaluating",
    "stop_predicting",
    "stop_training",
    "test_function",
    "train_function",
)


def kept(model: keras.Model, base: type) -> type:
    """Returns the class for a pipeline that is made of a model.

    Args:
        model: The model.
        base: `PipelinedModel`, `PipelinedSequential` or a subclass.

    Returns:
        `base`; if `model` is of a user's class, a subclass of both, with the
        name of the user's class. The user's methods come first, and `super()`
        in them is the pipeline.

    Raises:
        TypeError: If it overrides what computes the outputs, such as `call`.
        ValueError: If it uses a name that the pipeline needs for itself.
    """
    cls: Any = type(model)
    call_overrides.check_calls(model)
    if issubclass(cls, base):
        if issubclass(base, keras.Sequential):
            return _without_init(cls, base)
        return cls
    if not _is_pipeline(cls):
        _check_names(model, base)
    if call_overrides.is_library(cls):
        return base
    return _class_of_both(cls, base)


def check(model: keras.Model, made: keras.Model) -> None:
    """Refuses a pipeline that would lose the overrides of a model's class.

    Raises:
        TypeError: If `made`, which is made of `model`, is not of its class.
    """
    call_overrides.check_calls(model)
    cls = type(model)
    if not call_overrides.is_library(cls) and not isinstance(made, cls):
        raise TypeError(
            f"{type(made).__name__} would lose what {cls.__name__}, the class "
            f"of model {model.name!r}, overrides. Give the model to "
            "`PipelinedSequential(model, ...)` itself, which keeps the class, "
            "or give `model.layers`, without it."
        )


def register_for_hdf5(cls: type) -> None:
    """Registers a class for HDF5 files, whose class names lack the package."""
    keras.saving.get_custom_objects()[cls.__name__] = cls


def without_pipeline(cls: type) -> type:
    """Returns the user's class that a pipeline keeps, or else Keras's class."""
    return next(
        x
        for x in cls.__mro__
        if issubclass(x, keras.Model) and not _is_pipeline(x)
    )


def carry(model: keras.Model, made: keras.Model) -> None:
    """Copies a model's attributes and tracked objects to another model.

    Metrics, hyper-parameters, weights and layers that only a loss uses:
    everything beside the graph of layers, in the order of `model`, but not the
    state of `compile` and `fit`, nor what a pipeline notes of itself.

    Args:
        model: The model to copy from.
        made: The pipeline or plain model to copy to.
    """
    # By which `compile` knows whether to scale losses.
    upstream.carry_dtype_policy(model, made)
    left = {*vars(made), *_NOT_CARRIED, *_of_pipelines(type(model))}
    sequential = isinstance(model, keras.Sequential)
    for name, value in list(vars(model).items()):
        if name in left or name.startswith("_self_"):
            continue
        if isinstance(value, types.MethodType) and value.__self__ is model:
            value = types.MethodType(value.__func__, made)
        if sequential and not isinstance(made, keras.Sequential):
            # A `keras.Sequential` has no weights but those of its layers.
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
            # An HDF5 file names the user's class itself, so that it is loaded
            # as a plain model of that class.
            return config
        # The serialised plain model of the user's class.
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
        # Pickled by `base`: the derived class is in no module.
        load, args = super(both, self).__reduce__()
        return (getattr(base, load.__name__), *[args])

    namespace = {
        "__reduce__": __reduce__,
        "_keeps_class": True,
        "from_config": classmethod(from_config),
        "get_config": get_config,
    }
    if issubclass(base, keras.Sequential):
        # Python calls this one for `PipelinedSequential(model, ...)`, whose
        # `__new__` returns an instance of the derived class.
        namespace["__init__"] = base.__init__
    if hasattr(cls, "save_to_preset"):
        # Saved by the plain model: a preset names the class that loads it, and
        # KerasHub must find it.
        namespace["save_to_preset"] = _as_plain_model(cls.save_to_preset)
    # Files name it like `base`, so that Keras loads a pipeline from the config
    # above.
    both: Any = _derived((cls, base), namespace, named_like=base)
    return both


def _as_plain_model(method: Callable) -> Callable:
    """Wraps a method to run on the plain model of a pipeline."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        return method(self.to_keras(), *args, **kwargs)

    return run


@functools.cache
def _without_init(cls: Any, base: Any) -> type:
    """Returns a subclass of `cls` with the `__init__` of `base`."""
    if cls.__init__ is base.__init__:
        return cls
    return _derived((cls,), {"__init__": base.__init__}, named_like=cls)


def _derived(
    bases: tuple[type, ...], namespace: dict[str, Any], named_like: type
) -> type:
    """Returns a subclass that shows itself as the first of its bases.

    In files it has the name of the class `named_like`.
    """
    first = bases[0]
    for name in ("__doc__", "__module__", "__qualname__"):
        namespace[name] = getattr(first, name)
    made = types.new_class(
        first.__name__, bases, exec_body=lambda body: body.update(namespace)
    )
    upstream.register_as(made, upstream.registered_name(named_like))
    return made


def _check_names(model: keras.Model, base: type) -> None:
    """Refuses a model with attributes whose names a pipeline uses itself."""
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
        if not call_overrides.is_library(owner)
        for name in vars(owner)
    }
    theirs |= vars(model).keys() - set(_NOT_CARRIED)
    for name in sorted(ours & theirs):
        raise ValueError(
            f"{type(model).__name__} has an attribute `{name}`, which is the "
            f"name of one that {base.__name__} has for itself. Rename it. "
            f"Received: model={model.name!r}"
        )


def _of_pipelines(cls: type) -> set[str]:
    """Returns the attributes that a class's bases in this library annotate."""
    return {
        name
        for owner in cls.__mro__
        if call_overrides.is_ours(owner)
        for name in owner.__annotations__
    }


def _is_pipeline(cls: type) -> bool:
    return any(map(call_overrides.is_ours, cls.__mro__))
