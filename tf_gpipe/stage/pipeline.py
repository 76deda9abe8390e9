"""A model cut into stages, with the schedule that runs them."""

import dataclasses
import functools
from typing import Any

import keras

from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import RECOMPUTE
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.schedule.tasks import Task
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.stage import Stage
from tf_gpipe.stage.stage import trainable


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A model cut into stages, with its schedule and recomputation.

    Not a `NamedTuple`, since Keras tracks the elements of tuples that a layer
    has as attributes.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    schedule: Schedule
    remat: str  # one of `REMAT_MODES`, or `AUTO_REMAT`
    boundary_dtype: str | None  # of tensors sent from device to device
    # Micro-batches of a mini-batch that has at least as many rows. `None` for
    # the number of the schedule, whatever the rows.
    num_micro_batches: int | None = None
    # The nested models that have been opened, with the layers that they had.
    opened: list[tuple[keras.Model, list]] = dataclasses.field(
        default_factory=list
    )
    # States of Keras's global seed generator, by id.
    seeds: dict[int, keras.Variable] = dataclasses.field(default_factory=dict)

    # The calls of each stage that are recomputed, as ranges of indices in
    # `Stage.nodes`; calls of one range are recomputed together. `None` for all
    # calls. Set with remat "auto".
    chosen: tuple[tuple[range, ...], ...] | None = None

    # Traced stages, with everything that a trace depends on as key.
    traced: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)

    # Copies with other numbers of micro-batches, by these; see `with_rows`.
    _others: dict[int, "Pipeline"] = dataclasses.field(
        default_factory=dict, init=False
    )

    def with_rows(self, rows: int) -> "Pipeline":
        """Returns the pipeline for mini-batches of at most that many rows.

        It has fewer micro-batches if there are fewer rows than micro-batches.
        """
        schedule = self.schedule
        if self.num_micro_batches is None:
            return self
        number = schedules.num_with_rows(
            schedule.name, self.num_micro_batches, rows
        )
        if number == schedule.num_micro_batches:
            return self
        if number not in self._others:
            self._others[number] = dataclasses.replace(
                self,
                schedule=schedule.of_first(number)
                if schedule.name == schedules.AUTO
                else schedules.get(
                    schedule.name,
                    len(self.stages),
                    number,
                    len(schedule.tasks),
                ),
            )
        return self._others[number]

    def recomputed(self, k: int) -> tuple[range, ...]:
        """Returns the ranges of calls that stage `k` recomputes.

        Indices in `Stage.nodes`, for the micro-batches that are recomputed at
        all.
        """
        if self.remat == "never":
            return ()
        if self.chosen is None:
            return (range(len(self.stages[k].nodes)),)
        return self.chosen[k]

    def steps(self, at_once: bool = True) -> list[Task]:
        """Returns the tasks of a step in order, with recomputations.

        Args:
            at_once: As for `Schedule.recomputes`.
        """
        return [
            task
            for task in self.schedule.steps(self.remat, at_once)
            if task.kind != RECOMPUTE or self.recomputed(task.stage)
        ]

    @property
    def last(self) -> int:
        """The index of the last stage."""
        return len(self.stages) - 1

    @functools.cached_property
    def _owners(self) -> dict[int, Stage]:
        return {id(v): stage for stage in self.stages for v in stage.owned}

    @functools.cached_property
    def maker(self) -> dict[Value, tuple[Stage, int]]:
        """The stage that makes each value, and its index in `Stage.outputs`.

        The model's inputs are made by no stage.
        """
        # In reverse, so that the first stage that has a value wins: the last
        # stage also has outputs that earlier stages have made.
        return {
            value: (stage, i)
            for stage in reversed(self.stages)
            for i, value in enumerate(stage.outputs)
        }

    def untrained(self) -> set[Value]:
        """Returns the values that no trained weight has a part in.

        They are the model's inputs, and what stages without trained weights
        make of them. Such a stage is looked at as a whole: one of its layers
        may read a weight of another by a closure.
        """
        found = set(self.graph.inputs)
        for stage in self.stages:
            if found.issuperset(stage.inputs) and not trainable(
                stage.variables
            ):
                found.update(stage.outputs)
        return found

    def changed(self) -> keras.Model | None:
        """Returns an opened model whose layers have changed since, if any."""
        for model, layers in self.opened:
            if [*map(id, model.layers)] != [*map(id, layers)]:
                return model
        return None

    def foreign(self, stage: Stage) -> set[int]:
        """Returns the ids of variables that only other stages use."""
        there = {id(v) for other in self.stages for v in other.used()}
        return there.difference(map(id, stage.variables))

    def packed(self, outputs: Activations) -> Activations:
        """Returns the last stage's outputs in the structure of the model's."""
        if self.schedule.num_micro_batches > 1:
            outputs = outputs.with_full_masks()
        return outputs.packed(self.graph.outputs)

    def device_of(self, variable: keras.Variable) -> str:
        """Returns the device of a variable, in the current replica."""
        owner = self._owners.get(id(variable))
        return owner.device if owner else variable.value.device
