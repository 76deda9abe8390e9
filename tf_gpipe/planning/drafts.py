"""A candidate placed on devices: its cut, its stages' times, its plan."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tf_gpipe.devices.functions import host
from tf_gpipe.partition.auto_remat import with_best_cut
from tf_gpipe.partition.contiguous import split
from tf_gpipe.partition.fitted_remat import AutoRemat
from tf_gpipe.partition.memory_limit import MemoryLimit
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.planning import cuts
from tf_gpipe.planning import speeds
from tf_gpipe.planning.candidates import Candidate
from tf_gpipe.planning.candidates import Choice
from tf_gpipe.planning.candidates import working
from tf_gpipe.planning.estimates import StageTimes
from tf_gpipe.planning.estimates import estimate
from tf_gpipe.planning.estimates import transfers
from tf_gpipe.planning.speeds import Speed
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import device_peaks
from tf_gpipe.schedule.memory import stage_peaks
from tf_gpipe.schedule.search import search
from tf_gpipe.schedule.simulate import Times
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage.graph import ranges

# The share of a device's memory that a plan may use; the rest is for workspaces
# of kernels and for fragmentation.
FITTING = 0.9
# With more calls, a cut for memory takes too long: a candidate whose cut for
# time does not fit is dropped.
_MOST_CALLS_CUT_FOR_MEMORY = 600


class Draft:
    """A candidate on given devices, its cut and the times of its stages.

    Args:
        layers: `KnownLayers`.
        times: `LayerTimes`.
        machine: `Machine`.
        candidate: `Candidate`.
        rows: List with a list of `Device`s for each replica.
        schedule: `Schedule`.
    """

    def __init__(self, layers, times, machine, candidate, rows, schedule):
        self._layers = layers
        self._machine = machine
        self.candidate = candidate
        self._rows = rows
        self._schedule = schedule
        # A stage's replicas wait for the slowest.
        self._speeds: list[Speed] = [
            min((x.speed for x in column), key=lambda x: x.flops)
            for column in zip(*rows, strict=True)
        ]
        self._memory: list[Any] = speeds.memories(rows)
        self._micro_batch = layers.micro_batch(
            candidate.num_micro_batches, candidate.num_replicas
        )
        self._seconds = [
            times.of(self._micro_batch, self._speeds[d])
            for d in schedule.devices
        ]

    def cut(self) -> bool:
        """Cuts the model, for time or else for memory.

        Returns:
            Boolean, whether a cut that fits was found.
        """
        schedule, remat = self._schedule, self.candidate.remat
        costs, sizes = self._layers.costs(self._micro_batch)
        again = np.array([x.differentiated for x in costs])
        shares = [
            schedule.recomputed_share(k, remat) * again
            for k in range(schedule.num_stages)
        ]
        whole = np.array(
            [
                x[0] + x[1] + share * x[0]
                for x, share in zip(self._seconds, shares, strict=True)
            ]
        )
        first = whole[0] if whole[0].any() else np.ones_like(whole[0])
        total = first.sum()
        sends = self._layers.graph.crossing(sizes.__getitem__)
        self.counts = split(
            first,
            schedule.num_stages,
            sends,
            [max(x.sum() / total, 1e-9) for x in whole],
        )
        self._estimate()
        if self._fits():
            return True
        n = len(self._layers.names)
        if n > _MOST_CALLS_CUT_FOR_MEMORY:
            return False
        most = max(x.temporary for x in costs)
        # First without room for tensors that live only during a backward pass,
        # as the peak of a device may come at another time; then with it.
        for spare in (0, most):
            counts = self._cut_for_memory(whole, sends, spare)
            if counts is None:
                return False
            self.counts = counts
            self._estimate()
            if self._fits():
                return True
        return False

    def _cut_for_memory(self, whole, sends, spare) -> list[int] | None:
        """Returns the fastest cut that leaves `spare` bytes free, or `None`.

        `whole` has the seconds of each call in each stage, `sends` the bytes
        that cross each place between two calls.
        """
        schedule, remat = self._schedule, self.candidate.remat
        costs, _ = self._layers.costs(self._micro_batch)
        each = [schedule.devices.count(d) for d in schedule.devices]
        stored, inputs = (
            stage_peaks(schedule, remat, [x] * schedule.num_stages)
            for x in (Sizes(0, 0, 1), Sizes(0, 1, 0, arriving=1))
        )
        rooms = []
        for k, device in enumerate(schedule.devices):
            memory = self._memory[device]
            rooms.append(
                cuts.Room(
                    math.inf
                    if memory is None
                    else (FITTING * memory - spare) / each[k],
                    stored[k],
                    inputs[k],
                )
            )
        return cuts.within(
            whole,
            self._layers.parameters.new,
            [x.stored_bytes + x.output_bytes for x in costs],
            [0, *sends],
            rooms,
        )

    def _estimate(self, decided: AutoRemat | None = None) -> None:
        """Computes bytes and times of the cut's stages and of their updates.

        Args:
            decided: `AutoRemat` with the recomputed calls. By default stages
                recompute all or nothing, as the remat mode says.
        """
        counts, machine = self.counts, self._machine
        self._recomputed = decided.parts if decided else None
        self._costs = (
            decided.costs
            if decided
            else self._layers.stages(counts, self._micro_batch)
        )
        parts = ranges(counts)
        forward, backward, weights = (
            [
                float(x[i, part].sum())
                for x, part in zip(self._seconds, parts, strict=True)
            ]
            for i in range(3)
        )
        start = [self._speeds[d].task for d in self._schedule.devices]
        # Gradients are as large as the activations that they are of.
        sent = [machine.handling * x for x in self._exchanged()]
        # Tasks of a backward pass.
        tasks = 1 + len(self._schedule.split) / (
            self._schedule.num_stages * self._schedule.num_micro_batches
        )
        self._stage_times = StageTimes(
            [x + s for x, s in zip(forward, start, strict=True)],
            [x + tasks * s for x, s in zip(backward, start, strict=True)],
            [
                min(x, y) + s
                for x, y, s in zip(weights, backward, start, strict=True)
            ],
            sent,
            transfers(self._costs, machine.bandwidth, machine.latency),
            *self._recomputation(forward, parts),
        )
        self._parameter_bytes = self._layers.parameters.of_stages(
            self.counts, self._schedule.devices
        )
        self._updates = self._update_seconds()
        busy = self._busy(self._schedule.num_micro_batches)
        copies = self.candidate.num_replicas
        slowdown = machine.slowdown(copies * working(busy))
        self._stage_times = self._stage_times.slower(slowdown)
        self._updates = [slowdown * x for x in self._updates]

    def _exchanged(self) -> list[int]:
        """Returns the bytes that each stage exchanges with other processes.

        With the stages there, for the forward pass of a micro-batch.
        """
        found = [0] * len(self._costs)
        where = [
            host(self._rows[0][device].name or "")
            for device in self._schedule.devices
        ]
        for k, stage in enumerate(self._costs):
            for to, size in stage.sends.items():
                if where[k] != where[to]:
                    found[k] += size
                    found[to] += size
        return found

    def _update_seconds(self) -> list[float]:
        """Returns the seconds of each stage's update, with its all-reduce.

        It reads and writes the stage's weights, gradients and slots.
        """
        machine, copies = self._machine, self.candidate.num_replicas
        found = []
        for device, size in zip(
            self._schedule.devices, self._parameter_bytes, strict=True
        ):
            seconds = 2 * size / self._speeds[device].memory
            if copies > 1:
                # All-reduce in a ring: each gradient is sent and received
                # 2(R-1)/R times. Gradients are about a third of the bytes.
                seconds += machine.latency * 2 * (copies - 1) + (
                    2 * (copies - 1) / copies * size / 3
                ) / (machine.bandwidth or self._speeds[device].memory)
            found.append(seconds)
        return found

    def _recomputation(self, forward, parts) -> tuple[list, list]:
        """Returns seconds recomputed before and within backward, by stage."""
        if self._recomputed is None:
            pairs = zip(forward, self._costs, strict=True)
            before = [x if cost.differentiated else 0.0 for x, cost in pairs]
            return before, [0.0] * len(forward)
        before, within = [], []
        for seconds, part, again in zip(
            self._seconds, parts, self._recomputed, strict=True
        ):
            own = seconds[0][part]
            taken = float(sum(own[list(x)].sum() for x in again))
            at_once = len(again) == 1
            before.append(taken if at_once else 0.0)
            within.append(0.0 if at_once else taken)
        return before, within

    @property
    def bound(self) -> float:
        """A lower bound of the step time: seconds of the busiest device."""
        return max(self._busy(self._schedule.num_micro_batches))

    def _busy(self, number: int) -> list[float]:
        """Returns the seconds of a step's tasks and updates on each device.

        Those of `number` micro-batches; with 0, of the updates alone.
        """
        busy = [0.0] * len(self._speeds)
        before = self._stage_times.before
        forward, backward = self._stage_times.passes()
        for k, device in enumerate(self._schedule.devices):
            again = self._schedule.recomputed_share(k, self.candidate.remat)
            busy[device] += self._updates[k] + number * (
                forward[k] + again * before[k] + backward[k]
            )
        return busy

    def _fits(self) -> bool:
        """Returns whether each device needs at most `FITTING` of its memory."""
        if all(x is None for x in self._memory):
            return True
        number = self._schedule.num_micro_batches
        pairs = zip(self._costs, self._parameter_bytes, strict=True)
        used = device_peaks(
            self._schedule,
            self.candidate.remat,
            [cost.of_micro_batches(number, own) for cost, own in pairs],
        )
        return all(
            memory is None or size <= FITTING * memory
            for size, memory in zip(used, self._memory, strict=True)
        )

    def choice(self) -> Choice:
        """Returns the `Choice`, with the plan of a simulated step."""
        plan = estimate(
            self._layers,
            self._costs,
            self.counts,
            self._schedule,
            self.candidate.remat,
            self._stage_times,
            self._recomputed,
        )
        auto = self.candidate.remat == AUTO_REMAT
        names = [[x.name for x in row] for row in self._rows]
        there = all(x is not None for row in names for x in row)
        alike = len(set(self._memory)) == 1
        copies = self.candidate.num_replicas
        passes = plan.step_seconds or 0.0
        seconds = passes + max(self._busy(0))
        return Choice(
            self.candidate,
            dataclasses.replace(
                plan,
                step_seconds=seconds,
                transfer_share=plan.transfer_share * passes / seconds
                if seconds
                else 0.0,
                relative_step_time=plan.relative_step_time / copies,
                device_memory=self._memory[0] if alike else self._memory,
                num_replicas=copies,
                memory_limit=self._limit if auto else None,
                batch_size=math.ceil(self._layers.rows / copies)
                if auto
                else None,
                device_names=(names if copies > 1 else names[0])
                if there
                else None,
            ),
        )

    @property
    def _limit(self) -> int:
        """The bytes that each device may use, if all have equal memory."""
        return int(FITTING * self._memory[0])

    def recomputing(self) -> Choice | None:
        """Returns the choice with `remat="auto"`, if one fits."""
        forward, backward, _ = self._seconds[0]
        fitted = functools.partial(
            self._layers.recomputation,
            self._micro_batch,
            self._schedule,
            MemoryLimit.of(self._limit),
        )
        work = list(zip(forward + backward, forward, strict=True))
        try:
            self.counts = with_best_cut(fitted(work)).counts
            # Models decide by FLOPs, as they know no times: plan what a model
            # with this cut will recompute.
            decided = fitted().with_counts(self.counts)
        except TooLittleMemoryError:
            return None
        self._estimate(decided)
        return self.choice() if self._fits() else None

    def searched(self, candidate: Candidate) -> Choice | None:
        """Returns the choice with a searched order of tasks, if one fits."""
        times = self._stage_times
        memory = self._memory[0]
        sizes = [
            cost.of_micro_batches(
                candidate.num_micro_batches, 0 if memory is None else own
            )
            for cost, own in zip(
                self._costs, self._parameter_bytes, strict=True
            )
        ]
        try:
            order: Schedule = search(
                Times.of(
                    len(sizes),
                    *times.passes(),
                    times.before,
                    times.transfer,
                    times.weights,
                    self._updates,
                ),
                candidate.num_micro_batches,
                candidate.num_devices,
                candidate.remat,
                sizes,
                None if memory is None else FITTING * memory,
            )
        except ValueError:
            return None
        # As the devices are alike, any of them may get any of the stages.
        self._schedule, self.candidate = order, candidate
        self._estimate()
        return self.choice() if self._fits() else None
