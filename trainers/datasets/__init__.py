"""Datasets for `tfds.load` without a network. Importing registers them."""

from trainers.datasets.digits import Digits
from trainers.datasets.django_messages import DjangoMessages
from trainers.datasets.home_assistant import HomeAssistant

__all__ = ["Digits", "DjangoMessages", "HomeAssistant"]
