"""Trains an image classifier as a pipeline.

    python -m trainers.image_classification

trains a small ResNet on 1,442 handwritten digits, in two stages. It takes
half a minute on two CPU cores and ends with a test accuracy above 98.5%.

    python -m trainers.image_classification --dataset=cifar10 \\
        --num_stages=4 --num_micro_batches=16 --workdir=/tmp/cifar10

does so for another dataset of TFDS, with four stages, and keeps in the
working directory:

    flags.txt     the flags, to repeat the run with --flagfile
    checkpoints/  weights and optimizer state after the last whole epoch; the
                  same command goes on from there
    losses.csv    the loss of every step
    logs/         for TensorBoard

More hardware:

    --strategy=mirrored --num_replicas=2     two pipelines on this host
    --workers=10.0.0.1:2222,10.0.0.2:2222    stages on worker processes, each
                                             `python -m tf_gpipe.worker`
    --strategy=multi_worker                  a pipeline on each host of
                                             TF_CONFIG, with one --workdir
                                             that all of them share
    --strategy=tpu --tpu=NAME                pipelines over the cores of a TPU

Results do not depend on the number of stages, the schedule or
rematerialisation, but for rounding. They do depend on the number of
micro-batches, each of which is normalised by itself in training.
"""

import contextlib
import math
import pathlib
import re

import keras
import tensorflow as tf
from absl import flags

import model_zoo
from trainers import command_line
from trainers import devices
from trainers import images
from trainers import models
from trainers.checkpoints import Checkpoints
from trainers.checkpoints import newest
from trainers.command_line import UserError
from trainers.loss_log import LossLog

_MODEL = flags.DEFINE_enum(
    "model", "resnet_small", model_zoo.names(), "Model of model_zoo."
)
_MODEL_ARGS = flags.DEFINE_string(
    "model_args",
    "",
    "Hyper-parameters of the model, such as num_blocks=8,num_filters=64.",
)
_DATASET = flags.DEFINE_string(
    "dataset", "digits", "Dataset of labelled images, by its name in TFDS."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Directory of TFDS datasets. Default: that of TFDS."
)
_NUM_STAGES = flags.DEFINE_integer(
    "num_stages", 2, "Pipeline stages, each on a device.", lower_bound=1
)
_NUM_MICRO_BATCHES = flags.DEFINE_integer(
    "num_micro_batches", 8, "Micro-batches of a mini-batch.", lower_bound=1
)
_BALANCE = flags.DEFINE_string(
    "balance",
    "parameters",
    "What the stages get equal shares of, or the number of layers of each "
    "stage, as in 5,4.",
)
_SCHEDULE = flags.DEFINE_enum(
    "schedule", "1f1b", ["gpipe", "1f1b"], "Order of micro-batches."
)
_REMAT = flags.DEFINE_enum(
    "remat",
    "always",
    ["always", "except_last", "never"],
    "Which micro-batches compute activations again instead of keeping them.",
)
_STRATEGY = flags.DEFINE_enum(
    "strategy",
    "none",
    devices.STRATEGIES,
    "Replicas of the pipeline: none; several on this host; one on each host "
    "of TF_CONFIG; or several on a TPU.",
)
_NUM_REPLICAS = flags.DEFINE_integer(
    "num_replicas",
    None,
    "Replicas with --strategy=mirrored or tpu. Default: as many as there are "
    "accelerators for; 2 without any.",
    lower_bound=1,
)
_WORKERS = flags.DEFINE_list(
    "workers", None, "Worker processes to run stages on: host:port,..."
)
_WORKER_TIMEOUT = flags.DEFINE_float(
    "worker_timeout",
    30.0,
    "Seconds to wait for workers that are missing at the start.",
    lower_bound=0.0,
)
_TPU = flags.DEFINE_string(
    "tpu",
    None,
    "Name or address of the TPU with --strategy=tpu. Default: this host's.",
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    128,
    "Images of a mini-batch, over all replicas.",
    lower_bound=1,
)
_NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs", 20, "Passes over the training images.", lower_bound=0
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.01, "At the start; it falls to zero as a cosine."
)
_WEIGHT_DECAY = flags.DEFINE_float(
    "weight_decay", 0.1, "Weight decay of AdamW.", lower_bound=0.0
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of all randomness.", lower_bound=0
)
_VERBOSE = flags.DEFINE_integer(
    "verbose",
    1,
    "0: no progress, 1: a progress bar, 2: a line each epoch.",
    lower_bound=0,
    upper_bound=2,
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory to keep results in and to resume from."
)

# In the working directory.
_CHECKPOINTS = "checkpoints"

flags.register_validator(
    _LEARNING_RATE,
    lambda value: 0 < value < float("inf"),
    message="should be positive",
)


def train_and_evaluate(
    *,
    model,
    dataset,
    num_stages,
    num_micro_batches,
    balance,
    schedule,
    remat,
    batch_size,
    num_epochs,
    learning_rate,
    weight_decay,
    seed,
    strategy="none",
    num_replicas=None,
    workers=None,
    worker_timeout=30.0,
    tpu=None,
    model_args=None,
    data_dir=None,
    workdir=None,
    verbose=1,
):
    """Trains a model, resuming where an earlier run stopped, and tests it.

    Args:
        model: String, one of `model_zoo.names()`.
        dataset: String, name of a TFDS dataset of labelled images.
        num_stages: As of `tf_gpipe.PipelinedSequential`, and so are
            `num_micro_batches`, `balance`, `schedule` and `remat`.
        num_micro_batches: See `num_stages`.
        balance: See `num_stages`.
        schedule: See `num_stages`.
        remat: See `num_stages`.
        batch_size: Positive integer, images of a mini-batch.
        num_epochs: Integer, epochs in all, those of earlier runs included.
        learning_rate: Positive float, at the start; over `num_epochs` it
            falls to zero as a cosine.
        weight_decay: Float, of AdamW.
        seed: Integer, of the weights and the order of the images.
        strategy: As of `devices.start`, and so are `num_replicas`, `workers`,
            `worker_timeout` and `tpu`.
        num_replicas: See `strategy`.
        workers: See `strategy`.
        worker_timeout: See `strategy`.
        tpu: See `strategy`.
        model_args: Dictionary, other hyper-parameters of the model.
        data_dir: Directory of TFDS datasets. Defaults to that of TFDS.
        workdir: Directory for checkpoints, losses and logs. Defaults to
            `None`: nothing is kept.
        verbose: `0`, `1` or `2`, as of `keras.Model.fit`. Defaults to `1`.

    Returns:
        The trained model and its test accuracy.

    Raises:
        UserError: If the arguments do not fit one another, the dataset, the
            machine or the checkpoint (nothing has been trained then), or a
            worker process has failed.
    """
    # First of all: TensorFlow's devices are fixed once it has started.
    with _workers_may_fail(workdir):
        hardware = devices.start(
            num_stages, strategy, num_replicas, workers, worker_timeout, tpu
        )
    if batch_size % hardware.num_replicas:
        raise UserError(
            "Each replica must get as many images of a batch. Received: "
            f"batch_size={batch_size}, {hardware.num_replicas} replicas"
        )
    data = images.load(dataset, data_dir)
    # Only now: preparing a dataset, the first time, draws random numbers too.
    keras.utils.set_random_seed(seed)
    steps_per_epoch = len(data.train) // batch_size
    if not steps_per_epoch:
        raise UserError(
            f"A batch must not be larger than the dataset: {dataset!r} has "
            f"{len(data.train)} training images. "
            f"Received: batch_size={batch_size}"
        )
    checkpoints, first_epoch, callbacks = None, 0, []
    try:
        with hardware.strategy.scope():
            network = models.pipelined(
                model,
                {
                    **(model_args or {}),
                    "num_classes": data.num_classes,
                    "input_shape": data.shape,
                },
                num_stages=num_stages,
                num_micro_batches=num_micro_batches,
                balance=balance,
                schedule=schedule,
                remat=remat,
                devices=hardware.devices,
            )
            if network.output_shape != (None, data.num_classes):
                raise UserError(
                    "A classifier must return a logit for each of the "
                    f"{data.num_classes} classes. Received: model={model}, "
                    f"which returns {network.output_shape}"
                )
            network.compile(
                _optimizer(
                    learning_rate, weight_decay, num_epochs * steps_per_epoch
                ),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
            if workdir is not None:
                workdir = pathlib.Path(workdir)
                checkpoints = Checkpoints(
                    workdir / _CHECKPOINTS, hardware.is_chief
                )
                first_epoch = checkpoints.num_epochs()
            if not hardware.agree(first_epoch):
                raise UserError(
                    "All hosts must resume from the same checkpoint: "
                    "--workdir must be a directory that they share. Received: "
                    f"workdir={workdir}"
                )
            if checkpoints is not None:
                checkpoints.restore(network)
    # A TypeError is a model's that is not one of images.
    except (TypeError, ValueError) as error:
        raise UserError(error) from error
    if checkpoints is not None:
        if hardware.is_chief:
            callbacks = [
                LossLog(workdir / "losses.csv", steps_per_epoch),
                keras.callbacks.TensorBoard(
                    workdir / "logs", write_graph=False
                ),
            ]
        # Last, so that what it saves is also in the other files.
        callbacks.append(checkpoints)

    if hardware.is_chief:
        network.summary()
        print(
            _what_runs_where(network, num_micro_batches, batch_size, schedule)
        )
    if first_epoch:
        print(f"Resuming: {first_epoch} of {num_epochs} epochs are done.")
    with _workers_may_fail(workdir):
        if first_epoch >= num_epochs:
            print("Only testing.")
        else:
            network.fit(
                data.train_batches(batch_size, first_epoch, num_epochs, seed),
                initial_epoch=first_epoch,
                epochs=num_epochs,
                steps_per_epoch=steps_per_epoch,
                callbacks=callbacks,
                verbose=verbose if hardware.is_chief else 0,
                # Keras warns otherwise that it does not shuffle a dataset.
                shuffle=False,
            )
        accuracy = network.evaluate(
            data.test_batches(batch_size), verbose=0, return_dict=True
        )["accuracy"]
    print(f"test accuracy: {accuracy:.4f} ({len(data.test)} images)")
    return network, accuracy


@contextlib.contextmanager
def _workers_may_fail(workdir):
    """Adds the newest checkpoint to what is told of a lost worker."""
    try:
        yield
    except tf.errors.UnavailableError as error:
        found = None
        if workdir is not None:
            found = newest(pathlib.Path(workdir) / _CHECKPOINTS)
        raise UserError(
            f"{error.message} The newest checkpoint is "
            f"{found or 'none: there is no --workdir, or no epoch is done'}."
        ) from error


def _optimizer(learning_rate, weight_decay, num_steps):
    return keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(
            learning_rate, max(1, num_steps)
        ),
        weight_decay=weight_decay,
    )


def _what_runs_where(network, num_micro_batches, batch_size, schedule):
    rows = zip(*(stage.devices for stage in network.stages), strict=True)
    names = "; ".join(
        ", ".join(device.removeprefix("/device:") for device in row)
        for row in rows
    )
    share = batch_size // network.distribute_strategy.num_replicas_in_sync
    return (
        f"Training {len(network.stages)} stages on {names}, schedule "
        f"{schedule}: batches of {share} images a replica in "
        f"{num_micro_batches} micro-batches of up to "
        f"{math.ceil(share / num_micro_batches)}."
    )


def _parse_balance(text):
    if re.fullmatch(r"\d+(,\d+)*", text):
        return [int(count) for count in text.split(",")]
    return text


def _model_args(text):
    try:
        return models.parse_hyper_parameters(text)
    except ValueError as error:
        raise UserError(f"--model_args: {error}") from error


def main():
    if _WORKDIR.value is not None:
        try:
            workdir = pathlib.Path(_WORKDIR.value)
            workdir.mkdir(parents=True, exist_ok=True)
            (workdir / "flags.txt").write_text(flags.FLAGS.flags_into_string())
        except OSError as error:
            raise UserError(f"Cannot write to --workdir: {error}") from error
    train_and_evaluate(
        model=_MODEL.value,
        dataset=_DATASET.value,
        num_stages=_NUM_STAGES.value,
        num_micro_batches=_NUM_MICRO_BATCHES.value,
        balance=_parse_balance(_BALANCE.value),
        schedule=_SCHEDULE.value,
        remat=_REMAT.value,
        batch_size=_BATCH_SIZE.value,
        num_epochs=_NUM_EPOCHS.value,
        learning_rate=_LEARNING_RATE.value,
        weight_decay=_WEIGHT_DECAY.value,
        seed=_SEED.value,
        strategy=_STRATEGY.value,
        num_replicas=_NUM_REPLICAS.value,
        workers=_WORKERS.value,
        worker_timeout=_WORKER_TIMEOUT.value,
        tpu=_TPU.value,
        model_args=_model_args(_MODEL_ARGS.value),
        data_dir=_DATA_DIR.value,
        workdir=_WORKDIR.value,
        verbose=_VERBOSE.value,
    )


if __name__ == "__main__":
    command_line.run(main)
