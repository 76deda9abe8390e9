"""List scheduling: each free device runs its most urgent ready task.

As Graham (1966), for split backward passes and with a limit on memory. This
module imports no TensorFlow.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.simulate import Times
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.schedule.tasks import Task


class Rules(NamedTuple):
    """Priorities between tasks that are ready.

    Attributes:
        devices: List with the device of each stage.
        forward: List with the wished start of micro-batch 0's forward pass in
            each stage. That of each next micro-batch is a period later. The
            task with the earliest wished start is the most urgent.
        backward: As `forward`, of the backward passes.
        patience: How long a device waits for a task that will soon be ready,
            before it runs a task for weights: as a share of the time of that.
    """

    devices: Sequence[int]
    forward: Sequence[float]
    backward: Sequence[float]
    patience: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """The tasks to be ordered, their times and the limit on memory.

    Attributes:
        times: `Times` of the stages.
        num_micro_batches: Integer M.
        num_devices: Integer D.
        remat: The remat mode.
        sizes: List with the `Sizes` of each stage.
        memory: The memory of a device, in the unit of `sizes`.
    """

    times: Times
    num_micro_batches: int
    num_devices: int
    remat: str
    sizes: Sequence[Sizes]
    memory: float

    @property
    def num_stages(self) -> int:
        return len(self.sizes)

    def work(self, devices: Sequence[int]) -> list[float]:
        """Returns the time that each device works on one micro-batch."""
        found = [0.0] * self.num_devices
        for stage, device in enumerate(devices):
            found[device] += (
                self.times.forward[stage] + self.times.backward[stage]
            )
        return found

    def recomputes(self, stage: int, micro_batch: int) -> bool:
        """Returns whether a stage recomputes a micro-batch.

        The last stage does not, unless `remat` is "auto": its backward pass
        follows the forward pass at once.
        """
        return self.remat == AUTO_REMAT or (
            self.remat != "never"
            and stage < self.num_stages - 1
            and (
                self.remat == "always"
                or micro_batch < self.num_micro_batches - 1
            )
        )


class _Stage:
    """A stage, with its costs and the progress of its tasks."""

    def __init__(self, index: int, problem: Problem, rules: Rules):
        times, size = problem.times, problem.sizes[index]
        count = problem.num_micro_batches
        self.index = index
        self.last = index == problem.num_stages - 1
        # Whether backward follows forward at once, so that nothing is
        # recomputed.
        self.direct = self.last and problem.remat != "never"
        self.recomputed = [problem.recomputes(index, m) for m in range(count)]
        self.forward = times.forward[index]
        self.weights = times.weights[index]
        self.inputs = times.backward[index] - self.weights
        self.recompute = times.recompute[index]
        self.urgent = rules.forward[index], rules.backward[index]
        self.size = size
        # Memory that a forward pass leaves, at most, and that a backward pass
        # adds.
        self.keeps = max(map(size.left, self.recomputed))
        self.adds = size.temporary + (size.added if any(self.recomputed) else 0)
        # Numbers of forward, backward and weights tasks that have run.
        self.done = [0, 0, 0]
        # By micro-batch: when the inputs of the task are ready.
        first = 0.0 if index == 0 else math.inf
        self.can_forward = [first] * count
        self.can_backward = [math.inf] * count


def listed(
    problem: Problem, rules: Rules, limit: float = math.inf
) -> tuple[float, list[list[Task]]]:
    """Returns the time of a step, and the tasks of each device in order.

    Infinity, and no tasks, if the step takes `limit` or longer, or needs more
    than the memory.
    """
    run = _Run(problem, rules)
    end = run.to_the_end(limit)
    return end, run.rows if end < math.inf else []


class _Run:
    """An event simulation of a step, which orders the tasks as it goes."""

    def __init__(self, problem: Problem, rules: Rules):
        self.problem, self.rules = problem, rules
        self.stages = [
            _Stage(k, problem, rules) for k in range(problem.num_stages)
        ]
        self.period = max(problem.work(rules.devices))
        count = problem.num_devices
        self.own: list[list[_Stage]] = [[] for _ in range(count)]
        for stage, device in zip(self.stages, rules.devices, strict=True):
            self.own[device].append(stage)
        self.held = [
            sum(
                x.size.fixed + x.size.waiting(x.index, rules.devices)
                for x in own
            )
            for own in self.own
        ]
        self.room = [problem.memory] * count
        # Memory that must be free before a forward pass: for it, for forward
        # passes of later stages on its device, and for a backward pass.
        # Otherwise devices could wait for each other for ever.
        self.reserve: list[float] = []
        for stage, device in zip(self.stages, rules.devices, strict=True):
            own = self.own[device]
            later = sum(x.keeps for x in own if x.index >= stage.index)
            self.reserve.append(later + max(x.adds for x in own))
        self.rows: list[list[Task]] = [[] for _ in range(count)]
        self.free = [0.0] * count
        # By device: the time of its stages' updates, after all tasks.
        self.update = [
            sum(problem.times.update[x.index] for x in own) for own in self.own
        ]
        # By device: the time of the tasks left. Without recomputation, for
        # which a device may use the time when it waits.
        work = zip(problem.work(rules.devices), self.update, strict=True)
        self.todo = [
            problem.num_micro_batches * tasks + update for tasks, update in work
        ]
        # A heap of times when a device should look for a task; each time once.
        self.wakes = [(0.0, device) for device in range(count)]
        self.planned = set(self.wakes)
        # For each stage, pairs of a stage on another device that sends to it,
        # activations or gradients, and the time of the transfer.
        self.ahead: list[list] = [[] for _ in self.stages]
        self.behind: list[list] = [[] for _ in self.stages]
        for (a, b), seconds in problem.times.transfer.items():
            if rules.devices[a] != rules.devices[b]:
                self.ahead[b].append((a, seconds))
                self.behind[a].append((b, seconds))
        self.ends: list[list[list[float]]] = [
            [[0.0] * problem.num_micro_batches for _ in self.stages]
            for _ in range(2)
        ]

    def to_the_end(self, limit: float) -> float:
        problem, free = self.problem, self.free
        left = 3 * problem.num_stages * problem.num_micro_batches
        while self.wakes:
            now, device = heapq.heappop(self.wakes)
            self.planned.remove((now, device))
            if free[device] > now:
                continue
            ran = self._run(now, device)
            left -= ran
            if ran:
                end = free[device]
                if end + self.todo[device] >= limit:
                    return math.inf
                self._wake(end, device)
        if left:
            return math.inf
        return max(map(sum, zip(free, self.update, strict=True)))

    def _run(self, now: float, device: int) -> int:
        """Runs the most urgent task of a device, if any is ready.

        Returns the number of tasks run: 2 if a backward task follows at once.
        """
        least, best, kind = math.inf, None, 0
        coming = math.inf
        room = self.room[device] - self.held[device]
        count, period = self.problem.num_micro_batches, self.period
        for stage in self.own[device]:
            forward, backward, _ = stage.done
            if backward < forward:
                ready = stage.can_backward[backward]
                if stage.recomputed[backward]:
                    ready -= stage.recompute
                if ready > now:
                    coming = min(coming, ready)
                elif stage.adds <= room:
                    urgency = backward * period + stage.urgent[1]
                    if urgency < least:
                        least, best, kind = urgency, stage, 1
            if forward < count and self.reserve[stage.index] <= room:
                ready = stage.can_forward[forward]
                if ready > now:
                    coming = min(coming, ready)
                else:
                    urgency = forward * period + stage.urgent[0]
                    if urgency < least:
                        least, best, kind = urgency, stage, 0
        if best is None:
            for stage in self.own[device]:
                m = stage.done[2]
                if m < stage.done[1]:
                    urgency = m * period + stage.urgent[1]
                    if urgency < least:
                        least, best, kind = urgency, stage, 2
            if best is None:
                if coming < math.inf:
                    self._wake(coming, device)
                return 0
            if coming < now + self.rules.patience * best.weights:
                self._wake(coming, device)
                return 0
        if kind == 2:
            self._weights(now, device, best)
            return 1
        if kind == 1:
            self._backward(now, device, best)
            return 1
        self._forward(now, device, best)
        if best.direct:
            self._backward(self.free[device], device, best)
            return 2
        return 1

    def _forward(self, now: float, device: int, stage: _Stage) -> None:
        m = stage.done[0]
        stage.done[0] += 1
        self.held[device] += stage.size.left(stage.recomputed[m])
        end = self._ran(FORWARD, stage, m, device, now, stage.forward)
        if stage.last:
            stage.can_backward[m] = end
            return
        following = self.stages[stage.index + 1]
        ends = self.ends[0]
        ends[stage.index][m] = end
        for sender, seconds in self.ahead[following.index]:
            end = max(end, ends[sender][m] + seconds)
        following.can_forward[m] = end
        self._wake(end, self.rules.devices[following.index])

    def _backward(self, now: float, device: int, stage: _Stage) -> None:
        m = stage.done[1]
        stage.done[1] += 1
        if stage.recomputed[m]:
            now = max(now + stage.recompute, stage.can_backward[m])
            self.held[device] += stage.size.added
        end = self._ran(BACKWARD, stage, m, device, now, stage.inputs)
        if not stage.index:
            return
        following = self.stages[stage.index - 1]
        ends = self.ends[1]
        ends[stage.index][m] = end
        for sender, seconds in self.behind[following.index]:
            end = max(end, ends[sender][m] + seconds)
        following.can_backward[m] = end
        self._wake(end, self.rules.devices[following.index])

    def _weights(self, now: float, device: int, stage: _Stage) -> None:
        m = stage.done[2]
        stage.done[2] += 1
        recomputed = stage.recomputed[m]
        self.held[device] -= stage.size.left(recomputed)
        self.held[device] -= stage.size.added if recomputed else 0
        self.held[device] += stage.size.slices
        self._ran(WEIGHTS, stage, m, device, now, stage.weights)

    def _ran(
        self,
        kind: str,
        stage: _Stage,
        m: int,
        device: int,
        start: float,
        seconds: float,
    ) -> float:
        """Records a task, and returns when it ends."""
        self.rows[device].append(Task(kind, stage.index, m))
        self.todo[device] -= seconds
        self.free[device] = end = start + seconds
        return end

    def _wake(self, time: float, device: int) -> None:
        if (time, device) not in self.planned:
            self.planned.add((time, device))
            heapq.heappush(self.wakes, (time, device))
