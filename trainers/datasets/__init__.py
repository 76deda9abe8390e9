"""Datasets for `tfds.load` without a network. Importing registers them."""

import tensorflow_datasets as tfds

from tf_gpipe.checks import near
from trainers.command_line import UserError
from trainers.datasets.digits import Digits
from trainers.datasets.django_messages import DjangoMessages
from trainers.datasets.home_assistant import HomeAssistant

__all__ = ["Digits", "DjangoMessages", "HomeAssistant", "not_found", "prepare"]


def prepare(make, **arguments):
    """Prepares a dataset, unless it is there.

    TFDS lets several programs prepare one at once, and then fails in all but
    the first that is done. They take what that one has made.

    Args:
        make: Function without arguments that returns a
            `tfds.core.DatasetBuilder`.
        **arguments: Of `download_and_prepare`.

    Returns:
        The builder.
    """
    builder = make()
    try:
        builder.download_and_prepare(**arguments)
    except Exception:
        # Made again, as a builder looks for the data once.
        builder = make()
        if not builder.data_path.exists():
            raise
    return builder


def not_found(name):
    """Returns the error of a dataset that TFDS has not, nor we."""
    found, _, _ = name.partition("/")
    known = tfds.list_builders()
    return UserError(
        f"TFDS has no dataset {name!r}{near([found], known) or '.'}"
    )
