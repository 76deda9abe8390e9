"""Trains an image classifier as a pipeline.

    python -m trainers.image_classification

trains a small ResNet on 1,442 handwritten digits, in two stages. It takes
half a minute on two CPU cores and ends with a test accuracy above 98.5%.

    python -m trainers.image_classification --dataset=cifar10 \\
        --num_stages=4 --num_micro_batches=16 --crop=pad --flip \\
        --workdir=/tmp/cifar10

does so for another dataset of TFDS, with four stages, and keeps in the
working directory:

    flags.txt     the flags, to repeat the run with --flagfile
    checkpoints/  the newest two, from which the same command goes on:
                  of each epoch, each --checkpoint_every_steps, and
                  where Ctrl-C has stopped the run
    losses.csv    the loss of every step
    run.json      the flags that must stay; see docs/guides/trainers.md
    logs/         for TensorBoard

Flags for several tasks are in trainers/recipes, with results:

    python -m trainers.image_classification \\
        --flagfile=trainers/recipes/fashion_mnist.cfg

Transfer, as in Table 4 of the GPipe paper: all but the last layer starts with
the weights of a model that was trained on other images.

    python -m trainers.image_classification --init_from=/tmp/cifar10

With the model in a working directory:

    --mode=predict    writes the probabilities of the test images to
                      predictions.csv there
    --mode=export     writes a SavedModel for serving to export there

More hardware:

    --strategy=mirrored --num_replicas=2     two pipelines on this host
    --workers=10.0.0.1:2222,10.0.0.2:2222    stages on worker processes, each
                                             `python -m tf_gpipe worker`
    --strategy=multi_worker                  a pipeline on each host of
                                             TF_CONFIG, with one --workdir
                                             that all of them share
    --strategy=tpu --tpu=NAME                pipelines over the cores of a TPU

Results do not depend on the number of stages, the schedule or
rematerialisation, but for rounding. They do depend on the number of
micro-batches, each of which is normalised by itself in training.
"""

import dataclasses

import keras
import numpy as np
from absl import flags

import model_zoo
from tf_gpipe.commands.flags import keyword_arguments
from tf_gpipe.whole_files import replacing
from trainers import augmentation
from trainers import command_line
from trainers import images
from trainers import job_config
from trainers import optimization
from trainers import transfer
from trainers.augmentation import Augmentation
from trainers.command_line import UserError
from trainers.command_line import chosen
from trainers.command_line import from_flags
from trainers.command_line import parsed
from trainers.failures import as_user_errors
from trainers.job import Job
from trainers.job_config import JobConfig
from trainers.optimization import Optimization

_MODEL = flags.DEFINE_enum(
    "model", "resnet_small", model_zoo.names(), "Model of model_zoo."
)
_MODES = ("train", "predict", "export")
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    128,
    "Images of a mini-batch, over all replicas.",
    lower_bound=1,
)
_IMAGE_SIZE = flags.DEFINE_integer(
    "image_size",
    None,
    "Height and width that images are resized to. Default: as they are.",
    lower_bound=1,
)
_NUM_TRAIN_PER_CLASS = flags.DEFINE_integer(
    "num_train_per_class",
    None,
    "Training images of each class, drawn by --seed. Default: all.",
    lower_bound=1,
)
_INIT_FROM = flags.DEFINE_string(
    "init_from",
    None,
    "Checkpoint, or working directory of an earlier run, to take all weights "
    "from but those of the last layer.",
)

flags.adopt_module_key_flags(augmentation)
flags.adopt_module_key_flags(job_config)
flags.adopt_module_key_flags(optimization)


def train_and_evaluate(
    config,
    optimization,
    *,
    model,
    dataset,
    batch_size,
    model_args=None,
    data_dir=None,
    image_size=None,
    num_train_per_class=None,
    augmentation=Augmentation(),  # noqa: B008
    label_smoothing=0.0,
    init_from=None,
    mode="train",
):
    """Trains a model, resuming where an earlier run stopped, and tests it.

    Args:
        config: `JobConfig`.
        optimization: `Optimization`.
        model: String, one of `model_zoo.names()`.
        dataset: String, name of a TFDS dataset of labelled images.
        batch_size: Positive integer, images of a mini-batch.
        model_args: Dictionary, other hyper-parameters of the model.
        data_dir: Directory of TFDS datasets. Defaults to that of TFDS.
        image_size: Positive integer, height and width that images are resized
            to. Defaults to `None`: as they are.
        num_train_per_class: Positive integer, training images of each class,
            which ones follows from the seed. Defaults to `None`: all.
        augmentation: `Augmentation` of training images. Defaults to none.
        label_smoothing: Float, of the loss. Defaults to `0.0`.
        init_from: Checkpoint or working directory to take all weights from
            but those of the last layer. Defaults to `None`.
        mode: String, `"train"`; or `"predict"` or `"export"`, which trains
            nothing, and writes into the working directory. Defaults to
            `"train"`.

    Returns:
        Tuple of the model and a dictionary of `loss` and metrics on the test
        images, which is empty if nothing was tested. With `config.dry_run` the
        model is `None`.

    Raises:
        Stopped: If Ctrl-C or SIGTERM has stopped the training.
        UserError: If the arguments do not fit one another, the dataset, the
            machine or the checkpoint (nothing has been trained then), or a
            worker process has failed, the data is damaged or a disk full.
    """
    of_the_data = {"num_classes", "input_shape"} & set(model_args or {})
    if of_the_data:
        raise UserError(
            "The number of classes and the shape of images follow from the "
            "data and --image_size. Received in --model_args: "
            f"{', '.join(sorted(of_the_data))}"
        )
    # First of all: TensorFlow's devices are fixed once it has started.
    batches = {
        "dataset": dataset,
        "batch_size": batch_size,
        "image_size": image_size,
        "num_train_per_class": num_train_per_class,
        **dataclasses.asdict(augmentation),
    }
    job = Job(
        config,
        batches=batches if mode == "train" else None,
        about={
            "dataset": dataset,
            "model": model,
            "model_args": model_args or {},
            **optimization.of_the_state(),
        },
    )
    if mode != "train" and job.workdir is None:
        raise UserError(f"--mode={mode} needs the --workdir of a training run.")
    if batch_size % job.hardware.num_replicas:
        raise UserError(
            "Each replica must get as many images of a batch. Received: "
            f"batch_size={batch_size}, {job.hardware.num_replicas} replicas"
        )
    data = images.load(dataset, data_dir, image_size)
    if num_train_per_class:
        data = data.some_of_each_class(num_train_per_class, config.seed)
    if config.strategy == "tpu" and len(data.test) % batch_size:
        raise UserError(
            "TPUs take batches of one size, so --batch_size must divide the "
            f"number of test images, {len(data.test)}. Received: "
            f"batch_size={batch_size}"
        )
    # Only now: preparing a dataset, the first time, draws random numbers too.
    keras.utils.set_random_seed(config.seed)
    steps_per_epoch = len(data.train) // batch_size
    if not steps_per_epoch:
        raise UserError(
            f"A batch must not be larger than the dataset: {dataset!r} has "
            f"{len(data.train)} training images. "
            f"Received: batch_size={batch_size}"
        )

    hyper_parameters = {
        **(model_args or {}),
        "num_classes": data.num_classes,
        "input_shape": data.shape,
    }

    def make_optimizer():
        return optimization.make(
            config.num_epochs * steps_per_epoch, steps_per_epoch
        )

    if config.dry_run:
        rows = batch_size // job.hardware.num_replicas
        plan = job.plan(model, hyper_parameters, make_optimizer(), rows)
        print(plan, end="")
        return None, {}

    def make():
        optimizer = make_optimizer()
        network = job.pipelined(
            model, hyper_parameters, optimizer, rows=batch_size
        )
        if network.output_shape != (None, data.num_classes):
            raise UserError(
                "A classifier must return a logit for each of the "
                f"{data.num_classes} classes. Received: model={model}, "
                f"which returns {network.output_shape}"
            )
        if init_from is not None:
            transfer.load_all_but_head(network, init_from)
        metrics = [keras.metrics.CategoricalAccuracy(name="accuracy")]
        if data.num_classes > 5:
            metrics.append(_TopKAccuracy(5, name="top_5"))
        network.compile(
            optimizer,
            keras.losses.CategoricalCrossentropy(
                from_logits=True, label_smoothing=label_smoothing
            ),
            metrics=metrics,
        )
        return network

    network = job.build(make)
    test_batches = data.test_batches(batch_size)
    if mode == "export":
        print(f"exported to {job.export(network)}")
        return network, {}
    if mode == "predict":
        logits = job.predict(network, test_batches)
        probabilities = keras.ops.softmax(logits.astype("float32"))
        path = job.workdir / "predictions.csv"
        with as_user_errors(job.workdir), replacing(path) as partial:
            np.savetxt(partial, probabilities, fmt="%.6g", delimiter=",")
        print(f"{len(logits)} rows of probabilities in {path}")
        return network, {}
    job.fit(
        network,
        lambda first, last: data.train_batches(
            batch_size, first, last, config.seed, augmentation
        ),
        steps_per_epoch,
        batch=f"{batch_size} images",
        batch_size=batch_size,
        validation_batches=test_batches,
    )
    scores = job.evaluate(network, test_batches)
    top_5 = f", top 5 {scores['top_5']:.4f}" if "top_5" in scores else ""
    print(
        f"test accuracy: {scores['accuracy']:.4f}{top_5} "
        f"({len(data.test)} images)"
    )
    return network, scores


class _TopKAccuracy(keras.metrics.TopKCategoricalAccuracy):
    """Casts logits to the metric's dtype: Keras's metric refuses float16."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = keras.ops.cast(y_pred, self.dtype)
        return super().update_state(y_true, y_pred, sample_weight)


def main():
    train_and_evaluate(
        from_flags(JobConfig, flags=flags.FLAGS.flags_into_string()),
        from_flags(Optimization),
        mode=chosen("mode", _MODES),
        model=_MODEL.value,
        dataset=flags.FLAGS.dataset,
        batch_size=_BATCH_SIZE.value,
        model_args=parsed("model_args", keyword_arguments),
        data_dir=flags.FLAGS.data_dir,
        image_size=_IMAGE_SIZE.value,
        num_train_per_class=_NUM_TRAIN_PER_CLASS.value,
        augmentation=from_flags(Augmentation),
        label_smoothing=flags.FLAGS.label_smoothing,
        init_from=_INIT_FROM.value,
    )


if __name__ == "__main__":
    command_line.run(
        main,
        dataset="digits",
        learning_rate=0.01,
        optimizer_args="weight_decay=0.1",
    )
