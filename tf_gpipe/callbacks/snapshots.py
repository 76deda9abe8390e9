"""What a checkpoint is to hold, as it is between two steps."""

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import keras

from tf_gpipe import upstream
from tf_gpipe.callbacks import monitors
from tf_gpipe.checkpoints import model_variables
from tf_gpipe.checkpoints import state
from tf_gpipe.checkpoints.store import Position


class Snapshot(NamedTuple):
    """The arguments of `Writer.write`, without the last.

    Attributes:
        position: `Position`.
        parts: As of `Store.write`. They are drawn once.
        content: As of `Store.write`.
    """

    position: Position
    parts: Iterable
    content: Mapping[str, Any]


class Snapshots:
    """Takes snapshots of a model and of callbacks that have a state.

    Args:
        model: A pipeline that is built and compiled.
        callbacks: The argument of `fit`.
        params: Dictionary with the `epochs` and `steps` of `fit`.
        data: Dictionary of what makes the data the same, as of `data.check`.

    Attributes:
        monitors: List of the callbacks that monitor a metric.
        swaps: List of the `SwapEMAWeights`.
    """

    def __init__(
        self,
        model: Any,
        callbacks: Any,
        params: Mapping[str, Any],
        data: Mapping[str, Any],
    ):
        self.monitors = upstream.monitors(callbacks)
        self.swaps = upstream.callbacks_of(
            keras.callbacks.SwapEMAWeights, callbacks
        )
        self._model, self._params, self._data = model, params, data
        self._pipeline = model._pipeline
        self._copier = state.Copier(model)

    def drop_moved(self) -> None:
        """Frees the variables that have moved, if the model was cut anew."""
        if self._pipeline is not self._model._pipeline:
            # The copier's functions would keep their memory.
            self._pipeline = self._model._pipeline
            self._copier = state.Copier(self._model)

    def take(
        self,
        position: Position,
        total: int,
        random: list,
        begun: bool = False,
        ended: bool = False,
        all_steps: bool = False,
    ) -> Snapshot:
        """Returns what a checkpoint is to hold.

        Args:
            position: `Position`, the steps that are done.
            total: Integer, the steps that are done since the first epoch.
            random: The random states with which the epoch began.
            begun: Boolean, whether callbacks have been told of the next step or
                epoch, so that what they did then is in it.
            ended: Boolean, whether a callback has ended training for good.
            all_steps: Boolean, whether no step of the epoch is left, and what
                comes between two epochs is. The values stay where the variables
                are, as most such snapshots are never written.
        """
        copier = self._copier
        parts: list = copier.copy(in_place=all_steps)
        parts.append(monitors.arrays(self.monitors))
        params = self._params
        content = {
            "position": list(position),
            "begun": begun,
            "all_steps": all_steps,
            "ended": bool(ended),
            # After the last epoch, the weights themselves are gone.
            "averages": position.epochs == params["epochs"]
            and monitors.have_swapped(self.swaps),
            "total": total,
            "steps_per_epoch": params["steps"],
            "data": self._data,
            "random": random,
            "monitors": monitors.states([*self.monitors, *self.swaps]),
            "optimizer": model_variables.names_of_optimizers(self._model),
            "weights of optimizers": model_variables.weights_of_optimizers(
                self._model, copier.variables
            ),
        }
        trainable = copier.trainable
        return Snapshot(
            position, (state.values(x, trainable) for x in parts), content
        )
