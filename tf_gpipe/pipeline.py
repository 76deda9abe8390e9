"""Stages and how a mini-batch goes through them."""

import dataclasses

import keras

from tf_gpipe.schedule import Schedule
from tf_gpipe.stage import Stage


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages and how a mini-batch goes through them.

    No tuple: Keras tracks what is in the tuples that a layer holds.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    remat: str  # one of `remat.MODES`
    seed: keras.Variable  # state of Keras's global seed generator
