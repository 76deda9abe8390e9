"""Datasets for `tfds.load` that need no network. Importing registers them."""

from trainers.datasets.digits import Digits

__all__ = ["Digits"]
