"""Schedule `"auto"`: a search for the shortest order, given stages' costs.

This module imports no TensorFlow.
"""

import itertools
import math
import random
from collections.abc import Sequence

from tf_gpipe import checks
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.listing import Problem
from tf_gpipe.schedule.listing import Rules
from tf_gpipe.schedule.listing import listed
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import device_peaks
from tf_gpipe.schedule.simulate import Times
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.tasks import Schedule

# The most orders that are tried, and the most tasks of all of them together.
_NUM_ORDERS = 2_000
_NUM_TASKS = 300_000
# The most random changes that are drawn for each order that is tried.
_NUM_CHANGES = 10
# How much longer a changed order may be, at first, as a share.
_WORSE = 0.01
# Initial values: factors of `_urgencies`. The larger, the more micro-batches
# are in progress at a time.
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
    """Returns the shortest schedule that is found, named `"auto"`.

    Tried are, within the memory: the named schedules of as many stages and
    devices; 1F1B with neighbouring stages on a device; and list scheduling, in
    which a free device runs its most urgent ready task: a forward pass only if
    memory is left for the tasks after it, and gradients of weights only if it
    would wait otherwise. Then the urgencies, and which stages share a device,
    are changed at random; a change is kept if the step gets at most a little
    longer (simulated annealing). Backward passes are split; each device has
    `num_stages / num_devices` stages. The same arguments give the same order.

    Args:
        times: `Times` of the stages.
        num_micro_batches: Integer M.
        num_devices: Integer D, of which the number of stages is a multiple.
        remat: The remat mode.
        sizes: `Sizes` of each stage. By default all stages keep equally much
            of each micro-batch.
        memory: Memory of a device, in the unit of `sizes`. Defaults to the peak
            of the fullest device under 1F1B with neighbouring stages on a
            device.

    Returns:
        A `Schedule`.

    Raises:
        ValueError: If a number is not positive, that of stages is not a
            multiple of `num_devices`, there are `Sizes` for another number of
            stages, or no order is found that needs at most `memory`.
        TypeError: If `memory` is not a number.

    Example:

    >>> times = Times.of(4, forward=[1, 1, 1, 3], backward=[2, 2, 2, 6])
    >>> search(times, num_micro_batches=8, num_devices=2).description
    "that of 'zb_v', than which none shorter was found"
    """
    num_stages = len(times.forward)
    checks.positive_integer("num_micro_batches", num_micro_batches)
    checks.positive_integer("num_devices", num_devices)
    num_devices = schedules.num_devices_of(
        schedules.AUTO, num_stages, num_devices
    )
    sizes = [Sizes()] * num_stages if sizes is None else list(sizes)
    if len(sizes) != num_stages:
        raise ValueError(
            "`sizes` must have those of each stage. Received: "
            f"{len(sizes)} of them, {num_stages} stages"
        )
    blocks = schedules.neighbouring(num_stages, num_micro_batches, num_devices)
    if memory is None:
        memory = max(device_peaks(blocks, remat, sizes))
    else:
        checks.number("memory", memory, "a number, 0 or more")
    memory *= 1 + 1e-9

    def seconds(schedule: Schedule) -> float:
        if max(device_peaks(schedule, remat, sizes)) > memory:
            return math.inf
        return step_seconds(schedule, times, remat)

    known = [blocks, *_named(num_stages, num_micro_batches, num_devices)]
    # The first of several with equal times.
    least, best = min(
        [(seconds(x), i, x) for i, x in enumerate(known)], key=lambda x: x[:2]
    )[::2]
    problem = Problem(
        times, num_micro_batches, num_devices, remat, sizes, memory
    )
    rows = _improved(problem, [x.devices for x in known])
    if rows:
        found = Schedule(rows, schedules.AUTO)
        end = seconds(found)
        if end < least * (1 - 1e-9):
            found.description = "searched for these stages"
            if least < math.inf:
                found.description += (
                    f", {1 - end / least:.1%} shorter than '{best.name}'"
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
    """Returns the time of a step, including the optimizer's updates."""
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
        # Interleaved schedules are 1F1B and zero-bubble then.
        names = [x for x in names if x not in schedules.ANY_STAGES_A_DEVICE]
    if num_stages % 2:
        names = [x for x in names if x not in schedules.TWO_STAGES_A_DEVICE]
    return [
        schedules.get(x, num_stages, num_micro_batches, num_devices)
        for x in names
        if schedules.num_devices_of(x, num_stages, num_devices) == num_devices
    ]


def _improved(problem: Problem, placements: Sequence[list[int]]) -> list:
    """Returns the tasks of each device in the shortest order found.

    An empty list if no order keeps within the memory.
    """
    chance = random.Random(0)
    num_tasks = 3 * problem.num_stages * problem.num_micro_batches
    starts = itertools.product(
        dict.fromkeys(map(tuple, placements)), _STRETCHES, _PATIENCES[2::2]
    )
    least, best, rows = math.inf, None, []
    # With a huge number of tasks only the first few rules are tried.
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
    # Most changes of devices give one device too much work, which is found
    # without list scheduling.
    for _ in range(_NUM_CHANGES * num_orders):
        if not left:
            break
        # A change may make the step a little longer, by a share that falls to
        # zero, as in simulated annealing.
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
    """Returns initial values of `Rules.forward` and `Rules.backward`.

    The start times of a micro-batch alone in the pipeline, times `stretch`.
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
    """Returns rules with one random change.

    Two stages swap devices, the patience changes, or some urgencies do.
    """
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
