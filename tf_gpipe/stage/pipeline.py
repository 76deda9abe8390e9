"""Stages, and how a mini-batch goes through them."""

import dataclasses
import functools

import keras

from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.stage import Activations
from tf_gpipe.stage.stage import Stage


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A model cut into stages.

    No tuple: Keras tracks what is in the tuples that a layer holds.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    schedule: Schedule
    remat: str  # one of `REMAT_MODES`
    boundary_dtype: str | None  # of what travels from device to device
    # The models that have been opened, and their layers then.
    opened: list[tuple[keras.Model, list]] = dataclasses.field(
        default_factory=list
    )
    # States of Keras's global seed generator, by id.
    seeds: dict[int, keras.Variable] = dataclasses.field(default_factory=dict)

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.stages) - 1

    @functools.cached_property
    def _owners(self) -> dict[int, Stage]:
        return {id(v): stage for stage in self.stages for v in stage.owned}

    @functools.cached_property
    def maker(self) -> dict[Value, tuple[Stage, int]]:
        """The stage that makes a value, and its place in `Stage.outputs`.

        Not of what the model is given.
        """
        # The first of them: the last stage passes on what others have made.
        return {
            value: (stage, i)
            for stage in reversed(self.stages)
            for i, value in enumerate(stage.outputs)
        }

    def changed(self) -> keras.Model | None:
        """Returns a model that was opened, and has other layers since."""
        for model, layers in self.opened:
            if [*map(id, model.layers)] != [*map(id, layers)]:
                return model
        return None

    def foreign(self, stage: Stage) -> set[int]:
        """Returns the ids of the layers' variables that a stage lacks."""
        there = {id(v) for other in self.stages for v in other.used()}
        return there.difference(map(id, stage.variables))

    def packed(self, outputs: Activations) -> Activations:
        """Returns what the last stage makes as the model returns it."""
        return Activations(
            *(
                keras.tree.pack_sequence_as(self.graph.outputs, list(x))
                for x in outputs
            )
        )

    def device_of(self, variable: keras.Variable) -> str:
        """Returns the device of a variable, in the current replica."""
        owner = self._owners.get(id(variable))
        return owner.device if owner else variable.value.device
