"""Models that are named on the command line, and random data for them."""

import importlib
import inspect
import os
from typing import Any

import keras
import numpy as np

import model_zoo
import tf_gpipe
from tf_gpipe import upstream

# The size of axes of inputs and outputs whose size is left open.
_LENGTH = 8


def get(name: str, arguments: dict[str, Any]) -> Any:
    """Returns a model of the zoo, or what a function of the user's returns.

    Args:
        name: String, one of `model_zoo.names()`, or
            `"package.module:function"`.
        arguments: Dict, what the function is called with.

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
    except Exception as e:
        raise RuntimeError(f"--model={name} has failed; see above.") from e
    kind = type(model).__name__
    if isinstance(_graph(model), upstream.Functional):
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
    """Returns the symbolic inputs of what `get` returns."""
    if isinstance(model, keras.Model):
        return _graph(model).input
    return getattr(model[0], "output", model[0])


def batch(model: Any, num_rows: int, length: int | None = None) -> Any:
    """Returns what is like a mini-batch of inputs of what `get` returns.

    Sizes that the model leaves open are `length`, or stay open.
    """
    return keras.tree.map_structure(
        lambda x: keras.KerasTensor(
            (num_rows, *(length if n is None else n for n in x.shape[1:])),
            x.dtype,
        ),
        inputs(model),
    )


def to_plan(
    name: str, arguments: dict[str, Any], num_rows: int
) -> tuple[Any, Any]:
    """Returns what `get` does, without values for weights, and a `batch`."""
    with keras.StatelessScope(initialize_variables=False):
        model = get(name, arguments)
    return model, batch(model, num_rows)


def pipelined(model: Any, **kwargs: Any) -> Any:
    """Returns a pipeline of what `get` returns.

    Args:
        model: `keras.Model`, or list of layers.
        **kwargs: Arguments of `tf_gpipe.PipelinedSequential`, and of
            `tf_gpipe.PipelinedModel`.
    """
    if isinstance(model, keras.Model):
        return tf_gpipe.PipelinedModel.from_model(model, **kwargs)
    return tf_gpipe.PipelinedSequential(model, **kwargs)


def random_data(
    model: Any, num_rows: int, seed: int = 0, length: int | None = None
) -> tuple[Any, Any]:
    """Returns random inputs and labels of a pipeline.

    Integers are tokens that each of the model's vocabularies has. Sizes that
    the model leaves open are `length`.
    """
    generator = np.random.default_rng(seed)
    # 0 may be padding.
    tokens = min(
        (v.shape[0] for v in model.variables if v.name == "embeddings"),
        default=2,
    )

    def random(tensor: Any) -> np.ndarray:
        shape = (num_rows, *(n or length or _LENGTH for n in tensor.shape[1:]))
        if "float" in tensor.dtype:
            return generator.standard_normal(shape, dtype="float32")
        return generator.integers(1, tokens, shape, dtype=tensor.dtype)

    structures = (
        (model.input, model.output)
        if isinstance(model, tf_gpipe.PipelinedModel)
        else (model.inputs[0], model.outputs[0])
    )
    x, y = (keras.tree.map_structure(random, each) for each in structures)
    return x, y


def _graph(model: Any) -> Any:
    """Returns the functional model within a sequential one, or the model."""
    if isinstance(model, keras.Sequential):
        return upstream.graph_of(model)
    return model


def _function(name: str) -> Any:
    """Returns the function of the name `"package.module:function"`."""
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as e:
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
