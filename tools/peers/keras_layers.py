"""The benchmark's layers in Keras, with the weights that all programs share."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from tools.benchmark import timing  # noqa: E402
from tools.benchmark import workloads  # noqa: E402
from tools.peers import program  # noqa: E402

VERSIONS = {"tensorflow": tf.__version__, "keras": keras.__version__}


def make(args):
    """Returns the list of layers; the first is an `Input`."""
    return workloads.WORKLOADS[args.workload]()


def trained(args, model):
    """Compiles a model, and returns its `train` for `program.serve`.

    Args:
        args: What `program.parse_args` returned.
        model: A Keras model of the layers that `make` returned.
    """
    values = [w for _, weights in program.layers(args) for w in weights]
    for variable, value in zip(model.trainable_variables, values, strict=True):
        variable.assign(value.reshape(variable.shape))
    workloads.compiled(model)
    x, y = program.data(args)

    def train(num_steps):
        seconds = timing.step_seconds(model, x, y, num_steps)
        return model.history.history["loss"][0], seconds

    return train
