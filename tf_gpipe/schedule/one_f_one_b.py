"""1F1B and the schedules that are made from its order.

This module imports no TensorFlow.
"""

import collections
import functools
import itertools
from collections.abc import Sequence

from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import WEIGHTS
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.schedule.tasks import Task


@functools.lru_cache(maxsize=8)
def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush, Narayanan et al., 2021).

    The bubble is that of GPipe, but stage k holds the activations of at most
    K-k micro-batches instead of M.
    """
    passes = [(0, m) for m in range(num_micro_batches)]
    return _alternating("1f1b", num_stages, passes, each=1)


@functools.lru_cache(maxsize=8)
def eager_one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with forward passes started earlier (Zhuang et al., 2023).

    Under 1F1B a stage waits, once per micro-batch, while an activation is sent
    to the next stage and the gradient back. Here the stage runs another
    micro-batch in that time, one for each stage after it: transfers overlap
    with computation. Stage k holds at most 2(K-k)-1 micro-batches.
    """
    passes = [(0, m) for m in range(num_micro_batches)]
    return _alternating("eager_1f1b", num_stages, passes, each=2)


@functools.lru_cache(maxsize=8)
def zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with split backward passes (Qi et al., 2024).

    A stage waits only for the gradients of the next stage's inputs. Gradients
    of weights are computed in what would be the bubble. If the forward pass and
    both halves of the backward pass take equally long, a third of the bubble is
    left with K micro-batches or more. With fewer, more is left, since the first
    and the last stage wait for each other. Stage k computes the gradients
    of its weights k micro-batches late, so that no stage keeps more than K
    micro-batches, as many as the first stage keeps under 1F1B.
    """
    return _splitting("zero_bubble", one_f_one_b(num_stages, num_micro_batches))


@functools.lru_cache(maxsize=8)
def eager_zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """`eager_1f1b` whose last backward passes are split.

    To split a backward pass takes time, since the gradients of weights read
    again what those of inputs have read. `zero_bubble` splits all. Here stage k
    splits its last 2k: the stages before it, which have nothing else to do by
    then, wait only for the gradients of inputs. With 4 K micro-batches or more
    most backward passes stay whole. Stage k holds at most 2K-1 micro-batches.
    """
    plain = eager_one_f_one_b(num_stages, num_micro_batches)
    rows = []
    for stage, tasks in enumerate(plain.tasks):
        first = num_micro_batches - 2 * stage
        late = [
            Task(WEIGHTS, stage, m)
            for m in range(max(first, 0), num_micro_batches)
        ]
        rows.append([*tasks, *late])
    return Schedule(rows, "eager_zero_bubble")


@functools.lru_cache(maxsize=8)
def interleaved(
    num_stages: int, num_micro_batches: int, num_devices: int
) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., 2021, section 2.2).

    Each device has V = `num_stages / num_devices` stages: stage s is on device
    s modulo D, the number of devices. A device then waits for a smaller part
    of the model at a time, so the bubble is (D-1)/(V M + D-1) for D
    micro-batches or more; activations are sent V times as often. For D=2, V=2,
    M=2, with time from left to right:

        device 0   F0.0 F0.1 F2.0 F2.1  .   B2.0  .   B2.1 B0.0 B0.1
        device 1    .   F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1  .

    Micro-batches go through the stages of a device in groups of D, or slightly
    larger groups if M is not a multiple of D.

    Raises:
        ValueError: If the number of stages is not a multiple of `num_devices`.
    """
    check_multiple("interleaved", num_stages, num_devices)
    chunks = num_stages // num_devices
    # A group of fewer than D would wait for its own first micro-batch, which
    # has to pass all devices before it comes to the next chunk.
    num_groups = max(1, num_micro_batches // num_devices)
    starts = [i * num_micro_batches // num_groups for i in range(num_groups)]
    groups = [
        range(first, last)
        for first, last in itertools.pairwise([*starts, num_micro_batches])
    ]
    passes = [
        (chunk, m) for group in groups for chunk in range(chunks) for m in group
    ]
    return _alternating(
        "interleaved",
        num_devices,
        passes,
        each=1 if chunks == 1 else 2,
        more=(chunks - 1) * max(map(len, groups)),
    )


@functools.lru_cache(maxsize=8)
def interleaved_zero_bubble(
    num_stages: int, num_micro_batches: int, num_devices: int
) -> Schedule:
    """`interleaved` with split backward passes, as in `zero_bubble`.

    If the forward pass and both halves of the backward pass take equally long,
    a third of the bubble is left with D micro-batches or more. No device keeps
    more than the first one does under `interleaved`.

    Raises:
        ValueError: If the number of stages is not a multiple of `num_devices`.
    """
    plain = interleaved(num_stages, num_micro_batches, num_devices)
    return _splitting("interleaved_zero_bubble", plain)


def _splitting(name: str, plain: Schedule) -> Schedule:
    """Returns a schedule with its backward passes split.

    Device d computes the gradients of weights d backward passes late.
    """
    rows = []
    for device, tasks in enumerate(plain.tasks):
        row: list[Task] = []
        late: collections.deque[Task] = collections.deque()
        for task in tasks:
            row.append(task)
            if task.kind == BACKWARD:
                late.append(task._replace(kind=WEIGHTS))
                if len(late) > device:
                    row.append(late.popleft())
        rows.append([*row, *late])
    return Schedule(rows, name)


def _alternating(
    name: str,
    num_devices: int,
    passes: Sequence[tuple[int, int]],
    each: int,
    more: int = 0,
) -> Schedule:
    """Returns a schedule of one forward, one backward, after a warm-up.

    Stage s is chunk s // D of device s % D.

    Args:
        name: Name of the schedule.
        num_devices: Integer D.
        passes: List of the chunk and the micro-batch of each forward pass of
            a device; backward passes go through the chunks in reverse.
        each: Integer, forward passes in a device's warm-up for each device
            after it.
        more: Integer, further forward passes in each device's warm-up.
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


def check_multiple(name: str, num_stages: int, num_devices: int) -> None:
    """Raises an error if stages cannot be spread evenly over the devices."""
    if num_stages % num_devices:
        raise ValueError(
            f"Schedule '{name}' needs `num_stages` to be a multiple of the "
            f"number of devices. Received: num_stages={num_stages}, "
            f"{num_devices} devices"
        )
