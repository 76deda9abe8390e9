"""The schedules that have names.

This module imports no TensorFlow.
"""

import functools
import itertools

from tf_gpipe.schedule import BACKWARD
from tf_gpipe.schedule import FORWARD
from tf_gpipe.schedule import WEIGHTS
from tf_gpipe.schedule import Schedule
from tf_gpipe.schedule import Task


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
    rows = [
        _one_stage(k, num_micro_batches, num_stages - k - 1)
        for k in range(num_stages)
    ]
    return Schedule(rows, name="1f1b")


@functools.lru_cache(maxsize=8)
def eager_one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with forward passes started earlier (Zhuang et al., 2023).

    Under 1F1B a stage waits while an activation is on its way to the next one
    and the gradient on its way back, once a micro-batch. Here it has another
    micro-batch to run meanwhile, for each stage behind it: transfers overlap
    with computation. Stage k holds at most 2(K-k)-1 micro-batches. For K=3,
    M=4:

        stage 0   F0 F1 F2 F3  . B0  . B1  . B2  . B3
        stage 1    . F0 F1 F2 B0 F3 B1  . B2  . B3  .
        stage 2    .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

    Args:
        num_stages: Integer K.
        num_micro_batches: Integer M.

    Returns:
        A `Schedule`.
    """
    rows = [
        _one_stage(k, num_micro_batches, 2 * (num_stages - k - 1))
        for k in range(num_stages)
    ]
    return Schedule(rows, name="eager_1f1b")


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
        rows.append(
            _alternating(
                [forward(i) for i in range(total)],
                [backward(i) for i in range(total)],
                warmup,
            )
        )
    return Schedule(rows, name="interleaved")


@functools.lru_cache(maxsize=8)
def zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with split backward passes (Qi et al., 2024).

    A stage waits for the gradients of the next one's inputs alone. Those of
    weights fill the bubble, of which a third is left where forward and both
    halves of the backward pass take as long as each other. Stage k computes
    those of weights k micro-batches late, so that no stage keeps more than K
    micro-batches, as the first one does under 1F1B. For K=3, M=4:

        stage 0   F0 F1 F2  .  . B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1    . F0 F1  . B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2    .  . F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Args:
        num_stages: Integer K.
        num_micro_batches: Integer M.

    Returns:
        A `Schedule`.
    """
    rows = []
    for k in range(num_stages):
        row = []
        for task in one_f_one_b(num_stages, num_micro_batches).tasks[k]:
            row.append(task)
            m = task.micro_batch - k
            if task.kind == BACKWARD and m >= 0:
                row.append(Task(WEIGHTS, k, m))
        late = range(max(num_micro_batches - k, 0), num_micro_batches)
        rows.append(row + [Task(WEIGHTS, k, m) for m in late])
    return Schedule(rows, name="zero_bubble")


def _one_stage(k: int, num_micro_batches: int, warmup: int) -> list[Task]:
    """Returns the tasks of stage `k` under 1F1B."""
    return _alternating(
        [Task(FORWARD, k, m) for m in range(num_micro_batches)],
        [Task(BACKWARD, k, m) for m in range(num_micro_batches)],
        warmup,
    )


def _alternating(
    forward: list[Task], backward: list[Task], warmup: int
) -> list[Task]:
    """Returns `warmup` forward tasks, then one forward, one backward."""
    row = forward[:warmup]
    for pair in itertools.zip_longest(forward[warmup:], backward):
        row += [task for task in pair if task is not None]
    return row


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
    if schedule == "interleaved":
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
