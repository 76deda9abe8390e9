"""`"auto"`: an order of tasks, searched for what the stages cost.

This module imports no TensorFlow.
"""

import itertools
import math
import random
from collections.abc import Sequence

from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.listing import Problem
from tf_gpipe.schedule.listing import Rules
from tf_gpipe.schedule.listing import listed
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import device_peaks
from tf_gpipe.schedule.simulate import Times
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.tasks import Schedule

# How many orders are tried, and how many tasks they have together, at most.
_NUM_ORDERS = 2_000
_NUM_TASKS = 300_000
# How many changes are thought of for each order that is tried.
_NUM_CHANGES = 10
# How much longer a changed order may be, at first.
_WORSE = 0.01
# How urgent a micro-batch is that has gone far, to start with, beside the one
# before it: the more, the more are on their way.
_STRETCHES = (0.0, 1.0, 2.0, 3.0, 5.0)
_PATIENCES = (0.0, 0.15, 0.3, 0.5, 0.7, 1.0)


def search(
    times: Times,
    num_micro_batches: int,
    num_devices: int,
    remat: str = "always",
    sizes: Sequence[Sizes] | None = None,
    memory: float | None = None,
) -> Schedule:
    """Returns the shortest order of tasks that is found, named `"auto"`.

    It tries, of all orders that keep within the memory: the named schedules of
    as many stages and devices; 1F1B with neighbouring stages on a device; and
    orders in which a device that is free runs the most urgent task that is
    ready, a forward pass only where memory is left for what follows, and the
    gradients of weights where it would wait otherwise. It then changes at
    random how urgent tasks are and which stages share a device, and keeps a
    change where the step gets hardly longer. Backward passes are split; each
    device has `num_stages / num_devices` stages. The same arguments give the
    same order.

    Args:
        times: `Times` of the stages.
        num_micro_batches: Integer M.
        num_devices: Integer D, of which the number of stages is a multiple.
        remat: The remat mode.
        sizes: `Sizes` of each stage. Defaults to stages that keep equally
            much of each micro-batch.
        memory: What a device may hold at a time, in the unit of `sizes`.
            Defaults to what the fullest device holds under 1F1B with
            neighbouring stages on a device.

    Raises:
        ValueError: If the number of stages is not a multiple of
            `num_devices`, or no order is found that keeps within `memory`.

    Example:

    >>> times = Times.of(4, forward=[1, 1, 1, 3], backward=[2, 2, 2, 6])
    >>> search(times, num_micro_batches=8, num_devices=2).description
    "that of 'zb_v', than which none shorter was found"
    """
    num_stages = len(times.forward)
    num_devices = schedules.spread(schedules.AUTO, num_stages, num_devices)
    sizes = [Sizes()] * num_stages if sizes is None else list(sizes)
    blocks = _blocks(num_stages, num_micro_batches, num_devices)
    if memory is None:
        memory = max(device_peaks(blocks, remat, sizes))
    memory *= 1 + 1e-9

    def seconds(schedule: Schedule) -> float:
        if max(device_peaks(schedule, remat, sizes)) > memory:
            return math.inf
        return step_seconds(schedule, times, remat)

    known = [blocks, *_named(num_stages, num_micro_batches, num_devices)]
    # The first of several that are equally good.
    least, best = min(
        [(seconds(x), i, x) for i, x in enumerate(known)], key=lambda x: x[:2]
    )[::2]
    problem = Problem(
        times, num_micro_batches, num_devices, remat, sizes, memory
    )
    rows = _improved(problem, [x.devices for x in known])
    if rows:
        found = Schedule(rows, schedules.AUTO)
        shorter = 1 - seconds(found) / least if least < math.inf else 1.0
        if shorter > 1e-9:
            found.description = (
                f"searched for these stages, {shorter:.1%} shorter than "
                f"'{best.name}'"
                if least < math.inf
                else "searched for these stages"
            )
            return found
    if least == math.inf:
        raise ValueError(
            "Schedule 'auto' finds no order of tasks that keeps within the "
            f"memory. Received: memory={memory:g}, where 1F1B would need "
            f"{max(device_peaks(blocks, remat, sizes)):g}"
        )
    return Schedule(
        best.tasks,
        schedules.AUTO,
        f"that of '{best.name}', than which none shorter was found",
    )


def step_seconds(
    schedule: Schedule, times: Times, remat: str = "always"
) -> float:
    """Returns how long a step takes, with the updates of its stages."""
    step = simulate(
        schedule,
        times.forward,
        times.backward,
        times.recompute,
        times.transfer,
        remat,
        times.weights,
    )
    ends = [0.0] * len(schedule.tasks)
    for device, _, _, end in step.spans:
        ends[device] = max(end, ends[device])
    for stage, device in enumerate(schedule.devices):
        ends[device] += times.update[stage]
    return max(ends)


def _named(
    num_stages: int, num_micro_batches: int, num_devices: int
) -> list[Schedule]:
    """Returns the named schedules of so many stages and devices."""
    names = [x for x in schedules.NAMES if x != schedules.AUTO]
    if num_stages == num_devices:
        # They are 1F1B and zero-bubble then.
        names = [x for x in names if x not in schedules.ANY_NUMBER]
    if num_stages % 2:
        names = [x for x in names if x not in schedules.TWO_EACH]
    return [
        schedules.get(x, num_stages, num_micro_batches, num_devices)
        for x in names
        if schedules.spread(x, num_stages, num_devices) == num_devices
    ]


def _blocks(
    num_stages: int, num_micro_batches: int, num_devices: int
) -> Schedule:
    """Returns 1F1B of devices that have several neighbouring stages each."""
    each = num_stages // num_devices
    merged = schedules.one_f_one_b(num_devices, num_micro_batches)
    rows = []
    for row in merged.tasks:
        rows.append(
            [
                task._replace(stage=each * task.stage + i)
                for task in row
                for i in (
                    range(each) if task.kind == "F" else reversed(range(each))
                )
            ]
        )
    return Schedule(rows, "1f1b")


def _improved(problem: Problem, placements: Sequence[list[int]]) -> list:
    """Returns the tasks of each device, in the best order that is found."""
    chance = random.Random(0)
    num_tasks = 3 * problem.num_stages * problem.num_micro_batches
    starts = itertools.product(
        dict.fromkeys(map(tuple, placements)), _STRETCHES, _PATIENCES[2::2]
    )
    least, best, rows = math.inf, None, []
    # Of huge numbers of tasks the first few orders must do.
    for devices, stretch, patience in itertools.islice(
        starts, max(1, 2 * _NUM_TASKS // num_tasks)
    ):
        rules = Rules(devices, *_urgencies(problem, stretch), patience)
        end, order = listed(problem, rules, least)
        if end < least:
            least, best, rows = end, rules, order
    if best is None:
        return []
    period = max(problem.work(best.devices))
    left = num_orders = min(_NUM_ORDERS, _NUM_TASKS // num_tasks)
    rules, now = best, least
    # Most changes of devices make one work too long, and need no listing.
    for _ in range(_NUM_CHANGES * num_orders):
        if not left:
            break
        # A step may get a little longer on the way to a shorter one: less and
        # less, as in simulated annealing.
        limit = now * (1 + _WORSE * left / num_orders)
        changed = _changed(problem, rules, period, chance)
        work = max(problem.work(changed.devices)) * problem.num_micro_batches
        if work > limit:
            continue
        left -= 1
        end, order = listed(problem, changed, math.nextafter(limit, math.inf))
        if end <= limit:
            rules, now = changed, end
        if end < least:
            least, rows = end, order
    return rows


def _urgencies(
    problem: Problem, stretch: float
) -> tuple[list[float], list[float]]:
    """Returns `Rules.forward` and `Rules.backward`.

    The times of a micro-batch that is alone, stretched.
    """
    times, time = problem.times, 0.0
    forward, backward = [], []
    for seconds in times.forward:
        forward.append(time)
        time += stretch * seconds
    for seconds in reversed(times.by_inputs):
        backward.append(time)
        time += stretch * seconds
    return forward, backward[::-1]


def _changed(
    problem: Problem, rules: Rules, period: float, chance: random.Random
) -> Rules:
    """Returns rules that differ a little."""
    num_stages = problem.num_stages
    kind = chance.random()
    if kind < 0.5 and num_stages > problem.num_devices:
        devices = list(rules.devices)
        a, b = chance.sample(range(num_stages), 2)
        devices[a], devices[b] = devices[b], devices[a]
        return rules._replace(devices=devices)
    if kind > 0.95:
        return rules._replace(patience=chance.choice(_PATIENCES))
    urgencies = [list(rules.forward), list(rules.backward)]
    for _ in range(chance.choice((1, 2, 4))):
        row = chance.choice(urgencies)
        row[chance.randrange(num_stages)] += chance.gauss(0.0, period)
    return rules._replace(forward=urgencies[0], backward=urgencies[1])
