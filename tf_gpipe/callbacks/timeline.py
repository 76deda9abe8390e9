"""`Timeline`: records and draws when each task of a training step ran."""

import collections
import numbers
import statistics
from collections.abc import Collection
from typing import Any

from tf_gpipe import checks
from tf_gpipe.callbacks import images
from tf_gpipe.callbacks import profile
from tf_gpipe.callbacks.profile import Recorded
from tf_gpipe.callbacks.step_times import StepTimes
from tf_gpipe.callbacks.step_times import simulated
from tf_gpipe.callbacks.step_times import stage_seconds
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.simulate import Span
from tf_gpipe.schedule.step_files import StepFiles
from tf_gpipe.stage.pipeline import Pipeline

# The number of recorded steps that are kept, for charts and for a profile.
_MOST_STEPS = 100


class Timeline(StepTimes):
    """Records when each task of a training step ran, on each device.

    It adds to the logs of an epoch, as means over its recorded steps: `bubble`,
    the share of the time that devices were idle, and for each stage
    `idle_stage_0` and so on, the share that the stage's device was. `History`,
    the progress bar, `keras.callbacks.TensorBoard` and other callbacks have
    them, wherever this one is in the list of callbacks.

    The time of a task is read on its device, from the clock of its host, so
    that the clocks of several hosts must agree. Where XLA compiles the stages,
    recomputation is part of the backward pass. Of several replicas the first
    one is recorded. Logical CPU devices share cores, which a chart says.

    What is drawn or written is one step: of those recorded in the last epoch
    (in its last 100, if there are more) the one of median length. The last
    step of an epoch may have fewer rows than the others, and any step may be
    held up by other programs.

    Args:
        steps: Collection of the numbers of the steps to record, from 0, the
            first step of `fit`. Defaults to all but the first one, in which
            TensorFlow prepares the stages. With `steps_per_execution` above 1
            the last step of each execution can be recorded.
        trace: Path of a Chrome trace (JSON, for Perfetto) of the step of median
            length, written when training ends.
        picture: Path of an image of that step (png or svg; needs matplotlib),
            below a simulation of it from the mean times of each stage.
        chart: Boolean, whether to print that step as text when training ends.
        html: Path of a page with the two charts of `picture`, to zoom into,
            and a table of the stages; one file that needs no network (needs
            plotly to be written).
        log_dir: Path of a directory, such as that of
            `keras.callbacks.TensorBoard`, in which the picture is logged at
            the end of each epoch, of its step of median length, as an image
            for TensorBoard (needs matplotlib and tensorboard).

    Raises:
        TypeError, ValueError: If an argument is not valid, or a path cannot
            be written.
        ImportError: If what a picture, a page or an image for TensorBoard
            needs is missing; the error says how to install it.

    Attributes:
        spans: List of the `Span`s of the step of median length, in seconds;
            within an epoch, those of the last recorded step.
        devices: List of the names of the devices.

    Example:

    >>> model = tf_gpipe.PipelinedSequential(
    ...     [keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)],
    ...     num_stages=2,
    ...     devices=["CPU:0", "CPU:0"],
    ... )
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((16, 8), "float32")
    >>> timeline = tf_gpipe.callbacks.Timeline()
    >>> fitted = model.fit(x, x[:, :1], 8, verbose=0, callbacks=[timeline])
    >>> str(timeline.spans[0].task)
    'F0.0'
    """

    # Makes `fit` call it before the callbacks that read the logs.
    adds_to_logs = True

    def __init__(
        self,
        steps: Collection[int] | None = None,
        trace: str | None = None,
        picture: str | None = None,
        chart: bool = False,
        html: str | None = None,
        log_dir: str | None = None,
    ):
        super().__init__()
        checks.boolean("chart", chart)
        if steps is not None:
            _check_steps(steps)
        self._files = StepFiles(trace, picture, html)
        self._images = None if log_dir is None else images.Images(log_dir)
        self.spans: list[Span] = []
        self.devices: list[str] = []
        self._steps = steps
        self._chart = chart
        # The last steps, in seconds since 1970, for `name_tasks`.
        self._recorded: collections.deque[Recorded] = collections.deque(
            maxlen=_MOST_STEPS
        )

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.spans = []
        self._recorded.clear()
        # The numbers of the first step of the epoch, and of the step after the
        # last one.
        self._first = self._next = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._first = self._next
        self._logs: list[dict[str, float]] = []
        # The last steps of the epoch.
        self._epoch: collections.deque[tuple[Execution, Pipeline | None]] = (
            collections.deque(maxlen=_MOST_STEPS)
        )

    def on_train_batch_end(self, batch, logs=None):
        step = self._first + batch
        # By default all steps but the first one.
        chosen = self._next > 0 if self._steps is None else step in self._steps
        self._next = step + 1
        if chosen:
            start, measured = self._read()
            self._recorded.append(
                Recorded(start, measured.spans, measured.devices)
            )
            self._epoch.append((measured, self._pipeline))
            self._show(*self._epoch[-1])
            idle = measured.idle.items()
            self._logs.append(
                {
                    "bubble": measured.bubble,
                    **{f"idle_stage_{k}": share for k, share in idle},
                }
            )

    def on_epoch_end(self, epoch, logs=None):
        if not self._logs:
            return
        if logs is not None:
            for name in self._logs[-1]:
                logs[name] = statistics.mean(x[name] for x in self._logs)
        by_length = sorted(self._epoch, key=lambda step: step[0].makespan)
        self._show(*by_length[(len(by_length) - 1) // 2])
        if self._images is not None:
            self._images.write(self._charts(), epoch)

    def on_train_end(self, logs=None):
        self.model._stop_recording()
        if not self.spans:
            return
        if self._files:
            self._files.write(self._charts(), self._about())
        if self._chart:
            print(timeline.text_chart(self._measured))

    def _show(self, measured: Execution, pipeline: Pipeline | None) -> None:
        """Sets the step, and its pipeline, that charts and `spans` are of."""
        self._measured, self._pipeline = measured, pipeline
        self.spans, self.devices = measured.spans, measured.devices

    def simulated(self) -> Execution:
        """Returns the step simulated with the mean times of each stage.

        Returns:
            An `Execution`, of the step of which `spans` are.

        Raises:
            ValueError: If no step has been recorded.
        """
        pipeline = self._pipeline
        if pipeline is None:
            raise ValueError(
                "The Timeline callback has recorded no step to simulate. Give "
                "it to `fit`, with `steps` that are trained."
            )
        step = simulated(pipeline, stage_seconds(pipeline, self.spans))
        return Execution(step.spans, self.devices, in_seconds=True)

    def name_tasks(self, log_dir: str) -> int:
        """Adds the tasks to the newest profile in a directory.

        TensorFlow's profiler knows operations, not tasks. This adds a line to
        its trace for each device of the pipeline, with the recorded tasks as
        `F0.2` (stage 0, micro-batch 2), above what the device does meanwhile.
        Call it when `fit` and the profiler have ended.

        Args:
            log_dir: Directory of the profile: what
                `keras.callbacks.TensorBoard` or `tf.profiler.experimental`
                were given.

        Returns:
            Integer, how many tasks were added: those of the steps in the
            profile, of the last 100 that were recorded.

        Raises:
            ValueError: If there is no profile, or no recorded step is in it.

        Example:

        ```python
        board = keras.callbacks.TensorBoard("logs", profile_batch=(5, 8))
        timeline = tf_gpipe.callbacks.Timeline()
        model.fit(x, y, callbacks=[board, timeline])
        timeline.name_tasks("logs")
        ```
        """
        return profile.name_tasks(log_dir, self._recorded)

    def _charts(self) -> dict[str, Execution]:
        """Returns the step that `spans` are of, simulated and measured."""
        schedule = self.model._pipeline.schedule
        title = schedule.description and f", {schedule.title}"
        return {
            f"simulated{title}": self.simulated(),
            "measured": self._measured,
        }

    def _about(self) -> list[dict[str, str]]:
        """Returns a dict of texts for each stage, for the table of the page."""
        assert self._pipeline is not None
        return [
            {
                "layers": f"{len(x.nodes)}, from {x.nodes[0].layer.name}",
                "parameters": f"{x.count_params():,}",
            }
            for x in self._pipeline.stages
        ]


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
