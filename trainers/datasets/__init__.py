"""Datasets for `tfds.load` without a network. Importing registers them."""

import tensorflow_datasets as tfds

from tf_gpipe.checks import near
from trainers.command_line import UserError
from trainers.datasets.digits import Digits
from trainers.datasets.django_messages import DjangoMessages
from trainers.datasets.home_assistant import HomeAssistant

__all__ = ["Digits", "DjangoMessages", "HomeAssistant", "not_found"]


def not_found(name):
    """Returns the error of a dataset that TFDS has not, nor we."""
    found, _, _ = name.partition("/")
    known = tfds.list_builders()
    return UserError(
        f"TFDS has no dataset {name!r}{near([found], known) or '.'}"
    )
