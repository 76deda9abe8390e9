"""Models of the zoo as pipelines."""

import ast

import keras

import model_zoo
import tf_gpipe


def parse_hyper_parameters(text):
    """Returns what stands between the brackets of a call, as a dict.

    Args:
        text: String, such as `"num_blocks=3,input_shape=(32,32,3)"`.

    Raises:
        ValueError: If it is not of this form.
    """
    try:
        call = ast.parse(f"_({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(text)
        return {x.arg: ast.literal_eval(x.value) for x in call.keywords}
    except (SyntaxError, ValueError) as e:
        raise ValueError(
            f"not of the form name=value,name=value: {text!r}"
        ) from e


def pipelined(name, hyper_parameters, **kwargs):
    """Returns a model of the zoo as a pipeline.

    Args:
        name: String, one of `model_zoo.names()`.
        hyper_parameters: Dictionary, arguments of the model's function.
        **kwargs: Arguments of `tf_gpipe.PipelinedSequential`, and of
            `tf_gpipe.PipelinedModel`.
    """
    model = model_zoo.get(name, **hyper_parameters)
    if isinstance(model, keras.Model):
        return tf_gpipe.PipelinedModel.from_model(model, **kwargs)
    return tf_gpipe.PipelinedSequential(model, **kwargs)
