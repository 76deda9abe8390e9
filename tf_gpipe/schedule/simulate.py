"""Simulation of a schedule: times of tasks, bubble, micro-batches kept.

This module imports no TensorFlow.
"""

import collections
import math
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import RECOMPUTE
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.schedule.tasks import Task
from tf_gpipe.schedule.tasks import check_remat

Costs = float | Sequence[float]
# Between two stages; see `simulate`.
Transfers = Costs | Mapping[tuple[int, int], float]


class Times(NamedTuple):
    """Durations of the tasks of each stage, in seconds or any other unit.

    Attributes:
        forward: List with the time of a micro-batch's forward pass.
        backward: List with the time of its whole backward pass.
        recompute: List with the time of the recomputation before that.
        weights: List with the part of `backward` for gradients of weights.
        transfer: Dictionary from pairs of stages to the time of a transfer.
        update: List with the time of the optimizer's update, once a step.

    Example:

    >>> Times.of(2, forward=[1, 2], backward=2).backward
    [2.0, 2.0]
    """

    forward: list[float]
    backward: list[float]
    recompute: list[float]
    weights: list[float]
    transfer: dict[tuple[int, int], float]
    update: list[float]

    @classmethod
    def of(
        cls,
        num_stages: int,
        forward: Costs = 1.0,
        backward: Costs = 2.0,
        recompute: Costs = 0.0,
        transfer: Transfers = 0.0,
        weights: Costs | None = None,
        update: Costs = 0.0,
    ) -> "Times":
        """Returns the `Times` for arguments as of `simulate`.

        Args:
            num_stages: Integer K.
            forward: Time of a forward pass; one for all stages, or a list.
            backward: As `forward`, of the whole backward pass.
            recompute: As `forward`, of the recomputation before it.
            transfer: Time from a stage to the next one; or a list, or a
                dictionary from pairs of stages.
            weights: As `forward`, the part of `backward` for gradients of
                weights. Defaults to half of it.
            update: As `forward`, of the optimizer's update.

        Returns:
            `Times`.

        Raises:
            ValueError: If there is a wrong number of them, or one is negative.
        """
        whole = _costs("backward", backward, num_stages)
        if weights is None:
            weights = [x / 2 for x in whole]
        times = cls(
            _costs("forward", forward, num_stages),
            whole,
            _costs("recompute", recompute, num_stages),
            _costs("weights", weights, num_stages),
            _transfers(transfer, num_stages),
            _costs("update", update, num_stages),
        )
        # Sums that are equal but for rounding are taken for equal.
        if any(
            part > whole and not math.isclose(part, whole)
            for part, whole in zip(times.weights, times.backward, strict=True)
        ):
            raise ValueError(
                "`weights` must be a part of `backward`, and at most as long. "
                f"Received: weights={times.weights}, "
                f"backward={times.backward}"
            )
        return times

    @property
    def by_inputs(self) -> list[float]:
        """The part of `backward` for gradients of inputs."""
        return [
            max(whole - part, 0.0)
            for whole, part in zip(self.backward, self.weights, strict=True)
        ]


class Span(NamedTuple):
    """When a device runs a task, in seconds or in any other unit.

    Attributes:
        device: Integer, the number of the device.
        task: The `Task`.
        start: Float.
        end: Float.
    """

    device: int
    task: Task
    start: float
    end: float


class Execution:
    """When the tasks of a step ran, simulated or measured.

    Args:
        spans: `Span`s, in any order, those of recomputation among them (kind
            `"R"`).
        devices: List with the name of each device. Defaults to `"device 0"`
            and so on, up to the last one with a span.
        in_seconds: Boolean, whether times are in seconds, and not in a unit
            that only says how long tasks are beside one another.

    Attributes:
        spans: List of the `Span`s by start.
        devices: List of the names.
        start: Float, when the first task starts.
        makespan: Float, the time from `start` to the end of the last task.
        busy: List with the time that each device works.
        bubble: Float, the share of the time that devices are idle.
        idle: Dictionary from each stage to the share of the time that its
            device is idle.
        peak_micro_batches: List with the largest number of micro-batches of
            which each stage keeps something at a time.

    Raises:
        ValueError: If there are no spans, or fewer names than devices.

    Example:

    >>> from tf_gpipe.schedule.tasks import Task
    >>> step = Execution(
    ...     [
    ...         Span(0, Task("F", 0, 0), start=0.0, end=1.0),
    ...         Span(0, Task("B", 0, 0), start=2.0, end=4.0),
    ...     ]
    ... )
    >>> step.makespan, step.bubble
    (4.0, 0.25)
    """

    def __init__(
        self,
        spans: Iterable[Span],
        devices: Sequence[str] | None = None,
        in_seconds: bool = False,
    ):
        self.spans = sorted(spans, key=lambda x: (x.start, x.device))
        if not self.spans:
            raise ValueError("A step has tasks. Received: spans=[]")
        count = 1 + max(span.device for span in self.spans)
        if devices is None:
            devices = [f"device {i}" for i in range(count)]
        if len(devices) < count:
            raise ValueError(
                f"`devices` must have a name for each of {count} devices. "
                f"Received: devices={devices}"
            )
        self.devices = list(devices)
        self.in_seconds = in_seconds
        self.start = self.spans[0].start
        self.makespan = max(span.end for span in self.spans) - self.start
        self.busy = [0.0] * len(self.devices)
        # Measured spans of a device may overlap: busy time counts once.
        until = [self.start] * len(self.devices)
        for device, _, start, end in self.spans:
            self.busy[device] += max(end - max(start, until[device]), 0.0)
            until[device] = max(end, until[device])
        whole = len(self.busy) * self.makespan
        # Rounded, so that a share such as 0.2 prints as 0.2.
        self.bubble = round(1 - sum(self.busy) / whole, 12) if whole else 0.0
        places = sorted({(x.task.stage, x.device) for x in self.spans})
        self.idle = {
            stage: 1 - self.busy[device] / self.makespan
            if self.makespan
            else 0.0
            for stage, device in places
        }
        # A stage keeps tensors of a micro-batch until its last task for it.
        split = {
            span.task._replace(kind=BACKWARD)
            for span in self.spans
            if span.task.kind == WEIGHTS
        }
        num_stages = 1 + max(span.task.stage for span in self.spans)
        kept, most = [0] * num_stages, [0] * num_stages
        for _, task, _, _ in self.spans:
            ends = task.kind == BACKWARD and task not in split
            kept[task.stage] += task.kind == FORWARD
            kept[task.stage] -= ends or task.kind == WEIGHTS
            most[task.stage] = max(most[task.stage], kept[task.stage])
        self.peak_micro_batches = most


def simulate(
    schedule: Schedule,
    forward: Costs = 1.0,
    backward: Costs = 2.0,
    recompute: Costs = 0.0,
    transfer: Transfers = 0.0,
    remat: str = "always",
    weights: Costs | None = None,
) -> Execution:
    """Simulates a schedule, given the times of tasks and transfers.

    A device runs its tasks in the schedule's order, each as soon as the tasks
    that it depends on are done and their results have arrived. A transfer takes
    time, but occupies no device. With equal stages and no transfers the bubble
    of `gpipe` and `1f1b` is `(K - 1) / (M + K - 1)` (Huang et al., 2019).

    Args:
        schedule: A `Schedule`.
        forward: Time of a micro-batch's forward pass; one for all stages, or
            a list with one per stage.
        backward: As `forward`, of the backward pass without recomputation.
        recompute: As `forward`, of the recomputation before a backward pass.
            Backward passes that are in `Schedule.direct` need none.
        transfer: Time from a stage to the next one, and back; one for all, or
            a list with one for each of the K - 1 boundaries; or a dictionary
            from pairs of stages, `(earlier, later)`, where connections skip
            stages. Between stages of the same device it is zero.
        remat: Which micro-batches are recomputed: `"always"`,
            `"except_last"` or `"never"`.
        weights: As `forward`, the part of `backward` that gradients of weights
            take, where they have a task of their own. Defaults to half of it.

    Returns:
        An `Execution`.

    Raises:
        ValueError: If there is a wrong number of costs, or one is negative,
            or `remat` is unknown.

    Example:

    >>> from tf_gpipe.schedule import schedules
    >>> simulate(schedules.get("gpipe", 4, 12)).bubble
    0.2
    """
    check_remat(remat)
    num_stages = schedule.num_stages
    times = Times.of(
        num_stages, forward, backward, recompute, transfer, weights
    )
    durations = {
        FORWARD: times.forward,
        RECOMPUTE: times.recompute,
        BACKWARD: times.backward,
        WEIGHTS: times.weights,
    }
    devices = schedule.devices
    # Transfers from other devices. By the task's kind and stage: the sending
    # stage and the time of the transfer.
    arriving: dict = collections.defaultdict(list)
    for (first, last), seconds in times.transfer.items():
        if devices[first] != devices[last]:
            arriving[FORWARD, last].append((first, seconds))
            arriving[BACKWARD, first].append((last, seconds))
    free = [0.0] * len(schedule.tasks)
    ends: dict[Task, float] = {}
    spans = []
    for task in schedule.steps(remat):
        device = devices[task.stage]
        start = max(
            [
                free[device],
                *(ends[other] for other in schedule.needs(task)),
                *(
                    ends[task._replace(stage=sender)] + seconds
                    for sender, seconds in arriving[task.kind, task.stage]
                ),
            ]
        )
        split = task in schedule.split
        costs = times.by_inputs if split else durations[task.kind]
        end = start + costs[task.stage]
        if task.kind != RECOMPUTE or end > start:
            spans.append(Span(device, task, start, end))
        free[device] = ends[task] = end
    return Execution(spans)


def _transfers(
    value: Transfers, num_stages: int
) -> dict[tuple[int, int], float]:
    """Returns the times of transfers by pairs of stages."""
    if not isinstance(value, Mapping):
        times = _costs("transfer", value, num_stages - 1)
        return {(k, k + 1): seconds for k, seconds in enumerate(times)}
    for first, last in value:
        if not 0 <= first < last < num_stages:
            raise ValueError(
                "`transfer` must be from an earlier to a later one of "
                f"{num_stages} stages. Received: {first} to {last}"
            )
    times = _costs("transfer", list(value.values()), len(value))
    return dict(zip(value, times, strict=True))


def _costs(name: str, value: Costs, count: int) -> list[float]:
    given = value if isinstance(value, Iterable) else [value] * count
    values = [float(x) for x in given]
    if len(values) != count:
        raise ValueError(
            f"`{name}` must be a number or a list of {count} numbers. "
            f"Received: {name}={value}"
        )
    if not all(x >= 0 for x in values):
        raise ValueError(
            f"`{name}` must not be negative. Received: {name}={value}"
        )
    return values
