"""Start and end of each task of a training step, measured in its graph."""

import collections
import statistics
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.devices import replicas
from tf_gpipe.models.training import PipelinedTraining
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.simulate import Span
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import RECOMPUTE
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.stage.pipeline import Pipeline

# From kinds of tasks to a list of their mean seconds in each stage.
StageSeconds = Mapping[str, list[float]]


class StepTimes(keras.callbacks.Callback):
    """Base of callbacks that read the times of the last step's tasks."""

    def __init__(self) -> None:
        super().__init__()
        # The pipeline of the last step that was read.
        self._pipeline: Pipeline | None = None
        # From numbers of tasks to the pipelines that have so many.
        self._pipelines: dict[int | None, Pipeline] = {}

    def set_model(self, model):
        """Refuses models that are no pipelines; `fit` calls it."""
        if not isinstance(model, PipelinedTraining):
            raise ValueError(
                f"The {type(self).__name__} callback records models of "
                f"tf_gpipe, such as `PipelinedSequential`. Received: {model}"
            )
        super().set_model(model)

    def on_train_begin(self, logs=None):
        # Another callback may record times, too.
        others = self.model._record_times

        def record(times: tf.Tensor, pipeline: Pipeline) -> None:
            if others is not None:
                others(times, pipeline)
            self._record(times, pipeline)

        self.model._record_times = record
        # Traced anew: a step that was traced before does not read the clock.
        self.model.make_train_function(force=True)
        with tf.device("CPU:0"):
            # The number of tasks is known only once the model is built.
            self._times = tf.Variable(
                tf.zeros((0, 2), tf.float64), trainable=False, shape=(None, 2)
            )

    def _record(self, times: tf.Tensor, pipeline: Pipeline) -> None:
        """Adds to a step's trace an assignment of its times, `(tasks, 2)`."""
        if replicas.current():
            return
        # Mini-batches of other sizes may have other numbers of tasks.
        self._pipelines[times.shape[0]] = pipeline
        with tf.device("CPU:0"):
            self._times.assign(times)

    def _read(self) -> tuple[float, Execution]:
        """Returns the start of the last step, in seconds since 1970, and it."""
        times = self._times.numpy()
        if not times.size:
            raise ValueError(
                f"The {type(self).__name__} callback got no times of the step. "
                "Tasks have none where the model runs eagerly "
                "(run_eagerly=True), where it overrides `call`, or where its "
                "own `train_step` does not ask `loss_and_gradients`."
            )
        first = times.min()
        times -= first
        pipeline = self._pipeline = self._pipelines[len(times)]
        schedule = pipeline.schedule
        spans = [
            Span(schedule.devices[task.stage], task, start, end)
            for task, (start, end) in zip(
                pipeline.steps(), times.tolist(), strict=True
            )
        ]
        devices = [
            pipeline.stages[schedule.devices.index(i)].device
            for i in range(len(schedule.tasks))
        ]
        return first, Execution(spans, devices, in_seconds=True)


def stage_seconds(pipeline: Pipeline, spans: Iterable[Span]) -> StageSeconds:
    """Returns the mean seconds of each kind of task in each stage.

    Where only some backward passes are split, the others count as if they were,
    too, with the same time for weights.
    """
    seconds: Any = collections.defaultdict(list)
    for _, task, start, end in spans:
        seconds[task.kind, task.stage].append(end - start)
    found = {
        kind: [
            statistics.mean(seconds[kind, stage.index] or [0.0])
            for stage in pipeline.stages
        ]
        for kind in (FORWARD, RECOMPUTE, BACKWARD, WEIGHTS)
    }
    for stage, weights in enumerate(found[WEIGHTS]):
        backward = seconds[BACKWARD, stage]
        whole = len(backward) - len(seconds[WEIGHTS, stage])
        if backward:
            found[BACKWARD][stage] -= weights * whole / len(backward)
    return found


def simulated(pipeline: Pipeline, seconds: StageSeconds) -> Execution:
    """Returns a simulated step whose tasks take these times."""
    return simulate(
        pipeline.schedule,
        seconds[FORWARD],
        [sum(x) for x in zip(seconds[BACKWARD], seconds[WEIGHTS], strict=True)],
        seconds[RECOMPUTE],
        remat=pipeline.remat,
        weights=seconds[WEIGHTS],
    )
