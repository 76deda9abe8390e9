"""When each task of a training step ran, on each device."""

import collections
import json
import numbers
import statistics
from collections.abc import Collection
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe.devices import replicas
from tf_gpipe.models.training import PipelinedTraining
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.simulate import Span
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import RECOMPUTE
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.stage.pipeline import Pipeline


class Timeline(keras.callbacks.Callback):
    """Records when each task of a training step ran, on each device.

    It adds `bubble` to the logs of an epoch: the share of the time that devices
    were idle, as the mean over the recorded steps of the epoch. The time of a
    task is read on its device, from the clock of its host, so that the clocks
    of several hosts must agree. Where XLA compiles the stages, recomputation is
    part of the backward pass. Of several replicas the first one is recorded.

    Args:
        steps: Collection of the numbers of the steps to record, from 0, the
            first step of `fit`. Defaults to all but the first one, in which
            TensorFlow prepares the stages. With `steps_per_execution` above 1
            the last step of each execution can be recorded.
        trace: Path of a Chrome trace (JSON, for Perfetto) of the last
            recorded step, written when training ends.
        picture: Path of an image of that step (png or svg; needs matplotlib),
            below a simulation of it from the mean times of each stage.
        chart: Boolean, whether to print that step as text when training ends.

    Raises:
        TypeError, ValueError: If an argument is not valid, or a path cannot
            be written.
        ImportError: If a picture is asked for, and matplotlib is missing.

    Attributes:
        spans: List of the `Span`s of the last recorded step, in seconds.
        devices: List of the names of the devices.

    Example:

    ```python
    model.fit(x, y, callbacks=[tf_gpipe.callbacks.Timeline(chart=True)])
    ```
    """

    def __init__(
        self,
        steps: Collection[int] | None = None,
        trace: str | None = None,
        picture: str | None = None,
        chart: bool = False,
    ):
        super().__init__()
        checks.boolean("chart", chart)
        if steps is not None:
            _check_steps(steps)
        for name, path in (("trace", trace), ("picture", picture)):
            if path is not None:
                checks.writable(name, path)
        if picture is not None:
            timeline.check_picture(picture)
        self.spans: list[Span] = []
        self.devices: list[str] = []
        # As it was in the last recorded step.
        self._pipeline: Pipeline | None = None
        # By the number of their tasks.
        self._pipelines: dict[int | None, Pipeline] = {}
        self._steps = steps
        self._trace = trace
        self._picture = picture
        self._chart = chart

    def set_model(self, model):
        if not isinstance(model, PipelinedTraining):
            raise ValueError(
                "The Timeline callback records models of tf_gpipe, such as "
                f"`PipelinedSequential`. Received: {model}"
            )
        super().set_model(model)

    def on_train_begin(self, logs=None):
        self.model._record_times = self._record
        # A step that was traced before does not read the clock.
        self.model.make_train_function(force=True)
        self.spans = []
        # The numbers of the first step of the epoch, and of the step after the
        # last one.
        self._first = self._next = 0
        with tf.device("CPU:0"):
            # How many tasks there are is known when the model is built.
            self._times = tf.Variable(
                tf.zeros((0, 2), tf.float64), trainable=False, shape=(None, 2)
            )

    def on_epoch_begin(self, epoch, logs=None):
        self._first = self._next
        self._bubbles: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        step = self._first + batch
        # By default all steps but the first one.
        chosen = self._next > 0 if self._steps is None else step in self._steps
        self._next = step + 1
        if chosen:
            self._measured = self._read()
            self.spans = self._measured.spans
            self.devices = self._measured.devices
            self._bubbles.append(self._measured.bubble)

    def on_epoch_end(self, epoch, logs=None):
        if self._bubbles and logs is not None:
            logs["bubble"] = statistics.mean(self._bubbles)

    def on_train_end(self, logs=None):
        self.model._stop_recording()
        if not self.spans:
            return
        if self._trace:
            with open(self._trace, "w") as f:
                json.dump(timeline.chrome_trace(self._measured), f)
        if self._picture:
            schedule = self.model._pipeline.schedule
            title = schedule.description and f", {schedule.title}"
            steps = {
                f"simulated{title}": self.simulated(),
                "measured": self._measured,
            }
            timeline.picture(steps, self._picture)
        if self._chart:
            print(timeline.text_chart(self._measured))

    def simulated(self) -> Execution:
        """Returns the step simulated with the mean times of each stage.

        Raises:
            ValueError: If no step has been recorded.
        """
        pipeline = self._pipeline
        if pipeline is None:
            raise ValueError(
                "The Timeline callback has recorded no step to simulate. Give "
                "it to `fit`, with `steps` that are trained."
            )
        seconds: dict = collections.defaultdict(list)
        for _, task, start, end in self.spans:
            seconds[task.kind, task.stage].append(end - start)

        def mean(kind):
            return [
                statistics.mean(seconds[kind, stage.index] or [0.0])
                for stage in pipeline.stages
            ]

        weights = mean(WEIGHTS)
        step = simulate(
            pipeline.schedule,
            mean(FORWARD),
            [sum(x) for x in zip(mean(BACKWARD), weights, strict=True)],
            mean(RECOMPUTE),
            remat=pipeline.remat,
            weights=weights,
        )
        return Execution(step.spans, self.devices)

    def _record(self, times: tf.Tensor, pipeline: Pipeline) -> None:
        """Keeps the times of a step, while it is being traced."""
        if replicas.current():
            return
        # Mini-batches of other sizes have traces of their own.
        self._pipelines[times.shape[0]] = pipeline
        with tf.device("CPU:0"):
            self._times.assign(times)

    def _read(self) -> Execution:
        times = self._times.numpy()
        if not times.size:
            raise ValueError(
                "The Timeline callback got no times of the step. Tasks have "
                "none where the model runs eagerly (run_eagerly=True), where "
                "it overrides `call`, or where its own `train_step` does not "
                "ask `loss_and_gradients`."
            )
        times -= times.min()
        pipeline = self._pipeline = self._pipelines[len(times)]
        schedule = pipeline.schedule
        return Execution(
            [
                Span(schedule.devices[task.stage], task, start, end)
                for task, (start, end) in zip(
                    pipeline.steps, times.tolist(), strict=True
                )
            ],
            [
                pipeline.stages[schedule.devices.index(i)].device
                for i in range(len(schedule.tasks))
            ],
        )


def _check_steps(steps: Any) -> None:
    expected = (
        "`steps` must be a collection of the numbers of steps, from 0, such "
        f"as [5] or range(10, 20). Received: steps={steps!r}"
    )
    numbered = steps
    if not isinstance(steps, (set, frozenset)):
        numbered = checks.items(steps, expected)
    if not isinstance(steps, Collection):
        raise TypeError(expected)
    if not all(
        isinstance(x, numbers.Integral) and int(x) >= 0 for x in numbered
    ):
        raise ValueError(expected)
