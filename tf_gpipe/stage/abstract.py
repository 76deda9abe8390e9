"""Layers built without values for their variables.

That is how a model is counted that is too large for the machine, and how one
is built whose weights get their values where their stage is.
"""

from collections.abc import Callable
from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage import seeds

# What Keras says of a variable that is made of a value, not an initializer.
_REFUSAL = "create a variable while in a stateless scope"


class NoValues(keras.StatelessScope):
    """Variables that are made in this scope get no value, and no memory."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self._updates: list[tuple[keras.Variable, Any]] = []

    def __enter__(self) -> "NoValues":
        # Layers may draw from it as they are built, and it outlives them.
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
        """Assigns what layers have, as they were built, to their variables."""
        for variable, value in self._updates:
            variable.assign(value)

    def finish(self, model: keras.Model) -> None:
        """As `assign`, once variables of a model that have no place are made.

        Such as those of its metrics.
        """
        rest = []
        for variable in (*model.variables, *model.metrics_variables):
            if not upstream.has_value(variable):
                upstream.give_value(variable)
                rest.append(variable)
        upstream.forget_waiting(rest)
        self.assign()


def made(make: Callable, config: dict[str, Any]) -> tuple[Any, NoValues]:
    """Returns what a function makes of a config, and the scope of it.

    Without values for variables, but where a layer makes some of values that
    it has, as one that loads a SavedModel: then all get theirs at once.
    """

    def copied() -> dict[str, Any]:
        # Keras takes apart what it is given.
        return keras.tree.map_structure(lambda x: x, config)

    try:
        with NoValues() as scope:
            return make(copied()), scope
    except (TypeError, ValueError) as e:
        if not _has_a_value(e):
            raise
    return make(copied()), NoValues()


def _has_a_value(error: BaseException | None) -> bool:
    """Returns whether an error is that of a variable made of a value."""
    return _REFUSAL in str(error)
