"""Layers built without values for their variables.

The planner counts FLOPs and bytes of models too large for the machine this
way. A pipeline is built this way so that each weight gets its value on the
device of its stage.
"""

from collections.abc import Callable
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage import seeds

# Part of Keras's error for a variable made from a value, not an initializer.
_REFUSAL = "create a variable while in a stateless scope"


class NoValues(keras.StatelessScope):
    """Scope in which new variables get no value, and no memory."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self._updates: list[tuple[keras.Variable, Any]] = []

    def __enter__(self) -> "NoValues":
        # Made before the scope is entered: layers may draw from the global
        # seed generator as they are built, and it outlives them.
        seeds.global_seed()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if _has_a_value(error):
            error.add_note(
                "A pipeline builds its layers without values, which their "
                "weights get where their stage is, and a layer has made a "
                "`keras.Variable` of a value as it was built. Make it by "
                "`self.add_weight(initializer=...)`, or in `__init__`; or "
                "build the layers first: "
                "`PipelinedModel.from_model(keras.Sequential(layers), ...)`."
            )

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self._updates.append(update)
        super().add_update(update)

    def assign(self) -> None:
        """Repeats the assignments that layers made while they were built."""
        for variable, value in self._updates:
            variable.assign(value)

    def finish(self, model: keras.Model) -> None:
        """Creates the variables that no stage places, then calls `assign`.

        Those of the model's metrics, for example.
        """
        rest = []
        for variable in (*model.variables, *model.metrics_variables):
            if not upstream.has_value(variable):
                upstream.give_value(variable)
                rest.append(variable)
        upstream.forget_waiting(rest)
        self.assign()


def built(make: Callable, config: dict[str, Any]) -> tuple[Any, NoValues]:
    """Returns the object that `make(config)` builds, and its `NoValues` scope.

    Its variables have no values yet. If a layer makes a variable from a value,
    as one that loads a SavedModel does, the object is built again with values
    for all variables.
    """

    def copied() -> dict[str, Any]:
        # Keras changes the config that it builds from.
        return keras.tree.map_structure(lambda x: x, config)

    try:
        with NoValues() as scope:
            return make(copied()), scope
    except (TypeError, ValueError) as e:
        if not _has_a_value(e):
            raise
    return make(copied()), NoValues()


def _has_a_value(error: BaseException | None) -> bool:
    """Returns whether an error is Keras's of a variable made from a value."""
    return _REFUSAL in str(error)
