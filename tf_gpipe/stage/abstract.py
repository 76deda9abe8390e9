"""Layers built without values for their variables.

That is how a model is counted that is too large for the machine, and how one
is built whose weights get their values where their stage is.
"""

from typing import Any

import keras

from tf_gpipe import upstream
from tf_gpipe.stage import seeds


class NoValues(keras.StatelessScope):
    """Variables that are made in this scope get no value, and no memory."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self._updates: list[tuple[keras.Variable, Any]] = []

    def __enter__(self) -> "NoValues":
        # Layers may draw from it as they are built, and it outlives them.
        seeds.global_seed()
        return super().__enter__()

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
