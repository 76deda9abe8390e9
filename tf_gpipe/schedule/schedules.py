"""The schedules that have names; `docs/how_it_works.md` has pictures of most.

This module imports no TensorFlow.
"""

import functools
import itertools
from collections.abc import Sequence

from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.schedule.tasks import Task

# More take hours to trace.
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


@functools.lru_cache(maxsize=8)
def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush, Narayanan et al., 2021).

    The bubble of GPipe, but stage k holds the activations of at most K-k
    micro-batches instead of M.
    """
    passes = [(0, m) for m in range(num_micro_batches)]
    return _alternating("1f1b", num_stages, passes, each=1)


@functools.lru_cache(maxsize=8)
def eager_one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with forward passes started earlier (Zhuang et al., 2023).

    Under 1F1B a stage waits while an activation is on its way to the next one
    and the gradient on its way back, once a micro-batch. Here the stage runs
    another micro-batch meanwhile, one for each stage behind it: transfers
    overlap with computation. Stage k holds at most 2(K-k)-1 micro-batches.
    """
    passes = [(0, m) for m in range(num_micro_batches)]
    return _alternating("eager_1f1b", num_stages, passes, each=2)


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

    Raises:
        ValueError: If the number of stages or of micro-batches is not a
            multiple of `num_devices`.
    """
    _check_multiple("num_stages", num_stages, num_devices)
    _check_multiple("num_micro_batches", num_micro_batches, num_devices)
    chunks = num_stages // num_devices
    # Micro-batches go through a chunk in groups of D.
    passes = [
        (chunk, group + m)
        for group in range(0, num_micro_batches, num_devices)
        for chunk in range(chunks)
        for m in range(num_devices)
    ]
    return _alternating(
        "interleaved",
        num_devices,
        passes,
        each=1 if chunks == 1 else 2,
        more=(chunks - 1) * num_devices,
    )


@functools.lru_cache(maxsize=8)
def zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with split backward passes (Qi et al., 2024).

    A stage waits only for the gradients of the next stage's inputs. The
    gradients of weights are computed in what would be the bubble. A third of
    the bubble is left where the forward pass and the two halves of the backward
    pass take equally long. Stage k computes the gradients of its weights k
    micro-batches late, so that no stage keeps more than K micro-batches, the
    number that the first stage keeps under 1F1B.
    """
    rows = []
    for k, tasks in enumerate(one_f_one_b(num_stages, num_micro_batches).tasks):
        weights = iter([Task(WEIGHTS, k, m) for m in range(num_micro_batches)])
        row = []
        for task in tasks:
            row.append(task)
            if task.kind == BACKWARD and task.micro_batch >= k:
                row.append(next(weights))
        rows.append([*row, *weights])
    return Schedule(rows, name="zero_bubble")


def _alternating(
    name: str,
    num_devices: int,
    passes: Sequence[tuple[int, int]],
    each: int,
    more: int = 0,
) -> Schedule:
    """Returns one forward, one backward, after some forward passes.

    Stage s is the chunk s // D of device s % D.

    Args:
        passes: List of the chunk and the micro-batch of each forward pass of
            a device; backward passes go through the chunks the other way.
        each: Integer, the passes that a device starts with for each device
            behind it; `more` come on top.
    """
    last = max(chunk for chunk, _ in passes)
    rows = []
    for device in range(num_devices):
        forward = [
            Task(FORWARD, chunk * num_devices + device, m)
            for chunk, m in passes
        ]
        backward = [
            Task(BACKWARD, (last - chunk) * num_devices + device, m)
            for chunk, m in passes
        ]
        first = more + each * (num_devices - device - 1)
        row = forward[:first]
        for pair in itertools.zip_longest(forward[first:], backward):
            row += filter(None, pair)
        rows.append(row)
    return Schedule(rows, name)


_BY_NAME = {
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
    "gpipe": gpipe,
    "zero_bubble": zero_bubble,
}
NAMES = tuple(sorted([*_BY_NAME, "interleaved"]))


def get(
    schedule: str | Schedule,
    num_stages: int,
    num_micro_batches: int,
    num_devices: int | None = None,
) -> Schedule:
    """Returns the schedule of a name, or checks a given one.

    `num_devices` is for `"interleaved"`, and defaults to one a stage.

    Raises:
        ValueError: If the name is unknown, or the schedule is not possible
            with these numbers.
    """
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
    if isinstance(schedule, str) and schedule == "interleaved":
        return interleaved(
            num_stages, num_micro_batches, num_devices or num_stages
        )
    if isinstance(schedule, str) and schedule in _BY_NAME:
        return _BY_NAME[schedule](num_stages, num_micro_batches)
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


def most_rows(num_stages: int) -> int:
    """Returns how many rows there may be with a micro-batch for each."""
    return max(1, min(MOST_MICRO_BATCHES, _MOST_PASSES // num_stages))


def num_with_rows(
    schedule: str | Schedule,
    num_micro_batches: int,
    rows: int,
    num_devices: int,
) -> int:
    """Returns how many micro-batches are cut from that many rows.

    At most one a row; of `"interleaved"` a multiple of the number of devices.
    A `Schedule` has as many as it lists.

    Raises:
        ValueError: If the schedule is not possible with so many.
    """
    if isinstance(schedule, Schedule):
        return num_micro_batches
    number = min(num_micro_batches, max(rows, 1))
    if schedule == "interleaved":
        _check_multiple("num_micro_batches", num_micro_batches, num_devices)
        number = -(-number // num_devices) * num_devices
    return number


def _check_multiple(name: str, value: int, num_devices: int) -> None:
    if value % num_devices:
        raise ValueError(
            f"Schedule 'interleaved' needs `{name}` to be a multiple of "
            f"the number of devices. Received: {name}={value}, "
            f"{num_devices} devices"
        )
