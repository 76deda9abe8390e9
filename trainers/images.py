"""Labelled images from TFDS, as batches for training and testing."""

import collections
import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf
import tensorflow_datasets as tfds

from trainers import datasets
from trainers import devices
from trainers.augmentation import Augmentation
from trainers.command_line import UserError

# Images in memory to draw from, still encoded. Datasets of TFDS are stored
# shuffled, so it need not hold all of a large one.
_SHUFFLE_BUFFER = 10_000

_DAMAGED = (
    "The data set is damaged. Delete it from the directory of data sets and "
    "prepare it again:"
)

# TensorFlow's seed of a graph for which none has been set.
_DEFAULT_SEED = 87654321


@dataclasses.dataclass(frozen=True)
class Images:
    """A dataset of labelled images.

    Attributes:
        train: `tf.data.Dataset` of `(image, label)`, the image encoded.
        test: The same, of the images to test with.
        num_classes: Integer, labels are `0` to `num_classes - 1`.
        shape: Tuple `(height, width, channels)` of the images in batches.
        resize: Boolean, whether stored images have other sizes than `shape`.
        feature: `tfds.features.Image`, which decodes an image.
    """

    train: tf.data.Dataset
    test: tf.data.Dataset
    num_classes: int
    shape: tuple[int, int, int]
    resize: bool
    feature: Any

    def train_batches(
        self,
        batch_size,
        first_epoch,
        num_epochs,
        seed,
        augmentation=Augmentation(),  # noqa: B008
    ):
        """Returns the batches of epochs `first_epoch` to `num_epochs - 1`.

        The images of an epoch and their order follow from the seed and the
        number of the epoch, so that a resumed run sees the same batches as an
        uninterrupted one. Images that do not fill the last batch are left out,
        different ones in each epoch.

        Args:
            batch_size: Positive integer.
            first_epoch: Integer.
            num_epochs: Integer.
            seed: Integer.
            augmentation: `Augmentation`. Defaults to one that does nothing.

        Returns:
            `tf.data.Dataset` of tuples of images `float32` `(batch_size,
            height, width, channels)` in [0, 1], and labels `(batch_size,
            num_classes)` that sum up to 1.
        """
        change = augmentation.image_function(self.shape[:2])
        mix = augmentation.batch_function()
        fits = augmentation.crop == "inception"

        def batches(epoch):
            # The seed of this function's graph. It must not be a multiple of
            # 2 ** 31 - 1, which TensorFlow takes for 0: it would then compare
            # `epoch`, a tensor, with 0 in Python.
            tf.random.set_seed(1 + seed % (2**31 - 2))
            epoch_seed = tf.random.stateless_uniform(
                (), (seed, epoch), None, None, tf.int64
            )

            def prepare(index, example):
                image, label = example
                image = self.feature.decode_example(image)
                image = image if fits else self._resized(image)
                image = change(epoch_seed, index, image)
                image = tf.ensure_shape(image, self.shape)
                return image / 255.0, self._one_hot(label)

            shuffled = self.train.shuffle(_SHUFFLE_BUFFER, seed=epoch)
            images = shuffled.enumerate().map(
                prepare, num_parallel_calls=tf.data.AUTOTUNE
            )
            batched = images.batch(batch_size, drop_remainder=True)
            return batched.enumerate().map(
                lambda index, batch: mix(epoch_seed, index, *batch)
            )

        epochs = tf.data.Dataset.range(first_epoch, num_epochs)
        return devices.share_batches(epochs.flat_map(batches))

    def test_batches(self, batch_size):
        """Returns the test images in batches; the last may be smaller."""

        def prepare(image, label):
            image = self._resized(self.feature.decode_example(image))
            image = tf.cast(tf.ensure_shape(image, self.shape), tf.float32)
            return image / 255.0, self._one_hot(label)

        images = self.test.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        # If all batches are full, their size is made static.
        even = len(self.test) % batch_size == 0
        return devices.share_batches(
            images.batch(batch_size, drop_remainder=even)
        )

    def some_of_each_class(self, count, seed):
        """Returns a copy with `count` training images of each class.

        Args:
            count: Positive integer.
            seed: Integer that determines which images are taken.

        Raises:
            UserError: If a class has fewer images.
        """
        chosen = collections.defaultdict(list)

        def shuffle(_):
            # The seed of this function's graph: the choice of images must not
            # depend on a seed that has been set elsewhere.
            tf.random.set_seed(_DEFAULT_SEED)
            return self.train.shuffle(_SHUFFLE_BUFFER, seed=seed)

        shuffled = tf.data.Dataset.range(1).flat_map(shuffle)
        for image, label in shuffled.as_numpy_iterator():
            if label >= 0 and len(chosen[int(label)]) < count:
                chosen[int(label)].append(image)
            if sum(map(len, chosen.values())) == count * self.num_classes:
                break
        for label in range(self.num_classes):
            if len(chosen[label]) < count:
                raise UserError(
                    f"Class {label} has {len(chosen[label])} training images. "
                    f"Received: --num_train_per_class={count}"
                )
        examples = [(x, k) for k in sorted(chosen) for x in chosen[k]]
        train = tf.data.Dataset.from_tensor_slices(
            tuple(map(list, zip(*examples, strict=True)))
        )
        return dataclasses.replace(self, train=train)

    def _one_hot(self, label):
        # Of a label below 0 `tf.one_hot` makes zeros.
        check = tf.debugging.assert_non_negative(
            label,
            "an image has the label -1, which is for none: leave it out",
            # `as_user_errors` knows it by this name.
            name="DecodeLabel",
        )
        with tf.control_dependencies([check]):
            return tf.one_hot(label, self.num_classes)

    def _resized(self, image):
        if not self.resize:
            return image
        # Crops to the largest part of the image with the new aspect ratio.
        height, width, _ = self.shape
        return keras.layers.Resizing(height, width, crop_to_aspect_ratio=True)(
            image
        )


def load(name, data_dir=None, image_size=None):
    """Loads a dataset of labelled images of TFDS.

    Args:
        name: String, name of a dataset with features `image` and `label`, a
            split `train`, and a split `test` or `validation`. The first of
            these two that has labels is the test set.
        data_dir: Directory of prepared datasets. Defaults to that of TFDS.
        image_size: Positive integer, height and width to resize images to.
            Defaults to `None`: as in the dataset, whose images must then all
            have the same size.

    Returns:
        An `Images`.

    Raises:
        UserError: If the dataset cannot be loaded or is of another kind.
    """
    try:
        builder = datasets.prepare(
            functools.partial(tfds.builder, name, data_dir=data_dir)
        )
        info = builder.info
        splits = builder.as_dataset(
            as_supervised=True, decoders={"image": tfds.decode.SkipDecoding()}
        )
    except tfds.core.DatasetNotFoundError as error:
        raise datasets.not_found(name) from error
    # Any error of the dataset's own code, the network or the disk.
    except Exception as error:
        raise UserError(f"Cannot load dataset {name!r}: {error}") from error
    if (
        "train" not in splits
        or info.supervised_keys != ("image", "label")
        or not isinstance(info.features["image"], tfds.features.Image)
        or tf.as_dtype(info.features["image"].np_dtype) != tf.uint8
        or info.features["image"].shape[-1] is None
        or not isinstance(info.features["label"], tfds.features.ClassLabel)
        or (info.features["label"].num_classes or 0) < 2
    ):
        raise UserError(
            f"Dataset {name!r} cannot be used. Expected images of 8 bits, of a "
            "known number of channels, with a label each of at least two "
            "classes, in splits 'train' and 'test' or 'validation'. "
            f"Received: features={info.features}, splits={list(splits)}"
        )
    # A data set whose first image is damaged is refused before training.
    if _first(splits["train"]) is None:
        raise UserError(f"{_DAMAGED} no training image of {name!r} can be read")
    test = next(
        (
            splits[key]
            for key in ("test", "validation")
            if key in splits and _has_labels(splits[key])
        ),
        None,
    )
    if test is None:
        raise UserError(
            f"Dataset {name!r} has no images to test with: no split 'test' or "
            f"'validation' with labels. Received: splits={list(splits)}"
        )
    feature = info.features["image"]
    shape = tuple(feature.shape)
    if image_size:
        shape = (image_size, image_size, shape[-1])
    if None in shape:
        raise UserError(
            f"The images of {name!r} differ in size: choose one for all with "
            f"--image_size. Received: shape {shape}"
        )
    return Images(
        train=splits["train"],
        test=test,
        num_classes=info.features["label"].num_classes,
        shape=shape,
        resize=shape != tuple(feature.shape),
        feature=feature,
    )


def _has_labels(split):
    """Returns whether the first image has a label: TFDS gives -1 for none."""
    first = _first(split)
    return first is None or first[1] >= 0


def _first(split):
    """Returns the first image and label, or `None` if there is none."""
    try:
        return next(split.take(1).as_numpy_iterator(), None)
    except tf.errors.OpError as error:
        raise UserError(f"{_DAMAGED} {error.message}") from error
