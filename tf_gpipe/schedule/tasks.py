"""Tasks and schedules: which device runs which task, in which order.

The engine executes a schedule, and it is drawn and tested, from the same list.
This module imports no TensorFlow.

Letters: K stages (k), M micro-batches (m). `F2.0` is the forward pass of
micro-batch 0 through stage 2, `B2.0` its backward pass. If that is split,
`B2.0` computes the gradients of the stage's inputs, which another stage waits
for, and `W2.0` those of its weights, which no other task waits for.
"""

import collections
import itertools
import re
import statistics
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from tf_gpipe import checks

FORWARD = "F"
BACKWARD = "B"
WEIGHTS = "W"
RECOMPUTE = "R"

# Modes that choose micro-batches, for which all layers are recomputed.
REMAT_MODES = ("always", "except_last", "never")
# How many tasks an error names.
_SHOWN = 10
# All micro-batches, but in each stage only as many layers as memory requires.
AUTO_REMAT = "auto"


def check_remat(mode: str) -> None:
    """Raises a ValueError if there is no such remat mode."""
    checks.one_of("remat", mode, (*REMAT_MODES, AUTO_REMAT))


class Task(NamedTuple):
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: `"F"` (forward), `"B"` (backward), `"W"` (gradients of weights,
            where backward passes are split) or `"R"` (recomputation).
        stage: Integer, the number of the stage, from 0.
        micro_batch: Integer, the number of the micro-batch, from 0.

    Example:

    >>> from tf_gpipe.schedule.tasks import Task
    >>> str(Task("F", stage=2, micro_batch=0))
    'F2.0'
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Returns the task that `str` writes as a text.

        Args:
            text: String, such as `"F2.0"`.

        Returns:
            A `Task`.

        Raises:
            ValueError: If it is no text of a task.
        """
        match = re.fullmatch(r"([FBW])(\d+)\.(\d+)", text)
        if match is None:
            raise ValueError(
                "A task is written as `F`, `B` or `W`, the stage, a dot and "
                f"the micro-batch, as in 'F2.0'. Received: {text!r}"
            )
        kind, stage, micro_batch = match.groups()
        return cls(kind, int(stage), int(micro_batch))


class Schedule:
    """For each device, the tasks that it runs, in order.

    Args:
        tasks: One sequence of `Task`s (or of their texts, such as `"F2.0"`)
            for each device that runs a part of the pipeline. Every stage
            needs one forward and one backward task for every micro-batch, all
            of them in the same sequence. A backward pass that has a task for
            gradients of weights, `"W"`, too, is split.
        name: String, shown in summaries.
        description: String, shown after it.

    Attributes:
        tasks: Tuple with a tuple of `Task`s for each device.
        num_stages: Integer K.
        num_micro_batches: Integer M.
        devices: List with the number of the device of each stage.
        split: Set of the backward tasks that are split.
        order: Tuple of all tasks, in an order that every device can follow.
        direct: Set of the backward tasks that come right after their forward
            task, so that nothing is recomputed for them.
        forwards_first: Boolean, whether the last stage has all outputs of a
            mini-batch before its first backward task.

    Raises:
        TypeError: If `tasks` is no list of lists of tasks, or `name` or
            `description` no string.
        ValueError: If a task is missing or there twice, if a stage is spread
            over two sequences, or if the order can never finish because each
            device waits for another one.

    Example:

    >>> print(tf_gpipe.Schedule([["F0.0", "F0.1", "B0.1", "B0.0"]]))
    F0.0 F0.1 B0.1 B0.0
    """

    def __init__(
        self,
        tasks: Sequence[Sequence[Task | str]],
        name: str = "custom",
        description: str = "",
    ):
        for argument, text in (("name", name), ("description", description)):
            if not isinstance(text, str):
                raise TypeError(
                    f"`{argument}` must be a string. Received: "
                    f"{argument}={text!r}"
                )
        self.name = name
        self.description = description
        self.tasks = _parsed(tasks)
        flat = [task for row in self.tasks for task in row]
        if not flat:
            raise ValueError(f"Schedule '{name}' has no tasks.")
        self.num_stages = 1 + max(task.stage for task in flat)
        self.num_micro_batches = 1 + max(task.micro_batch for task in flat)
        self.split = frozenset(
            task._replace(kind=BACKWARD)
            for task in flat
            if task.kind == WEIGHTS
        )
        self._check_complete(flat)
        homes: dict[int, int] = {}
        for i, row in enumerate(self.tasks):
            for task in row:
                if homes.setdefault(task.stage, i) != i:
                    raise ValueError(
                        f"Schedule '{name}' runs stage {task.stage} in "
                        f"rows {homes[task.stage]} and {i} (task {task}). A "
                        "stage lives on one device."
                    )
        self.devices = [homes[stage] for stage in range(self.num_stages)]
        self.order = self._linearize()
        # Whether the last stage runs all forward tasks before any other.
        last = [t for t in self.order if t.stage == self.num_stages - 1]
        self.forwards_first = all(
            t.kind == FORWARD for t in last[: self.num_micro_batches]
        )
        # Backward tasks that come right after their forward task, as in the
        # last stage: its activations are still in memory, so that nothing is
        # recomputed. There are none if the loss of several micro-batches is
        # computed between the two.
        mixed = not self.forwards_first or self.num_micro_batches == 1
        self.direct = frozenset(
            following
            for task, following in itertools.pairwise(self.order)
            if mixed and following == task._replace(kind=BACKWARD)
        )

    def of_first(self, num_micro_batches: int) -> "Schedule":
        """Returns the same order, of the first micro-batches alone.

        Args:
            num_micro_batches: Integer, how many.

        Returns:
            A `Schedule`.
        """
        return Schedule(
            [
                [task for task in row if task.micro_batch < num_micro_batches]
                for row in self.tasks
            ],
            self.name,
            self.description,
        )

    def _check_complete(self, flat: list[Task]) -> None:
        """Raises an error if a task is missing or repeated."""
        counts = collections.Counter(flat)
        # One after another: a wrong number may make these billions.
        expected = (
            Task(kind, stage, micro_batch)
            for kind in (BACKWARD, FORWARD)
            for stage in range(self.num_stages)
            for micro_batch in range(self.num_micro_batches)
        )
        for problem, tasks in (
            ("lacks", (task for task in expected if task not in counts)),
            ("repeats", (task for task in sorted(counts) if counts[task] > 1)),
        ):
            first = [str(x) for x in itertools.islice(tasks, _SHOWN + 1)]
            if first:
                more = ", ..." if first[_SHOWN:] else ""
                raise ValueError(
                    f"Schedule '{self.name}' for {self.num_stages} stages and "
                    f"{self.num_micro_batches} micro-batches {problem} "
                    f"{', '.join(first[:_SHOWN])}{more}. Every stage needs "
                    "one forward and one backward task a micro-batch, and may "
                    "have one for weights."
                )

    def needs(self, task: Task) -> list[Task]:
        """Returns the tasks whose results a task uses.

        Args:
            task: A `Task`.

        Returns:
            List of `Task`s.
        """
        return needs(task, self.num_stages)

    def _linearize(self) -> tuple[Task, ...]:
        """Returns one order of all tasks, each after those that it needs.

        Raises:
            ValueError: If there is none.
        """
        done: dict[Task, None] = {}  # in order

        def missing(task: Task) -> list[Task]:
            return [other for other in self.needs(task) if other not in done]

        rows = [collections.deque(row) for row in self.tasks]
        while any(rows):
            before = len(done)
            for row in rows:
                if not row or missing(row[0]):
                    continue
                task = row.popleft()
                done[task] = None
                # A backward task directly after its forward task on a device
                # stays so in this order: see `direct`.
                backward = task._replace(kind=BACKWARD)
                if row and row[0] == backward and not missing(backward):
                    done[row.popleft()] = None
            if len(done) == before:
                waiting = [
                    f"{row[0]} waits for {', '.join(map(str, missing(row[0])))}"
                    for row in rows
                    if row
                ]
                raise ValueError(
                    f"Schedule '{self.name}' can never finish: "
                    f"{'; '.join(waiting)}."
                )
        return tuple(done)

    def recomputes(self, task: Task, remat: str, at_once: bool = True) -> bool:
        """Returns whether a backward task recomputes, in a remat mode.

        Args:
            task: A `Task` of kind `"B"`.
            remat: `"always"`, `"except_last"`, `"auto"` or `"never"`.
            at_once: Boolean, whether tasks run in the order of the schedule,
                and not all backward tasks later, as for a tape.

        Returns:
            Boolean.
        """
        if remat == AUTO_REMAT:
            # Even right after the forward task: to recompute some layers at a
            # time needs less memory than to keep all activations.
            return True
        if remat == "never" or (at_once and task in self.direct):
            return False
        is_last = task.micro_batch == self.num_micro_batches - 1
        return remat == "always" or not is_last

    def recomputed_share(self, stage: int, remat: str) -> float:
        """Returns the share of micro-batches that a stage recomputes.

        Args:
            stage: Integer, the number of the stage.
            remat: `"always"`, `"except_last"` or `"never"`.

        Returns:
            Float from 0 to 1.
        """
        return statistics.mean(
            self.recomputes(Task(BACKWARD, stage, m), remat)
            for m in range(self.num_micro_batches)
        )

    def steps(self, remat: str, at_once: bool = True) -> list[Task]:
        """Returns the tasks of `order` and, in a remat mode, recomputations.

        Each comes before its backward task as a task of its own, which waits
        for no gradient: it fills the bubble where a device waits for one
        (Huang et al., 2019, section 2.3).

        Args:
            remat: `"always"`, `"except_last"` or `"never"`.
            at_once: Boolean, as for `recomputes`.

        Returns:
            List of `Task`s.
        """
        steps = []
        for task in self.order:
            if task.kind == BACKWARD and self.recomputes(task, remat, at_once):
                steps.append(task._replace(kind=RECOMPUTE))
            steps.append(task)
        return steps

    @property
    def title(self) -> str:
        """The name, and the description if there is one."""
        return ": ".join(filter(None, (self.name, self.description)))

    def get_config(self) -> dict:
        """Returns the arguments of `Schedule`, for saving."""
        return {
            "tasks": [[str(task) for task in row] for row in self.tasks],
            "name": self.name,
            "description": self.description,
        }

    @property
    def _content(self) -> tuple:
        return self.tasks, self.name, self.description

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.tasks)


def needs(task: Task, num_stages: int) -> list[Task]:
    """Returns the tasks whose results a task uses, as `Schedule.needs`."""
    if task.kind == FORWARD:
        return [task._replace(stage=task.stage - 1)] if task.stage else []
    if task.kind == RECOMPUTE:
        return [task._replace(kind=FORWARD)]
    if task.kind == WEIGHTS:
        return [task._replace(kind=BACKWARD)]
    found = [task._replace(kind=FORWARD)]
    if task.stage + 1 < num_stages:
        found.append(task._replace(stage=task.stage + 1))
    return found


def _parsed(tasks: Any) -> tuple[tuple[Task, ...], ...]:
    try:
        return tuple(
            tuple(_task(task) for task in checks.items(row, "no list"))
            for row in checks.items(tasks, "no list")
        )
    except TypeError as error:
        raise TypeError(
            "`tasks` must be a list of lists of tasks, one a device, such as "
            f"[['F0.0', 'B0.0']]. Received: tasks={tasks!r}"
        ) from error


def _task(task: Any) -> Task:
    if isinstance(task, str):
        return Task.parse(task)
    if isinstance(task, tuple) and len(task) == 3:
        return Task.parse("{}{}.{}".format(*task))
    raise TypeError(f"no task: {task!r}")
