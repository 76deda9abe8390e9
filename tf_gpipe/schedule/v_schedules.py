"""Schedules whose stages go down the devices and back up: ZB-V, V-Half, V-Min.

This module imports no TensorFlow.
"""

import functools
from collections.abc import Sequence

from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.schedule.tasks import Task
from tf_gpipe.schedule.tasks import needs

# Time units per micro-batch: a device has six tasks, F, B and W of two stages.
_PERIOD = 6


@functools.lru_cache(maxsize=8)
def zb_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-V (Qi et al., 2024, arXiv:2401.10241): stages in the shape of a V.

    D devices have two stages each, s and 2D-1-s, so that the first and the last
    stage share device 0, and backward passes are split. If all tasks take one
    unit of time and there are D micro-batches or more, a device waits for D-1
    units beside its 6M tasks. It keeps the activations of 2D passes through a
    stage, as many as 1F1B's first device. Between steps in one graph, with 2D
    micro-batches and four devices or more, no device waits.
    """
    num_devices = num_stages // 2
    return _v_schedule(
        "zb_v",
        num_stages,
        num_micro_batches,
        legs=(3, 3, 3, 3),
        turns=(0, 0, 0),
        most=2 * num_devices,
        # Forward passes may run ahead as far as `most` allows: a device that
        # has not waited at the beginning is done earlier, and may start the
        # next step.
        ahead=(_PERIOD * num_devices, _PERIOD),
    )


@functools.lru_cache(maxsize=8)
def v_half(num_stages: int, num_micro_batches: int) -> Schedule:
    """V-Half (Qi et al., 2024, arXiv:2405.15362): down to half the activations.

    Stages are placed as in `zb_v`. A device keeps the activations of D+2 passes
    through a stage, where `zb_v` keeps 2D. It waits for 3D-7 units of time, or
    3D-6 if D is odd, with at least three devices and as many micro-batches.
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
    """V-Min (Qi et al., 2024, arXiv:2405.15362): down to a third of them.

    Stages are placed as in `zb_v`. A device waits for 4D-5 units of time, and
    much longer if tasks do not take equally long.
    """
    num_devices = num_stages // 2
    return _v_schedule(
        "v_min",
        num_stages,
        num_micro_batches,
        legs=(1, 1, 1, 1),
        # Otherwise a device would have two tasks at the same time.
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
    """Returns a schedule that repeats one pattern for each micro-batch.

    Every micro-batch passes the devices in the same way, six units of time
    after the one before (Qi et al., 2024, arXiv:2405.15362, section 3): down
    and up, and so again for the backward pass. That gives each device an order
    of its tasks. If the next task is not ready, the device runs one of the
    tasks after it that is, or computes gradients of weights.

    Args:
        name: Name of the schedule.
        num_stages: Integer, 2D.
        num_micro_batches: Integer M.
        legs: Units of time from a device to the next one: forward down, forward
            up, backward down, backward up. The smaller they are, the fewer
            micro-batches are in progress.
        turns: Units of time that a micro-batch waits between these four.
        most: Integer, passes through a stage whose activations a device may
            keep.
        ahead: Units of time by which a forward or backward pass may be brought
            forward, before a task that is not ready.
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
        # The tasks that devices run in this unit of time, given those done.
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
            # The last stage's backward task follows its forward task at once:
            # nothing is recomputed.
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
                and done.issuperset(needs(task, num_stages))
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
    """Returns the start of the first micro-batch's tasks in the pattern.

    By kind and stage, in units of time.
    """
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
