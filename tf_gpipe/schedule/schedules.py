"""Schedules by their names; `docs/how_it_works.md` has pictures of most.

This module imports no TensorFlow.
"""

import functools
from typing import Any

from tf_gpipe.schedule.one_f_one_b import check_multiple
from tf_gpipe.schedule.one_f_one_b import eager_one_f_one_b
from tf_gpipe.schedule.one_f_one_b import eager_zero_bubble
from tf_gpipe.schedule.one_f_one_b import interleaved
from tf_gpipe.schedule.one_f_one_b import interleaved_zero_bubble
from tf_gpipe.schedule.one_f_one_b import one_f_one_b
from tf_gpipe.schedule.one_f_one_b import zero_bubble
from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.schedule.tasks import Task
from tf_gpipe.schedule.v_schedules import v_half
from tf_gpipe.schedule.v_schedules import v_min
from tf_gpipe.schedule.v_schedules import zb_v

# Limits of micro-batches, and of passes (micro-batches times stages): more take
# hours to trace.
MOST_MICRO_BATCHES = 4096
_MOST_PASSES = 2**18


@functools.lru_cache(maxsize=8)
def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al., 2019)."""
    micro_batches = range(num_micro_batches)
    return Schedule(
        [
            [Task(FORWARD, k, m) for m in micro_batches]
            + [Task(BACKWARD, k, m) for m in reversed(micro_batches)]
            for k in range(num_stages)
        ],
        name="gpipe",
    )


_BY_NAME = {
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
    "eager_zero_bubble": eager_zero_bubble,
    "gpipe": gpipe,
    "v_half": v_half,
    "v_min": v_min,
    "zb_v": zb_v,
    "zero_bubble": zero_bubble,
}
_BY_DEVICES = {
    "interleaved": interleaved,
    "interleaved_zero_bubble": interleaved_zero_bubble,
}
# The order is searched for, given the costs of the stages; see `search`.
AUTO = "auto"
# Schedules with any number of stages per device, and those with two.
ANY_STAGES_A_DEVICE = (AUTO, *_BY_DEVICES)
TWO_STAGES_A_DEVICE = ("v_half", "v_min", "zb_v")
NAMES = tuple(sorted([AUTO, *_BY_NAME, *_BY_DEVICES]))


def neighbouring(
    num_stages: int, num_micro_batches: int, num_devices: int
) -> Schedule:
    """1F1B of devices that have several neighbouring stages each."""
    _check_limits(num_stages, num_micro_batches)
    each = num_stages // num_devices
    merged = one_f_one_b(num_devices, num_micro_batches)
    rows = []
    for row in merged.tasks:
        rows.append(
            [
                task._replace(stage=each * task.stage + i)
                for task in row
                for i in (
                    range(each)
                    if task.kind == FORWARD
                    else reversed(range(each))
                )
            ]
        )
    return Schedule(rows, "1f1b")


def num_devices_of(
    schedule: str | Schedule, num_stages: int, num_devices: int | None = None
) -> int:
    """Returns the number of devices of a schedule.

    Args:
        schedule: A name, or a `Schedule`.
        num_stages: Integer.
        num_devices: Integer, devices for `"auto"` and interleaved schedules;
            for others the number follows from the stages. Defaults to one per
            stage.

    Raises:
        ValueError: If the number of stages is odd but the schedule has two per
            device, or if it must be a multiple of `num_devices` and is not.
    """
    if isinstance(schedule, Schedule):
        return len(schedule.tasks)
    if schedule in ANY_STAGES_A_DEVICE:
        count = min(num_devices or num_stages, num_stages)
        check_multiple(schedule, num_stages, count)
        return count
    if schedule not in TWO_STAGES_A_DEVICE:
        return num_stages
    if num_stages % 2:
        raise ValueError(
            f"Schedule '{schedule}' has two stages on each device, s and "
            "2D-1-s of D devices: `num_stages` must be even. Received: "
            f"num_stages={num_stages}"
        )
    return num_stages // 2


def check_name(schedule: Any) -> None:
    """Raises a ValueError if this is neither a name nor a `Schedule`."""
    if not isinstance(schedule, Schedule) and (
        not isinstance(schedule, str) or schedule not in NAMES
    ):
        raise ValueError(
            f"`schedule` must be one of {list(NAMES)} or a "
            f"`tf_gpipe.Schedule`. Received: schedule={schedule!r}"
        )


def get(
    schedule: str | Schedule,
    num_stages: int,
    num_micro_batches: int,
    num_devices: int | None = None,
) -> Schedule:
    """Returns the schedule of a name, or checks a given one.

    Args:
        schedule: Name of a schedule, such as `"1f1b"`; but not `"auto"`, whose
            order depends on the costs of the stages: see `search`. Or a
            `Schedule`.
        num_stages: Integer K.
        num_micro_batches: Integer M.
        num_devices: Integer, devices for interleaved schedules. Defaults to one
            per stage.

    Returns:
        A `Schedule`.

    Raises:
        ValueError: If the name is unknown, or the schedule is not possible
            with these numbers.

    Example:

    >>> from tf_gpipe.schedule import schedules
    >>> print(schedules.get("1f1b", num_stages=2, num_micro_batches=2))
    F0.0 F0.1 B0.0 B0.1
    F1.0 B1.0 F1.1 B1.1
    """
    _check_limits(num_stages, num_micro_batches)
    check_name(schedule)
    if isinstance(schedule, Schedule):
        _check_numbers(schedule, num_stages, num_micro_batches)
        return schedule
    if schedule == AUTO:
        raise ValueError(
            "The order of schedule 'auto' depends on the costs of the stages."
        )
    count = num_devices_of(schedule, num_stages, num_devices)
    if schedule in _BY_DEVICES:
        return _BY_DEVICES[schedule](num_stages, num_micro_batches, count)
    if schedule in TWO_STAGES_A_DEVICE and num_devices not in (None, count):
        raise ValueError(
            f"Schedule '{schedule}' has two stages on each device: "
            "`num_stages` must be twice the number of devices. Received: "
            f"num_stages={num_stages}, {num_devices} devices"
        )
    return _BY_NAME[schedule](num_stages, num_micro_batches)


def _check_limits(num_stages: int, num_micro_batches: int) -> None:
    if num_micro_batches > MOST_MICRO_BATCHES:
        raise ValueError(
            f"`num_micro_batches` must be at most {MOST_MICRO_BATCHES}, since "
            "the tasks of each micro-batch are traced. More than a mini-batch "
            "has rows are as many as it has rows. Received: "
            f"num_micro_batches={num_micro_batches}"
        )
    if num_stages * num_micro_batches > _MOST_PASSES:
        raise ValueError(
            f"There must be at most {_MOST_PASSES} passes of a micro-batch "
            "through a stage. Received: "
            f"num_stages={num_stages}, num_micro_batches={num_micro_batches}"
        )


def _check_numbers(
    schedule: Schedule, num_stages: int, num_micro_batches: int
) -> None:
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


def most_rows(num_stages: int) -> int:
    """Returns the most rows that may have a micro-batch each."""
    return max(1, min(MOST_MICRO_BATCHES, _MOST_PASSES // num_stages))


def num_with_rows(
    schedule: str | Schedule,
    num_micro_batches: int,
    rows: int,
) -> int:
    """Returns the number of micro-batches for a mini-batch of so many rows.

    At most one per row; but a `Schedule` has a fixed number.
    """
    if isinstance(schedule, Schedule):
        return num_micro_batches
    return min(num_micro_batches, max(rows, 1))
