"""Stages and how a mini-batch goes through them."""

import dataclasses
import functools

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

    @functools.cached_property
    def _owners(self) -> dict[int, Stage]:
        return {id(v): stage for stage in self.stages for v in stage.owned}

    def device_of(self, variable: keras.Variable) -> str:
        """Returns the device of a variable, in the current replica."""
        if id(variable) in self._owners:
            return self._owners[id(variable)].device
        return variable.value.device
