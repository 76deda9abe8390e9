"""Pipeline schedules as data: which device runs which task, in which order.

A schedule is executed by the engine, drawn and tested from the same list.
This module imports no TensorFlow.

Letters: K stages (k), M micro-batches (m). `F2.0` is the forward pass of
micro-batch 0 through stage 2, `B2.0` its backward pass.
"""

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tf_gpipe.remat import recomputes

FORWARD = "F"
BACKWARD = "B"


class Task(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Returns the task that `str` writes as `text`, such as `"F2.0"`."""
        stage, _, micro_batch = text[1:].partition(".")
        if text[:1] not in (FORWARD, BACKWARD) or not (
            stage.isdecimal() and micro_batch.isdecimal()
        ):
            raise ValueError(
                "A task is written as `F` or `B`, the stage, a dot and the "
                f"micro-batch, as in 'F2.0'. Received: {text!r}"
            )
        return cls(text[0], int(stage), int(micro_batch))


class Schedule:
    """For each stage, the tasks that its device runs, in order.

    Args:
        tasks: One sequence of `Task`s (or of their texts, such as `"F2.0"`)
            for each device that runs a part of the pipeline. Every stage
            needs one forward and one backward task for every micro-batch, all
            of them in the same sequence.
        name: String, shown in summaries.

    Raises:
        ValueError: If a task is missing or there twice, if a stage is spread
            over two sequences, or if the order can never finish because each
            device waits for another one.

    Example:

    >>> print(tf_gpipe.Schedule([["F0.0", "F0.1", "B0.1", "B0.0"]]))
    F0.0 F0.1 B0.1 B0.0
    """

    def __init__(
        self, tasks: Sequence[Sequence[Task | str]], name: str = "custom"
    ):
        self.name = name
        self.tasks = tuple(
            tuple(
                Task.parse(task) if isinstance(task, str) else task
                for task in row
            )
            for row in tasks
        )
        flat = [task for row in self.tasks for task in row]
        if not flat:
            raise ValueError(f"Schedule '{name}' has no tasks.")
        self.num_stages = 1 + max(task.stage for task in flat)
        self.num_micro_batches = 1 + max(task.micro_batch for task in flat)
        self._check_complete(flat)
        self.order = self._linearize()

    def _check_complete(self, flat: list[Task]) -> None:
        expected = {
            Task(kind, stage, micro_batch)
            for kind in (FORWARD, BACKWARD)
            for stage in range(self.num_stages)
            for micro_batch in range(self.num_micro_batches)
        }
        missing = sorted(expected - set(flat))
        counts = collections.Counter(flat)
        twice = sorted(task for task, n in counts.items() if n > 1)
        unknown = sorted(set(flat) - expected)
        for problem, tasks in (
            ("lacks", missing),
            ("repeats", twice),
            ("has unknown", unknown),
        ):
            if tasks:
                raise ValueError(
                    f"Schedule '{self.name}' for {self.num_stages} stages and "
                    f"{self.num_micro_batches} micro-batches {problem} "
                    f"{', '.join(map(str, tasks))}. Every stage needs one "
                    "forward and one backward task a micro-batch."
                )
        home: dict[int, int] = {}
        for i, row in enumerate(self.tasks):
            for task in row:
                if home.setdefault(task.stage, i) != i:
                    raise ValueError(
                        f"Schedule '{self.name}' runs stage {task.stage} in "
                        f"rows {home[task.stage]} and {i} (task {task}). A "
                        "stage lives on one device."
                    )

    def needs(self, task: Task) -> list[Task]:
        """Returns the tasks whose results `task` uses."""
        if task.kind == FORWARD:
            return [task._replace(stage=task.stage - 1)] if task.stage else []
        needs = [task._replace(kind=FORWARD)]
        if task.stage + 1 < self.num_stages:
            needs.append(task._replace(stage=task.stage + 1))
        return needs

    def _linearize(self) -> tuple[Task, ...]:
        """Returns one order of all tasks that every device can follow."""
        order: list[Task] = []
        done: set[Task] = set()
        position = [0] * len(self.tasks)
        while len(done) < sum(map(len, self.tasks)):
            progress = False
            for i, row in enumerate(self.tasks):
                turns = True
                while (
                    turns
                    and position[i] < len(row)
                    and done.issuperset(self.needs(row[position[i]]))
                ):
                    task = row[position[i]]
                    order.append(task)
                    done.add(task)
                    position[i] += 1
                    progress = True
                    # Nothing comes between the last stage's two passes.
                    turns = task[:2] == (FORWARD, self.num_stages - 1) and row[
                        position[i] : position[i] + 1
                    ] == (task._replace(kind=BACKWARD),)
            if not progress:
                waiting = [
                    f"{row[i]} waits for "
                    + ", ".join(
                        str(t) for t in self.needs(row[i]) if t not in done
                    )
                    for row, i in zip(self.tasks, position, strict=True)
                    if i < len(row)
                ]
                raise ValueError(
                    f"Schedule '{self.name}' can never finish: "
                    f"{'; '.join(waiting)}."
                )
        return tuple(order)

    @property
    def devices(self) -> list[int]:
        """The number of the device (the row in `tasks`) of each stage."""
        devices = {t.stage: i for i, row in enumerate(self.tasks) for t in row}
        return [devices[stage] for stage in range(self.num_stages)]

    @property
    def forwards_first(self) -> bool:
        """Whether the last stage has every output before it goes backward."""
        last = [t for t in self.order if t.stage == self.num_stages - 1]
        return all(t.kind == FORWARD for t in last[: self.num_micro_batches])

    @functools.cached_property
    def direct(self) -> frozenset[Task]:
        """The backward tasks of the last stage right after their forward task.

        What the forward pass has computed is still there: nothing needs to be
        recomputed. None, where the loss of the whole mini-batch comes between.
        """
        last = self.num_stages - 1
        row = self.tasks[self.devices[last]]
        if self.forwards_first:
            return frozenset()
        return frozenset(
            following
            for task, following in itertools.pairwise(row)
            if task.stage == last and following == task._replace(kind=BACKWARD)
        )

    def recomputes(self, task: Task, remat: str) -> bool:
        """Returns whether a backward task recomputes, in a remat mode."""
        return task not in self.direct and recomputes(
            remat, task.micro_batch, self.num_micro_batches
        )

    def get_config(self) -> dict:
        """Returns the arguments of `Schedule`, for saving."""
        return {
            "tasks": [[str(task) for task in row] for row in self.tasks],
            "name": self.name,
        }

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.tasks)


@functools.lru_cache(maxsize=8)
def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al., 2019).

    For K=3, M=4, with a task's micro-batch in its place on the clock:

        stage 0   F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0
        stage 1    . F0 F1 F2 F3  .  . B3 B2 B1 B0  .
        stage 2    .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .

    Args:
        num_stages: Integer K.
        num_micro_batches: Integer M.

    Returns:
        A `Schedule`.
    """
    micro_batches = range(num_micro_batches)
    return Schedule(
        [
            [Task(FORWARD, k, m) for m in micro_batches]
            + [Task(BACKWARD, k, m) for m in reversed(micro_batches)]
            for k in range(num_stages)
        ],
        name="gpipe",
    )


@functools.lru_cache(maxsize=8)
def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush, Narayanan et al., 2021).

    The bubble of GPipe, but stage k holds the activations of at most K-k
    micro-batches instead of M. For K=3, M=4:

        stage 0   F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1    . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        stage 2    .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

    Args:
        num_stages: Integer K.
        num_micro_batches: Integer M.

    Returns:
        A `Schedule`.
    """
    rows = []
    for k in range(num_stages):
        warmup = min(num_stages - k - 1, num_micro_batches)
        row = [Task(FORWARD, k, m) for m in range(warmup)]
        for m in range(num_micro_batches):
            if m + warmup < num_micro_batches:
                row.append(Task(FORWARD, k, m + warmup))
            row.append(Task(BACKWARD, k, m))
        rows.append(row)
    return Schedule(rows, name="1f1b")


@functools.lru_cache(maxsize=8)
def interleaved(
    num_stages: int, num_micro_batches: int, num_devices: int
) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., 2021, section 2.2).

    Each device has V = `num_stages / num_devices` stages: stage s is on device
    s modulo D, the number of devices. A device then waits for a smaller part
    of the model at a time, so the bubble is (D-1)/(V M + D-1); activations
    travel V times as often. For D=2, V=2, M=2, with a task's stage and
    micro-batch in its place on the clock:

        device 0   F0.0 F0.1 F2.0 F2.1  .   B2.0  .   B2.1 B0.0 B0.1
        device 1    .   F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1  .

    Args:
        num_stages: Integer, the stages of all devices.
        num_micro_batches: Integer M, a multiple of `num_devices`.
        num_devices: Integer D, of which `num_stages` is a multiple.

    Returns:
        A `Schedule`.

    Raises:
        ValueError: If a number is not a multiple of `num_devices`.
    """
    for name, value in (
        ("num_stages", num_stages),
        ("num_micro_batches", num_micro_batches),
    ):
        if value % num_devices:
            raise ValueError(
                f"Schedule 'interleaved' needs `{name}` to be a multiple of "
                f"the number of devices. Received: {name}={value}, "
                f"{num_devices} devices"
            )
    chunks = num_stages // num_devices
    total = num_micro_batches * chunks

    def place(i: int) -> tuple[int, int]:
        """Returns the chunk and the micro-batch of a device's i-th pass.

        Micro-batches go through a chunk in groups of D.
        """
        group, rest = divmod(i, num_devices * chunks)
        chunk, m = divmod(rest, num_devices)
        return chunk, group * num_devices + m

    rows = []
    for device in range(num_devices):

        def forward(i: int, device=device) -> Task:
            chunk, m = place(i)
            return Task(FORWARD, chunk * num_devices + device, m)

        def backward(i: int, device=device) -> Task:
            chunk, m = place(i)
            chunk = chunks - 1 - chunk
            return Task(BACKWARD, chunk * num_devices + device, m)

        if chunks == 1:
            warmup = num_devices - device - 1
        else:
            warmup = (chunks - 1) * num_devices + 2 * (num_devices - device - 1)
        warmup = min(warmup, total)
        row = [forward(i) for i in range(warmup)]
        for i in range(total):
            if i + warmup < total:
                row.append(forward(i + warmup))
            row.append(backward(i))
        rows.append(row)
    return Schedule(rows, name="interleaved")


NAMES = ("1f1b", "gpipe", "interleaved")


def get(
    schedule: str | Schedule,
    num_stages: int,
    num_micro_batches: int,
    num_devices: int | None = None,
) -> Schedule:
    """Returns the schedule of a name, or checks a given one.

    Args:
        schedule: One of `NAMES`, or a `Schedule`.
        num_stages: Integer, the stages that the schedule must have.
        num_micro_batches: Integer M that the schedule must have.
        num_devices: Integer, over which `"interleaved"` spreads the stages.
            Defaults to one a stage.

    Returns:
        A `Schedule` for `num_stages` and `num_micro_batches`.

    Raises:
        ValueError: If the name is unknown, or the schedule is not possible
            with these numbers.
    """
    if schedule == "gpipe":
        return gpipe(num_stages, num_micro_batches)
    if schedule == "1f1b":
        return one_f_one_b(num_stages, num_micro_batches)
    if schedule == "interleaved":
        return interleaved(
            num_stages, num_micro_batches, num_devices or num_stages
        )
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"`schedule` must be one of {list(NAMES)} or a "
            f"`tf_gpipe.Schedule`. Received: schedule={schedule!r}"
        )
    if (schedule.num_stages, schedule.num_micro_batches) != (
        num_stages,
        num_micro_batches,
    ):
        raise ValueError(
            f"Schedule '{schedule.name}' is for {schedule.num_stages} stages "
            f"and {schedule.num_micro_batches} micro-batches, but the model "
            f"has num_stages={num_stages} and "
            f"num_micro_batches={num_micro_batches}."
        )
    return schedule
