"""Models that pipelines are built for, in plain Keras.

Every model is a function from hyper-parameters to a list of layers that
begins with a `keras.layers.InputLayer`, for `keras.Sequential` or
`tf_gpipe.PipelinedSequential`; or to a functional `keras.Model`, for
`tf_gpipe.PipelinedModel.from_model`. Nothing here imports `tf_gpipe`: a model
does not know how it is going to be run.

The models need Keras alone. `model_zoo.decoding`, which searches for
translations in one compiled loop, needs TensorFlow and NumPy, too.
"""

import difflib
import inspect

from model_zoo import hyper_parameters as hyper_parameters_of
from model_zoo.amoebanet import amoebanet_d
from model_zoo.resnet import resnet50
from model_zoo.resnet import resnet101
from model_zoo.resnet import resnet_small
from model_zoo.transformer_lm import transformer_lm
from model_zoo.transformer_nmt import transformer_nmt
from model_zoo.unet import unet

_MODELS = {
    model.__name__: model
    for model in (
        amoebanet_d,
        resnet50,
        resnet101,
        resnet_small,
        transformer_lm,
        transformer_nmt,
        unet,
    )
}


def names():
    """Returns the names of all models, sorted.

    Returns:
        List of strings.

    Example:

    >>> "resnet_small" in model_zoo.names()
    True
    """
    return sorted(_MODELS)


def get(name, /, **hyper_parameters):
    """Builds a model by its name.

    Args:
        name: String, one of `model_zoo.names()`.
        **hyper_parameters: Arguments of the model's function. Those left out
            keep their defaults.

    Returns:
        A list of Keras layers that begins with a `keras.layers.InputLayer`,
        or a functional `keras.Model`.

    Raises:
        ValueError: If there is no model of this name, or a hyper-parameter is
            out of range.
        TypeError: If the model has no hyper-parameter of a given name.

    Example:

    >>> layers = model_zoo.get("resnet_small", num_classes=100)
    >>> keras.Sequential(layers).output_shape
    (None, 100)
    """
    if name not in _MODELS:
        raise ValueError(
            f"Unknown model. Expected one of: {', '.join(names())}. "
            f"Received: name={name!r}{_near([name], _MODELS)}"
        )
    model = _MODELS[name]
    accepted = list(inspect.signature(model).parameters)
    unknown = [key for key in hyper_parameters if key not in accepted]
    if unknown:
        raise TypeError(
            f"Unknown hyper-parameters of model {name!r}. "
            f"Expected some of: {', '.join(accepted)}. "
            f"Received: {', '.join(unknown)}{_near(unknown, accepted)}"
        )
    hyper_parameters_of.check(model, hyper_parameters)
    return model(**hyper_parameters)


def _near(unknown, known):
    """Returns ". Did you mean ...?" for misspelt names, or an empty string."""
    near = [
        name
        for each in unknown
        for name in difflib.get_close_matches(str(each), known, 1)
    ]
    return f". Did you mean {', '.join(near)}?" if near else ""
