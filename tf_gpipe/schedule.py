"""Pipeline schedules as data: which device runs which task, in which order.

A schedule is executed by the engine, drawn and tested from the same list.
This module imports no TensorFlow.

Letters: K stages (k), M micro-batches (m). `F2.0` is the forward pass of
micro-batch 0 through stage 2, `B2.0` its backward pass. Where that is split,
`B2.0` has the gradients of the stage's inputs, which others wait for, and
`W2.0` those of its weights, for which nobody waits.
"""

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tf_gpipe.remat import recomputes

FORWARD = "F"
BACKWARD = "B"
WEIGHTS = "W"
RECOMPUTE = "R"


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
        if text[:1] not in (FORWARD, BACKWARD, WEIGHTS) or not (
            stage.isdecimal() and micro_batch.isdecimal()
        ):
            raise ValueError(
                "A task is written as `F`, `B` or `W`, the stage, a dot and "
                f"the micro-batch, as in 'F2.0'. Received: {text!r}"
            )
        return cls(text[0], int(stage), int(micro_batch))


class Schedule:
    """For each stage, the tasks that its device runs, in order.

    Args:
        tasks: One sequence of `Task`s (or of their texts, such as `"F2.0"`)
            for each device that runs a part of the pipeline. Every stage
            needs one forward and one backward task for every micro-batch, all
            of them in the same sequence. If there is one for weights, `"W"`,
            then backward passes are split, and all need one.
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
        self.splits = any(task.kind == WEIGHTS for task in flat)
        self._check_complete(flat)
        self.order = self._linearize()

    def _check_complete(self, flat: list[Task]) -> None:
        expected = {
            Task(kind, stage, micro_batch)
            for kind in (FORWARD, BACKWARD, WEIGHTS)[: 2 + self.splits]
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
                    "forward and one backward task a micro-batch, and one "
                    "for weights if any has."
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
        if task.kind == RECOMPUTE:
            return [task._replace(kind=FORWARD)]
        if task.kind == WEIGHTS:
            return [task._replace(kind=BACKWARD)]
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

    def recomputed_share(self, stage: int, remat: str) -> float:
        """Returns the share of micro-batches that a stage recomputes."""
        count = sum(
            self.recomputes(Task(BACKWARD, stage, m), remat)
            for m in range(self.num_micro_batches)
        )
        return count / self.num_micro_batches

    def steps(self, remat: str) -> list[Task]:
        """Returns the tasks of `order` and, in a remat mode, recomputations.

        Each comes before its backward task as a task of its own, which waits
        for no gradient: it fills the bubble where a device waits for one
        (Huang et al., 2019, section 2.3).
        """
        steps = []
        for task in self.order:
            if task.kind == BACKWARD and self.recomputes(task, remat):
                steps.append(task._replace(kind=RECOMPUTE))
            steps.append(task)
        return steps

    def get_config(self) -> dict:
        """Returns the arguments of `Schedule`, for saving."""
        return {
            "tasks": [[str(task) for task in row] for row in self.tasks],
            "name": self.name,
        }

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.tasks)
