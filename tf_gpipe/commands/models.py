"""Makes models named on the command line, and random data for them."""

import contextlib
import importlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import model_zoo
import tf_gpipe
from tf_gpipe import upstream

# The size of axes whose size a model leaves open, in random data.
_LENGTH = 8
# A program that is taken for a module may end this one.
_FAILURES = (Exception, SystemExit)


def get(name: str, arguments: dict[str, Any]) -> Any:
    """Returns a model of the zoo, or the result of the user's function.

    Args:
        name: String, one of `model_zoo.names()`, or
            `"package.module:function"`.
        arguments: Dict of the keyword arguments of the function.

    Returns:
        A functional model, or a sequential one that is built; or a list of
        layers, of which the first is a `keras.Input`.

    Raises:
        RuntimeError: If the user's own code raises an error.
        TypeError: If the function does not take such arguments, or returns
            something else.
        ValueError: If there is no such function.
    """
    if name in model_zoo.names():
        return model_zoo.get(name, **arguments)
    function = _function(name)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as e:
        raise TypeError(
            f"--model={name} takes {inspect.signature(function)}. Received: "
            f"--model_args with {', '.join(arguments) or 'nothing'} ({e})"
        ) from e
    try:
        model = function(**arguments)
    except _FAILURES as e:
        raise RuntimeError(f"--model={name} has failed; see above.") from e
    kind = type(model).__name__
    if isinstance(upstream.graph_of(model), upstream.Functional):
        return model
    if isinstance(model, (list, tuple)) and model:
        if isinstance(model[0], (keras.KerasTensor, keras.layers.InputLayer)):
            return list(model)
        kind += f" that begins with {type(model[0]).__name__}"
    raise TypeError(
        f"--model={name} must return a functional Keras model, a sequential "
        "one that is built, or a list of layers that begins with a "
        f"keras.Input. Received: {kind}"
    )


def inputs(model: Any) -> Any:
    """Returns the symbolic inputs of a model that `get` returned."""
    if isinstance(model, keras.Model):
        return upstream.graph_of(model).input
    return getattr(model[0], "output", model[0])


def batch(model: Any, num_rows: int, length: int | None = None) -> Any:
    """Returns the spec of a mini-batch of inputs: nested `KerasTensor`s.

    Args:
        model: A model or list of layers that `get` returned.
        num_rows: Integer.
        length: Integer in place of sizes that the model leaves open, or `None`
            to leave them open.
    """
    return keras.tree.map_structure(
        lambda x: keras.KerasTensor(
            (num_rows, *(length if n is None else n for n in x.shape[1:])),
            x.dtype,
        ),
        inputs(model),
    )


def to_plan(
    name: str, arguments: dict[str, Any], num_rows: int, length: int | None
) -> tuple[Any, Any]:
    """Returns the model of `get`, without weight values, and its `batch`.

    Raises:
        ValueError: If it leaves sizes open, and no `length` is given.
    """
    with keras.StatelessScope(initialize_variables=False):
        model = get(name, arguments)
    spec = batch(model, num_rows, length)
    shapes = [x.shape for x in keras.tree.flatten(spec)]
    if any(None in shape for shape in shapes):
        raise ValueError(
            f"--model={name} leaves sizes of its inputs open: {shapes}. Give a "
            "--length to plan for."
        )
    return model, spec


def pipelined(model: Any, **kwargs: Any) -> Any:
    """Makes a pipeline of a model that `get` returned.

    Args:
        model: `keras.Model`, or list of layers.
        **kwargs: Arguments of `tf_gpipe.PipelinedModel`, or for a list of
            `tf_gpipe.PipelinedSequential`.
    """
    if isinstance(model, keras.Model):
        return tf_gpipe.PipelinedModel.from_model(model, **kwargs)
    return tf_gpipe.PipelinedSequential(model, **kwargs)


@contextlib.contextmanager
def dtype_policy(policy: str) -> Iterator[None]:
    """A scope in which layers get this dtype policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def random_data(
    model: Any, num_rows: int, seed: int = 0, length: int | None = None
) -> tuple[Any, Any]:
    """Returns random inputs and labels for a pipeline.

    Integers are tokens that are in the vocabulary of every embedding. Without
    one they are 0 and 1, or in images of bytes 1 to 254.

    Args:
        model: A pipeline.
        num_rows: Integer.
        seed: Integer.
        length: Integer in place of sizes that the model leaves open.
    """
    generator = np.random.default_rng(seed)
    tokens = min(
        (v.shape[0] for v in model.variables if v.name == "embeddings"),
        default=0,
    )

    def random(tensor: Any) -> np.ndarray:
        shape = (num_rows, *(n or length or _LENGTH for n in tensor.shape[1:]))
        if "float" in tensor.dtype:
            return generator.standard_normal(shape, dtype="float32")
        most = 2 if tensor.dtype == "bool" else np.iinfo(tensor.dtype).max
        end = min(tokens or (255 if tensor.dtype == "uint8" else 2), most)
        # If there are more than two, without 0, which may be padding.
        return generator.integers(int(end > 2), end, shape, tensor.dtype)

    structures = (
        (model.input, model.output)
        if isinstance(model, tf_gpipe.PipelinedModel)
        else (model.inputs[0], model.outputs[0])
    )
    x, y = (keras.tree.map_structure(random, each) for each in structures)
    return x, y


def _function(name: str) -> Any:
    """Imports the function named `"package.module:function"`."""
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except _FAILURES as e:
        missing = isinstance(e, ModuleNotFoundError) and e.name
        if not missing or not f"{module}.".startswith(f"{missing}."):
            raise RuntimeError(f"{module} has failed; see above.") from e
        what = f"there is no module {missing}"
    else:
        function = getattr(found, attribute, None)
        if callable(function):
            return function
        what = f"{found.__file__} has no function {attribute}"
    raise ValueError(
        "Expected package.module:function, of a module that is installed or "
        f"in {os.getcwd()}. Received: --model={name}, but {what}"
    )
