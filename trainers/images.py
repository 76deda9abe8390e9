"""Labelled images from TFDS, as batches for training and testing."""

import dataclasses

import tensorflow as tf
import tensorflow_datasets as tfds

from trainers import datasets  # noqa: F401 (registers ours with TFDS)
from trainers.command_line import UserError

# Images in memory to draw from. Datasets of TFDS are stored shuffled, so it
# need not hold all of a large one.
_SHUFFLE_BUFFER = 10_000


@dataclasses.dataclass(frozen=True)
class Images:
    """A dataset of labelled images.

    Attributes:
        train: `tf.data.Dataset` of `(image, label)`, the image `float32`
            `(height, width, channels)` in [0, 1].
        test: The same, of the images to test with.
        num_classes: Integer, labels are `0` to `num_classes - 1`.
        shape: Tuple `(height, width, channels)`.
    """

    train: tf.data.Dataset
    test: tf.data.Dataset
    num_classes: int
    shape: tuple[int, int, int]

    def train_batches(self, batch_size, first_epoch, num_epochs, seed):
        """Returns the batches of epochs `first_epoch` to `num_epochs - 1`.

        The order in an epoch follows from the seed and the number of the
        epoch, so that a resumed run sees what an uninterrupted one would. The
        images that fill no batch are left out, others in each epoch.
        """

        def batches(epoch):
            # The seed of this function's graph. It must not be 0: TensorFlow
            # would then compare `epoch`, a tensor, with 0 in Python.
            tf.random.set_seed(seed + 1)
            shuffled = self.train.shuffle(_SHUFFLE_BUFFER, seed=epoch)
            return shuffled.batch(batch_size, drop_remainder=True)

        epochs = tf.data.Dataset.range(first_epoch, num_epochs)
        return _by_batch(epochs.flat_map(batches))

    def test_batches(self, batch_size):
        """Returns the test images in batches; the last may be smaller."""
        return _by_batch(self.test.batch(batch_size))


def load(name, data_dir=None):
    """Loads a dataset of labelled images with `tfds.load`.

    Args:
        name: String, name of a dataset with features `image`, all of the same
            shape, and `label`; a split `train`; and a split `test` or
            `validation`, of which the first is used to test.
        data_dir: Directory of prepared datasets. Defaults to that of TFDS.

    Returns:
        An `Images`.

    Raises:
        UserError: If the dataset cannot be loaded or is of another kind.
    """
    try:
        splits, info = tfds.load(
            name, data_dir=data_dir, as_supervised=True, with_info=True
        )
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(f"TFDS has no dataset {name!r}.") from error
    # Whatever the dataset's own code, the network or the disk may raise.
    except Exception as error:
        raise UserError(f"Cannot load dataset {name!r}: {error}") from error
    test = next((key for key in ("test", "validation") if key in splits), None)
    if (
        "train" not in splits
        or test is None
        or info.supervised_keys != ("image", "label")
        or not isinstance(info.features["label"], tfds.features.ClassLabel)
        or None in info.features["image"].shape
    ):
        raise UserError(
            f"Dataset {name!r} cannot be used. Expected images of one shape "
            "with a label each, in splits 'train' and 'test' or 'validation'. "
            f"Received: features={info.features}, splits={list(splits)}"
        )
    return Images(
        train=splits["train"].map(_scale),
        test=splits[test].map(_scale),
        num_classes=info.features["label"].num_classes,
        shape=tuple(info.features["image"].shape),
    )


def _by_batch(batches):
    """Replicas share each batch, where they would share out the files."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return batches.with_options(options).prefetch(tf.data.AUTOTUNE)


def _scale(image, label):
    # Divides integers by the largest one of their type.
    return tf.image.convert_image_dtype(image, tf.float32), label
