"""Schedules that go down the devices and back up: ZB-V, V-Half, V-Min.

This module imports no TensorFlow.
"""

import functools
from collections.abc import Sequence

from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.schedule.tasks import Task

# A device has six tasks a micro-batch: F, B and W of two stages.
_PERIOD = 6


@functools.lru_cache(maxsize=8)
def zb_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-V (Qi et al., 2024, arXiv:2401.10241): stages in the shape of a V.

    D devices have two stages each, s and 2D-1-s, so that the first and the
    last stage share device 0, and backward passes are split. Where all tasks
    take equally long and there are D micro-batches or more, a device waits for
    D-1 of its 6M tasks alone, and keeps the activations of 2D stages, which
    are as many as 1F1B's first device keeps. Between steps that stand
    in one graph, of 2D micro-batches and four devices or more, none waits.
    """
    num_devices = num_stages // 2
    return _v_schedule(
        "zb_v",
        num_stages,
        num_micro_batches,
        legs=(3, 3, 3, 3),
        turns=(0, 0, 0),
        most=2 * num_devices,
        # As far as the activations go: a device that has not waited at the
        # beginning is done earlier, and may begin the next step.
        ahead=(_PERIOD * num_devices, _PERIOD),
    )


@functools.lru_cache(maxsize=8)
def v_half(num_stages: int, num_micro_batches: int) -> Schedule:
    """V-Half (Qi et al., 2024, arXiv:2405.15362): about half the activations.

    Stages are where `zb_v` has them. A device keeps D+2 activations of stages
    where `zb_v` keeps 2D, and waits for 3D-7 tasks, or 3D-6 where D
    is odd, of at least three devices and as many micro-batches.
    """
    num_devices = num_stages // 2
    return _v_schedule(
        "v_half",
        num_stages,
        num_micro_batches,
        legs=(1, 2, 1, 2),
        turns=(1, 4, 1),
        ahead=(4, 3),
        most=num_devices + 2,
    )


@functools.lru_cache(maxsize=8)
def v_min(num_stages: int, num_micro_batches: int) -> Schedule:
    """V-Min (Qi et al., 2024, arXiv:2405.15362): about a third of them.

    Stages are where `zb_v` has them. A device waits for 4D-5 tasks, and for
    many more where tasks do not take equally long.
    """
    num_devices = num_stages // 2
    return _v_schedule(
        "v_min",
        num_stages,
        num_micro_batches,
        legs=(1, 1, 1, 1),
        # Else a device would have two tasks at a time.
        turns=(0, int(num_devices % 3 == 0), 0),
        most=2 * ((num_devices + 1) // 3) + 2,
    )


def _v_schedule(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    legs: Sequence[int],
    turns: Sequence[int],
    most: int,
    ahead: tuple[int, int] = (2, _PERIOD),
) -> Schedule:
    """Returns a schedule in which each micro-batch follows the one before.

    A micro-batch takes the same way six units of time after the one before
    (Qi et al., 2024, arXiv:2405.15362, section 3): down the devices, up, and
    so again for the backward pass. That gives each device an order of its
    tasks. Where it would wait, it runs one of the next tasks that is ready,
    or the gradients of weights.

    Args:
        legs: The units of time from a device to the next one, on the way down
            and up, and down and up again. The smaller they are, the fewer
            micro-batches are on their way.
        turns: The units between them for which a micro-batch waits.
        most: Integer, the activations of stages that a device keeps.
        ahead: The units of time for which a forward or a backward pass may be
            ahead of the device's next task, where that has to wait.
    """
    num_devices = num_stages // 2
    way = _way(num_stages, legs, turns)
    stages = [(d, num_stages - 1 - d) for d in range(num_devices)]
    counts = dict.fromkeys(
        [
            (x, s)
            for x in (FORWARD, BACKWARD, WEIGHTS)
            for s in range(num_stages)
        ],
        0,
    )
    rows: list[list[Task]] = [[] for _ in stages]
    held = [0] * num_devices
    done: set[Task] = set()
    while len(done) < len(counts) * num_micro_batches:
        # What all devices do in a unit of time, given what is done by then.
        started: dict[int, Task] = {}
        for device, own in enumerate(stages):
            left = [
                (way[kind, stage] + _PERIOD * count, Task(kind, stage, count))
                for kind in (FORWARD, BACKWARD)
                for stage in own
                for count in [counts[kind, stage]]
                if count < num_micro_batches
            ]
            weights = [
                (
                    way[BACKWARD, stage] + _PERIOD * count,
                    Task(WEIGHTS, stage, count),
                )
                for stage in own
                for count in [counts[WEIGHTS, stage]]
                if count < counts[BACKWARD, stage]
            ]
            # The last stage goes backward at once: nothing is recomputed.
            if rows[device] and rows[device][-1][:2] == (
                FORWARD,
                num_stages - 1,
            ):
                left = [(0, rows[device][-1]._replace(kind=BACKWARD))]
            ready = [
                (time, task)
                for time, task in left
                if time <= min(left)[0] + ahead[task.kind == BACKWARD]
                and (task.kind == BACKWARD or held[device] < most)
                and done.issuperset(_needs(task, num_stages))
            ]
            if ready or weights:
                started[device] = min(ready or weights)[1]
        for device, task in started.items():
            done.add(task)
            rows[device].append(task)
            counts[task.kind, task.stage] += 1
            held[device] += (task.kind == FORWARD) - (task.kind == WEIGHTS)
    return Schedule(rows, name)


def _way(
    num_stages: int, legs: Sequence[int], turns: Sequence[int]
) -> dict[tuple[str, int], int]:
    """Returns when the first micro-batch is in each stage, on time."""
    half = num_stages // 2
    down, up = range(half), range(half, num_stages)
    time, way = 0, {}
    for (kind, part), leg, turn in zip(
        [
            (FORWARD, down),
            (FORWARD, up),
            (BACKWARD, reversed(up)),
            (BACKWARD, reversed(down)),
        ],
        legs,
        (*turns, 0),
        strict=True,
    ):
        for stage in part:
            way[kind, stage] = time
            time += leg
        time += 1 + turn - leg
    return way


def _needs(task: Task, num_stages: int) -> list[Task]:
    """Returns what a forward or backward task needs; see `Schedule.needs`."""
    if task.kind == FORWARD:
        return [task._replace(stage=task.stage - 1)] if task.stage else []
    if task.stage == num_stages - 1:
        return [task._replace(kind=FORWARD)]
    return [task._replace(stage=task.stage + 1)]
