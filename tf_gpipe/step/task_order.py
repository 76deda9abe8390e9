"""Control dependencies that run a device's tasks in order; their times."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe.schedule.tasks import Task
from tf_gpipe.stage.function_call import FunctionCall
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.structures import tensors


class TaskOrder:
    """The order of tasks in a graph, and the times when they ran.

    TensorFlow runs an operation as soon as its inputs are ready. A device runs
    its tasks in the order of the schedule because the operations of a task
    wait for the last operations of the task before:

        device 0    F0.0 -> done -> F0.1 -> done -> B0.0 -> ...
                      |               |               ^
        device 1      '----> F1.0 ----|---------------'

    If they are `timed`, a `Clock` takes the time of each task.
    """

    def __init__(self, pipeline: Pipeline, timed: bool):
        self._pipeline = pipeline
        self._clock = Clock() if timed else None
        self._done: dict[str, tf.Operation] = {}
        # Start and end of each task.
        self._times: dict[Task, list[tf.Tensor]] = {}

    def follow(self, before: "TaskOrder") -> None:
        """Makes each device start after its tasks of an earlier order."""
        self._done.update(before._done)

    @contextlib.contextmanager
    def task(
        self, task: Task, needs: Any = ()
    ) -> Iterator[Callable[..., None]]:
        """Scope in which operations are placed on a task's device, in its turn.

        Args:
            task: The task. Its operations wait for the device's previous task.
            needs: Nested structure of the tensors that the task takes from
                other devices. If tasks are timed, it starts when they are
                ready.

        Yields:
            Function to call with a nested structure of the task's results. The
            device's next task waits for these.
        """
        device = self._pipeline.stages[task.stage].device
        before: list = [self._done[device]] if device in self._done else []

        def finish(results: Any) -> None:
            if tf.executing_eagerly():
                return
            after = tensors(results)
            if self._clock is not None:
                after = [self._clock.stamp(after, device)]
                self._times[task] += after
            with tf.control_dependencies(after):
                self._done[device] = tf.no_op(name="done")

        with tf.device(device), tf.name_scope(str(task)):
            if self._clock is not None:
                if task not in self._times:
                    after = [*before, *tensors(needs)]
                    self._times[task] = [self._clock.stamp(after, device)]
                before = self._times[task][:1]
            with tf.control_dependencies(before):
                try:
                    yield finish
                except Exception as error:
                    if not getattr(error, "__notes__", ()):
                        error.add_note(
                            f"Raised in task {task} of stage {task.stage} on "
                            f"{device}."
                        )
                    raise

    def times(self) -> tf.Tensor | None:
        """Returns the times of tasks, or `None` if they are not timed.

        Float64 tensor of shape `(tasks, 2)`, a row for each of
        `Schedule.steps`: its start and its end, in seconds, by the clock of
        the host of its stage.
        """
        if not self._times:
            return None
        order = self._pipeline.steps()
        rows: list[int] = []
        parts = []
        for stage in self._pipeline.stages:
            own = [i for i, t in enumerate(order) if t.stage == stage.index]
            # Stacked, since each tensor from another host is a message.
            with tf.device(stage.device):
                parts.append(
                    tf.stack([x for i in own for x in self._times[order[i]]])
                )
            rows += own
        times = tf.reshape(tf.concat(parts, axis=0), (-1, 2))
        return tf.gather(times, tf.argsort(rows))


class Clock:
    """Time stamps that depend only on the operations they are taken after.

    TensorFlow chains operations with side effects, `tf.timestamp` among them,
    in program order, which would make a pipeline's devices wait for each
    other. It does not order a `FunctionCall`. The call is still marked as
    having side effects, so that TensorFlow neither evaluates it while it
    optimises the graph nor merges several calls into one.
    """

    def __init__(self) -> None:
        self._now = FunctionCall(tf.timestamp)
        self._marker = FunctionCall(_marker)
        self._now_after = FunctionCall(lambda zero: tf.timestamp() + zero)

    def stamp(
        self, after: Sequence[tf.Tensor | tf.Operation], device: str
    ) -> tf.Tensor:
        """Returns the time in seconds when all of `after` are computed.

        By the clock of the host of `device`. The caller must be in the scope
        of `device`.

        For TensorFlow an operation on a GPU is done once its kernels are
        queued. So the time is taken when a scalar that the GPU makes after
        these kernels has been copied to the host:

            GPU     kernels of `after` -> marker
                                            | copy
            host                            '-> timestamp
        """
        with tf.control_dependencies(list(after)):
            if tf.DeviceSpec.from_string(device).device_type != "GPU":
                return self._now()
            # A profile shows this name in the name scope of the task.
            marker = tf.abs(self._marker(), name="kernels_done")
        with tf.device("CPU:0"):
            return self._now_after(marker)


def _marker() -> tf.Tensor:
    """Returns a zero that constant folding cannot evaluate."""
    return tf.raw_ops.Empty(shape=[], dtype=tf.float64, init=True)
