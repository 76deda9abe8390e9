"""Flags of all trainers, and what they say as a configuration."""

import argparse
import dataclasses
import re

from absl import flags

from tf_gpipe.commands.flags import keyword_arguments
from trainers import devices
from trainers.command_line import UserError
from trainers.job import DTYPE_POLICIES
from trainers.job import JobConfig
from trainers.optimization import SCHEDULES
from trainers.optimization import Optimization

_DATASET = flags.DEFINE_string(
    "dataset", None, "Dataset by its name in TFDS; see above for which."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Directory of TFDS datasets. Default: that of TFDS."
)
_MODEL_ARGS = flags.DEFINE_string(
    "model_args",
    "",
    "Hyper-parameters of the model, such as num_blocks=8,num_filters=64.",
)
flags.DEFINE_integer(
    "num_stages", 2, "Pipeline stages, each on a device.", lower_bound=1
)
flags.DEFINE_integer(
    "num_micro_batches", 8, "Micro-batches of a mini-batch.", lower_bound=1
)
flags.DEFINE_string(
    "balance",
    "parameters",
    "What the stages get equal shares of, or the number of layers of each "
    "stage, as in 5,4.",
)
flags.DEFINE_enum(
    "schedule",
    "1f1b",
    ["1f1b", "eager_1f1b", "gpipe", "zero_bubble"],
    "Order of micro-batches.",
)
flags.DEFINE_enum(
    "remat",
    "always",
    ["always", "except_last", "never"],
    "Which micro-batches compute activations again instead of keeping them.",
)
flags.DEFINE_enum(
    "strategy",
    "none",
    devices.STRATEGIES,
    "Replicas of the pipeline: none; several on this host; one on each host "
    "of TF_CONFIG; or several on a TPU.",
)
flags.DEFINE_integer(
    "num_replicas",
    None,
    "Replicas with --strategy=mirrored or tpu. Default: as many as there are "
    "accelerators for; 2 without any.",
    lower_bound=1,
)
flags.DEFINE_list(
    "workers", None, "Worker processes to run stages on: host:port,..."
)
flags.DEFINE_float(
    "worker_timeout",
    30.0,
    "Seconds to wait for workers that are missing at the start.",
    lower_bound=0.0,
)
flags.DEFINE_string(
    "tpu",
    None,
    "Name or address of the TPU with --strategy=tpu. Default: this host's.",
)
flags.DEFINE_enum(
    "dtype_policy",
    "float32",
    DTYPE_POLICIES,
    "Precision of all layers. The mixed ones keep weights in float32.",
)
flags.DEFINE_integer(
    "num_epochs", 20, "Epochs in all, those of earlier runs included.", 0
)
flags.DEFINE_integer(
    "validate_every",
    0,
    "Epochs between two evaluations while training; 0 for none.",
    lower_bound=0,
)
flags.DEFINE_integer("seed", 0, "Seed of all randomness.", lower_bound=0)
_LABEL_SMOOTHING = flags.DEFINE_float(
    "label_smoothing",
    0.0,
    "Share of a label that is spread over all classes, or all tokens.",
    lower_bound=0.0,
    upper_bound=1.0,
)
flags.DEFINE_string(
    "workdir", None, "Directory to keep results in and to resume from."
)
flags.DEFINE_integer(
    "verbose",
    1,
    "0: no progress, 1: a progress bar, 2: a line each epoch.",
    lower_bound=0,
    upper_bound=2,
)

flags.DEFINE_string("optimizer", "adamw", "A Keras optimizer, by its name.")
flags.DEFINE_string(
    "optimizer_args",
    "",
    "Other arguments of the optimizer, such as weight_decay=0.1,beta_2=0.98.",
)
flags.DEFINE_float("learning_rate", 0.001, "The highest learning rate.")
flags.DEFINE_enum(
    "learning_rate_schedule",
    "cosine",
    SCHEDULES,
    "How the learning rate falls: not at all; to 0 as a cosine; by "
    "--decay_rate every --decay_epochs; or with the square root of the number "
    "of steps.",
)
flags.DEFINE_integer(
    "warmup_steps",
    0,
    "Steps in which the learning rate rises from 0.",
    lower_bound=0,
)
flags.DEFINE_float(
    "decay_rate",
    None,
    "Factor of --learning_rate_schedule=exponential. Default: 0.97.",
    lower_bound=0.0,
)
flags.DEFINE_float(
    "decay_epochs",
    None,
    "Epochs after which --decay_rate is applied once. Default: 2.4.",
    lower_bound=0.0,
)
flags.DEFINE_float(
    "ema",
    None,
    "Momentum of an exponential moving average of the weights, which are "
    "tested in place of the last ones, such as 0.999.",
    lower_bound=0.0,
    upper_bound=1.0,
)

flags.register_validator(
    "learning_rate",
    lambda value: 0 < value < float("inf"),
    message="should be positive",
)


def job():
    """Returns the `JobConfig` that the flags tell."""
    config = _from_flags(JobConfig, flags=flags.FLAGS.flags_into_string())
    if re.fullmatch(r"\d+(,\d+)*", config.balance):
        counts = [int(count) for count in config.balance.split(",")]
        config = dataclasses.replace(config, balance=counts)
    return config


def optimization():
    """Returns the `Optimization` that the flags tell."""
    config = _from_flags(Optimization)
    arguments = _arguments("optimizer_args", config.optimizer_args)
    return dataclasses.replace(config, optimizer_args=arguments)


def data():
    """Returns the name of the dataset and the directory of datasets."""
    return _DATASET.value, _DATA_DIR.value


def label_smoothing():
    """Returns the label smoothing of the loss."""
    return _LABEL_SMOOTHING.value


def model_args():
    """Returns the hyper-parameters of the model, as a dictionary."""
    return _arguments("model_args", _MODEL_ARGS.value)


def _from_flags(cls, **others):
    names = {field.name for field in dataclasses.fields(cls)} - set(others)
    return cls(**{name: flags.FLAGS[name].value for name in names}, **others)


def _arguments(flag, text):
    try:
        return keyword_arguments(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--{flag}: {error}") from error
