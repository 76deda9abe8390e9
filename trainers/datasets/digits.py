"""Handwritten digits from scikit-learn's wheel, as a TFDS dataset."""

import numpy as np
import tensorflow_datasets as tfds


class Digits(tfds.core.GeneratorBasedBuilder):
    """1,797 real handwritten digits of 8x8 pixels, in 10 classes.

    The test part of the UCI "Optical Recognition of Handwritten Digits", which
    scikit-learn has in its wheel, so that no network is needed. The original
    grey values, 0 to 16, are scaled to `uint8`, 0 to 255.

    The split is fixed and the same in every class: in scikit-learn's order,
    every fifth image of a class is in `test` (355 images), the others are in
    `train` (1,442 images).

    Example:

    ```python
    from trainers import datasets  # Registers the dataset.

    train = tfds.load("digits", split="train", as_supervised=True)
    ```
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}

    def _info(self):
        return self.dataset_info_from_configs(
            description="Handwritten digits of 8x8 pixels, in 10 classes.",
            homepage="https://archive.ics.uci.edu/dataset/80",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        images, labels, is_test = _load()
        return {
            "train": self._generate_examples(images, labels, ~is_test),
            "test": self._generate_examples(images, labels, is_test),
        }

    def _generate_examples(self, images, labels, selected):
        for index in np.flatnonzero(selected):
            yield (
                int(index),
                {"image": images[index], "label": int(labels[index])},
            )


def _load():
    """Returns images `(n, 8, 8, 1)`, labels `(n,)` and the test set's mask."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "The dataset 'digits' is read from scikit-learn, which is not "
            "installed. Run: pip install scikit-learn"
        ) from error
    digits = datasets.load_digits()
    images = np.round(digits.images * (255 / 16)).astype("uint8")
    labels = digits.target
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    return images[..., np.newaxis], labels, is_test
