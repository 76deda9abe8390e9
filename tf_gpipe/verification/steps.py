"""Steps of one model, as a pipeline and as the plain Keras model.

The plain model is the same object, so that it has the same layers, variables,
losses, metrics and optimizer, however they are configured. While it is plain,
its class has a base class between the user's class and the pipeline's, with
Keras's methods in place of those that the pipeline overrides. So methods that a
user's subclass overrides still run, and none of the pipeline's do.
"""

import contextlib
import functools
import random
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import slots
from tf_gpipe.models import mini_batch_loss
from tf_gpipe.models.functional import PipelinedModel
from tf_gpipe.models.sequential import PipelinedSequential
from tf_gpipe.stage import seeds
from tf_gpipe.stage import tensorflow_state
from tf_gpipe.stage.call_overrides import is_ours

# Attributes that the plain model does not take from Keras's class.
_NOT_KERAS = {
    "__dict__",
    "__doc__",
    "__init__",
    "__module__",
    "__new__",
    "__weakref__",
    # XLA, which Keras would choose by itself, draws other random numbers.
    "jit_compile",
    "supports_jit",
}


class Step(NamedTuple):
    """The results of a step, and the values of all variables after it.

    All are dictionaries of arrays by name; `variables` by number, as in
    `Variables`.
    """

    logs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    variables: dict[int, np.ndarray]


@contextlib.contextmanager
def plain(model: keras.Model) -> Iterator[None]:
    """A scope in which a pipeline runs as the plain Keras model."""
    pipelined: Any = type(model)
    optimizers = slots.with_inner(model.optimizer) if model.optimizer else []
    replaced = [
        (vars(x), name, vars(x).pop(name))
        for x in optimizers
        for name in list(vars(x))
        # Methods that the pipeline has replaced on the optimizer object.
        if callable(getattr(type(x), name, None))
    ]
    object.__setattr__(model, "__class__", _plain_class(pipelined))
    try:
        yield
    finally:
        object.__setattr__(model, "__class__", pipelined)
        for attributes, name, method in replaced:
            attributes[name] = method


@functools.cache
def _plain_class(cls: Any) -> Any:
    """Returns a user's or our pipeline class, with Keras's methods again."""
    ours: Any = PipelinedModel
    theirs: Any = upstream.Functional
    if issubclass(cls, PipelinedSequential):
        ours, theirs = PipelinedSequential, keras.Sequential
    methods = _keras_methods(ours, theirs)
    return methods if cls is ours else type(cls.__name__, (cls, methods), {})


@functools.cache
def _keras_methods(ours: Any, theirs: Any) -> Any:
    """Returns a subclass of `ours` with the methods that it overrides undone.

    `theirs` is the Keras class from which they are taken.
    """
    methods: dict[str, Any] = {
        name: _inherited(theirs, name)
        for x in ours.__mro__
        if is_ours(x)
        for name in vars(x)
        if hasattr(theirs, name) and name not in _NOT_KERAS
    }
    # A user's `train_step` may call it.
    methods["loss_and_gradients"] = mini_batch_loss.of_call
    return type(f"Plain{ours.__name__}", (ours,), methods)


def _inherited(cls: type, name: str) -> Any:
    """Returns an attribute as the class body has it, `staticmethod`s too."""
    return next(vars(x)[name] for x in cls.__mro__ if name in vars(x))


class Variables:
    """All variables of a model, with names, kinds and saved values.

    Attributes:
        names: List of unique names.
        kinds: List of "variable", "slot", "statistic" or "metric".
        values: Dictionary from the numbers of variables to arrays, their values
            when this object was made.
    """

    def __init__(self, model: keras.Model):
        self.names: list[str] = []
        self.kinds: list[str] = []
        self._variables: list[Any] = []
        self._seen: set[int] = set()
        self._add("variable", model.trainable_variables)
        self._add("statistic", model.variables)
        self._add("statistic", seeds.global_seed())
        self._add("statistic", tensorflow_state.find([model]))
        for layer in upstream.layers_within(model):
            self._add("metric", layer.metrics_variables)
        if model.optimizer is not None:
            self._add("slot", model.optimizer.variables)
        self._add("metric", model.metrics_variables)
        self.values = self.read()

    def _add(self, kind: str, variables: Iterable[Any]) -> None:
        for v in variables:
            inner = v.value if isinstance(v, keras.Variable) else v
            if id(v) in self._seen or id(inner) in self._seen:
                continue
            self._seen |= {id(v), id(inner)}
            name = str(getattr(v, "path", v.name))
            if name in self.names:
                name = f"{name} ({len(self.names)})"
            self._variables.append(v)
            self.kinds.append(kind)
            self.names.append(name)

    def named(
        self, kind: str, prefix: str = ""
    ) -> Callable[[dict[int, np.ndarray]], dict[str, np.ndarray]]:
        """Returns a function that selects the values of a kind, by name.

        It takes a dictionary of values by number, such as `values`.
        """
        names = {
            i: prefix + name
            for i, (name, x) in enumerate(
                zip(self.names, self.kinds, strict=True)
            )
            if x == kind
        }
        return lambda values: {name: values[i] for i, name in names.items()}

    def find(self, name: str) -> Any:
        """Returns the variable called `name`, or `None`."""
        if name not in self.names:
            return None
        return self._variables[self.names.index(name)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._variables)

    def read(self) -> dict[int, np.ndarray]:
        return {i: np.array(_array(v)) for i, v in enumerate(self._variables)}

    def restore(self) -> None:
        for i, v in enumerate(self._variables):
            v.assign(self.values[i])

    def drawn(self, after: dict[int, np.ndarray]) -> bool:
        """Returns whether a seed differs in `after`: whether layers drew."""
        return any(
            upstream.is_seed(v) and not np.array_equal(self.values[i], after[i])
            for i, v in enumerate(self._variables)
        )


class Attributes:
    """The Python attributes of a model and its parts, saved to be restored.

    A step changes them: it builds optimizers, losses and metrics, caches
    functions, collects the losses that layers add, and layers may count. The
    random generators of Python and NumPy are saved too.
    """

    def __init__(self, model: keras.Model):
        self._contents: list[tuple[Any, Any]] = []
        self._random = random.getstate(), np.random.get_state(legacy=False)
        seen: set[int] = set()
        found: list[Any] = upstream.layers_within(model)
        found += upstream.compiled_parts(model)
        found += [*getattr(model, "metrics", ())]
        if model.optimizer is not None:
            found += slots.with_inner(model.optimizer)
        for x in found:
            if x is not None:
                self._keep(x, seen)

    def _keep(self, x: Any, seen: set[int]) -> None:
        """Saves the items or attributes of `x`, and of the objects in it."""
        if id(x) in seen:
            return
        seen.add(id(x))
        self._keep(upstream.unwrapped(x), seen)
        # Not `isinstance`, as wrappers that are no lists pretend to be.
        if issubclass(type(x), list):
            content = list.__getitem__(x, slice(None))
            self._contents.append((x, content))
            inner: Iterable[Any] = list(x)
        elif issubclass(type(x), dict):
            self._contents.append((x, dict(x)))
            inner = list(x.values())
        elif issubclass(type(x), set):
            self._contents.append((x, set(x)))
            inner = ()
        elif isinstance(x, (keras.Layer, keras.Metric, upstream.Tracker)) or (
            isinstance(x, (keras.Loss, keras.optimizers.Optimizer))
        ):
            self._keep(vars(x), seen)
            return
        else:
            return
        for each in inner:
            self._keep(each, seen)

    def restore(self) -> None:
        # With `list`'s own methods, as those of Keras's lists track new items
        # or refuse them.
        for x, content in self._contents:
            if isinstance(x, list):
                list.__setitem__(x, slice(None), content)
            elif isinstance(x, dict):
                dict.clear(x)
                dict.update(x, content)
            else:
                set.clear(x)
                set.update(x, content)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])


def train(
    model: keras.Model,
    variables: Variables,
    data: tuple,
    gradients: dict[str, np.ndarray] | None = None,
    times: int = 1,
) -> Step:
    """Runs a step of `fit`, from the values in `variables`.

    Args:
        model: The model, as a pipeline or in the scope `plain`.
        variables: Its `Variables`; the variables are changed.
        data: Tuple of inputs, labels and sample weights of one mini-batch.
        gradients: Gradients by name, which the optimizer gets instead of the
            step's own.
        times: Integer, how many times the traced step runs, from the same
            values; the last one is returned. TensorFlow's own random numbers
            differ each time.
    """
    train_step = model.train_step
    paths = {
        id(v): name for v, name in zip(variables, variables.names, strict=True)
    }

    def step(data):
        recorded: dict[str, tf.Tensor] = {}
        attributes = vars(model.optimizer)
        method = model.optimizer.apply

        def apply(grads, trainable_variables=None):
            weights = trainable_variables
            if weights is None:
                weights = upstream.weights_of(model.optimizer)
            given = []
            for gradient, weight in zip(grads, weights, strict=True):
                name = paths.get(id(weight), str(weight.path))
                if name in recorded:
                    name = f"{name} (applied once more)"
                value = tf.zeros(weight.shape, weight.dtype)
                if gradient is not None:
                    value = tf.convert_to_tensor(gradient)
                recorded[name] = value
                if gradients and gradient is not None and name in gradients:
                    gradient = tf.constant(gradients[name], value.dtype)
                given.append(gradient)
            return method(given, trainable_variables)

        replaced = attributes.get("apply")
        attributes["apply"] = apply
        try:
            logs = train_step(data)
        finally:
            del attributes["apply"]
            if replaced is not None:
                attributes["apply"] = replaced
        return logs, recorded

    vars(model)["train_step"] = step
    try:
        model.make_train_function(force=True)
        for _ in range(times):
            _start(model, variables)
            logs, recorded = model.train_function(iter([data]))
    finally:
        del vars(model)["train_step"]
        model.train_function = None
    return Step(_arrays(logs), _arrays(recorded), {}, variables.read())


def evaluate(
    model: keras.Model, variables: Variables, data: tuple, times: int = 1
) -> Step:
    """Runs a step of `evaluate` and one of `predict`; see `train`."""
    model.make_test_function(force=True)
    model.make_predict_function(force=True)
    try:
        for _ in range(times):
            _start(model, variables)
            logs = model.test_function(iter([data]))
            outputs = model.predict_function([(data[0],)])
    finally:
        model.test_function = None
        model.predict_function = None
    return Step(_arrays(logs), {}, _by_path(outputs), variables.read())


def _start(model: keras.Model, variables: Variables) -> None:
    variables.restore()
    # `variables` lacks those of metrics that are built in the first step.
    model.reset_metrics()


def _by_path(x: Any) -> dict[str, np.ndarray]:
    """Returns the tensors of a nested structure as arrays, by their paths."""
    flat = keras.tree.flatten_with_path(x)
    return {
        "output " + "/".join(map(str, path)) if path else "output": _array(t)
        for path, t in flat
        if t is not None
    }


def _arrays(x: Any) -> dict[str, np.ndarray]:
    if not isinstance(x, dict):
        return {"loss": _array(x)}
    return {
        "/".join(map(str, path)): _array(t)
        for path, t in keras.tree.flatten_with_path(x)
    }


def _array(x: Any) -> np.ndarray:
    x = x.value if isinstance(x, keras.Variable) else x
    if isinstance(x, tf.sparse.SparseTensor):
        x = tf.sparse.to_dense(x)
    return np.asarray(x.numpy() if hasattr(x, "numpy") else x)
