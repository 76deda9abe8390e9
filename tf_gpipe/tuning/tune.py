"""`tf_gpipe.tune`: the fastest pipeline for a model, a batch and devices."""

import collections
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe import progress
from tf_gpipe.devices import worker_lost
from tf_gpipe.partition import uncounted
from tf_gpipe.planning import choice
from tf_gpipe.planning import optimizers
from tf_gpipe.planning import speeds
from tf_gpipe.planning.candidates import Choice
from tf_gpipe.planning.choice import Chooser
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.layer_copies import NoCopyError
from tf_gpipe.planning.layer_times import LayerTimes
from tf_gpipe.planning.plans import Plan
from tf_gpipe.planning.plans import Rival
from tf_gpipe.planning.speeds import Device
from tf_gpipe.planning.speeds import Machine
from tf_gpipe.schedule import schedules
from tf_gpipe.stage import call_overrides
from tf_gpipe.stage import seeds
from tf_gpipe.tuning import arguments
from tf_gpipe.tuning import measured_layers
from tf_gpipe.tuning import measured_speeds
from tf_gpipe.tuning import trials
from tf_gpipe.tuning.tried_choices import TriedChoices

# The most choices that are tried, that are ranked, and that a plan lists.
_NUM_TRIED = 12
_NUM_RANKED = 30
_NUM_RIVALS = 3


@progress.shown(after=progress.PATIENCE)
@uncounted.choosing()
@seeds.unchanged()
def tune(
    layers: Sequence[keras.Layer] | keras.Model,
    input_spec: Any,
    devices: int | Sequence[str] | None = None,
    device_memory: int | str | Sequence[int | str] | None = None,
    optimizer: str | keras.optimizers.Optimizer = "adam",
    budget_seconds: float = 60,
    *,
    num_stages: int | None = None,
    num_micro_batches: int | None = None,
    schedule: str | None = None,
    remat: str | None = None,
    replicas: bool = True,
    device_flops: float | Sequence[float] | None = None,
    bandwidth: float | None = None,
    latency: float | None = None,
) -> Plan:
    """Returns the plan of the fastest pipeline that fits the devices.

    It plans pipelines of one or two stages a device (or the given number) and
    of any number of replicas and micro-batches that the devices and the
    mini-batch allow, with each schedule and remat mode, cut into stages of
    equal time; drops those that need more than 90 % of a
    device's memory; and simulates the rest. A pass takes the time of its
    arithmetic, of the bytes that it moves, and of the starts of its operations.
    Where the devices are there, their speed and that of the layers is measured,
    copies of the best pipelines train a few steps, and what these steps take
    decides. Weights, optimizer slots and seeds stay as they are.

    Args:
        layers: List of Keras layers, a `keras.Sequential`, or a functional
            `keras.Model`.
        input_spec: `keras.KerasTensor`, `tf.TensorSpec` or shape (of float32)
            with the size of a mini-batch first; a nested structure of them
            for several inputs.
        devices: List of TensorFlow device strings, which may also be those of
            `tf_gpipe.connect`; or an integer, of as many devices that are not
            here, for which nothing is measured. Defaults to the visible
            accelerators (CPUs where there are none). One that is named more
            than once may get so many stages, which share its memory.
        device_memory: Integer, the bytes that a device has for weights and
            activations, or a string such as `"16GB"`; or a list with one a
            device. Defaults to `None`: everything fits, except what is larger
            than a pipeline that ran out of memory in a trial.
        optimizer: Keras optimizer, or its name; its slots are counted.
        budget_seconds: Float, about how long measurements and trials may take.
            With 0 there are none, and the same arguments give the same plan.
        num_stages: Integer K, if it is not to be chosen.
        num_micro_batches: Integer M, likewise.
        schedule: String, likewise; `"gpipe"` for losses that need it. `"auto"`
            is for devices that are alike.
        remat: String, likewise; `"auto"` needs a `device_memory`, of which it
            gets 90 %.
        replicas: Boolean, whether there may be several pipelines, or several
            copies of the model, under a `tf.distribute` strategy. Devices of
            `tf_gpipe.connect` have none.
        device_flops: Float, operations a second of a device, or a list with
            one a device. Defaults to what is measured, or that of a large
            accelerator.
        bandwidth: Float, bytes a second from device to device.
        latency: Float, seconds that a transfer takes besides. Either defaults
            to what is measured; without measurements transfers take no time.

    Returns:
        A `Plan`, for the argument `plan` of the classes of pipelines.
        `print(plan)` tells what was chosen, and what the next best lose by.

    Raises:
        ValueError: If an argument is not valid, nothing fits the devices, or
            the costs of a layer cannot be found.
        TypeError: If an argument is of a wrong type.
        tf.errors.UnavailableError: If a worker is lost.
        Exception: What the first trial raised, if none could train.

    Example:

    >>> layers = [keras.layers.Dense(64) for _ in range(8)]
    >>> plan = tf_gpipe.tune(layers, (8, 64), devices=2, budget_seconds=0)
    >>> plan.num_devices, plan.num_replicas  # of so little, one is enough
    (1, 1)
    """
    call_overrides.check(layers)
    fixed = arguments.fixed(num_stages, num_micro_batches, schedule, remat)
    checks.boolean("replicas", replicas)
    budget_seconds = checks.number(
        "budget_seconds", budget_seconds, "a number of seconds, 0 or more"
    )
    names, memories = arguments.names_and_memories(
        devices, device_memory, remat
    )
    told = arguments.told(names, memories, device_flops, bandwidth, latency)
    until = time.monotonic() + float(budget_seconds)
    # Devices given as a number are not here: there is nothing to measure.
    tries = budget_seconds > 0 and names[0] is not None
    if tries and tf.distribute.has_strategy():
        raise ValueError(
            "Copies of the model train here, which a strategy would share out. "
            "Call `tune` outside of the strategy's scope, and make only the "
            "model within it; or give budget_seconds=0."
        )
    if tries:
        here = [str(x) for x in names]
        with worker_lost.using(here):
            machine = measured_speeds.measured(here, memories)
    else:
        machine = speeds.unmeasured(names, memories)
    one_each = replicas and not speeds.any_twice(names)
    machine = dataclasses.replace(
        machine, **told, replicates=machine.replicates and one_each
    )
    if schedule == schedules.AUTO:
        machine = arguments.for_searched_order(machine, device_flops)
    known = KnownLayers(layers, input_spec, optimizer)
    if tries:
        times = _measured_times(known, machine, fixed, until)
        ranked = _of_both_kinds(known, times, machine, fixed)
    else:
        chooser = Chooser(known, LayerTimes(known), machine)
        ranked = chooser.ranked(fixed, 1 + _NUM_RIVALS)
    if not ranked:
        raise ValueError(_nothing_fits(known, machine, fixed))
    tried, untried = TriedChoices([]), ""
    if tries:
        estimated = functools.partial(_of_both_kinds, known, times, fixed=fixed)
        tried, untried = _tried(
            ranked, estimated, machine, layers, known, optimizer, until
        )
        ranked = tried.ranked()
    if not ranked:
        raise ValueError(
            "None of the pipelines that were tried fits the memory of the "
            "devices. Give their `device_memory` or more `budget_seconds`, so "
            "that smaller ones are tried; or use more devices, or a smaller "
            "mini-batch."
        )
    compared = any(not x.alone for x in choice.allowed(known, machine, fixed))
    reason = choice.explanation(ranked[0], machine, compared)
    plan = _decided(ranked, tried, machine, [untried, reason])
    return _with_memories(plan, machine.devices) if tries else plan


def _measured_times(known, machine, fixed, until) -> LayerTimes:
    """Returns `LayerTimes`, measured in a third of the time that is left."""
    now = time.monotonic()
    numbers = [
        known.micro_batch(x.num_micro_batches, x.num_replicas)
        for x in choice.allowed(
            known, machine, dataclasses.replace(fixed, schedule=None)
        )
    ]
    if not numbers:
        return LayerTimes(known)
    fastest = max(machine.devices, key=lambda x: x.speed.flops)
    with worker_lost.using([fastest.name]):
        found = measured_layers.measured(
            known,
            sorted({min(numbers), max(numbers)}),
            fastest.name,
            fastest.speed,
            now + max(0.0, until - now) / 3,
        )
    return LayerTimes(known, found, fastest.speed)


def _of_both_kinds(known, times, machine, fixed) -> list[Choice]:
    """Returns the best choices of one device, and the best of several."""
    chooser = Chooser(known, times, machine)
    ranked = chooser.ranked(fixed, _NUM_RANKED)
    if len({x.candidate.alone for x in ranked}) == 1:
        alone = ranked[0].candidate.alone
        among = choice.allowed(known, machine, fixed)
        others = [x for x in among if x.alone != alone]
        ranked += chooser.ranked(fixed, _NUM_RANKED, others)
    return ranked


def _tried(
    ranked, estimated, machine, layers, known, optimizer, until
) -> tuple[TriedChoices, str]:
    """Tries the best choices, as long as the time allows.

    `ranked` are those that `estimated` returns for the machine. Choices whose
    steps raise an error are dropped. Once one runs out of memory, devices are
    taken to have no more of it than was too little.

    Returns:
        `TriedChoices`, and the reason if none can be tried.

    Raises:
        tf.errors.UnavailableError: If a worker is lost.
        Exception: The first error, if no step ran.
    """
    optimizer = optimizers.get(optimizer)
    choices = TriedChoices(ranked)
    setup, refused = 0.0, None
    for _ in range(_NUM_TRIED):
        each = choices.next()
        start = time.monotonic()
        # A trial cannot be cut short, as most of it is tracing: none starts
        # that may end too late, after the first.
        if each is None or (
            setup
            and start + setup + trials.COUNT * choices.corrected(each) > until
        ):
            break
        seconds = other = None
        with progress.doing(f"trying {each.candidate}"):
            try:
                seconds = trials.step_seconds(
                    layers, known, optimizer, each.plan
                )
                if seconds is None:
                    other = machine.with_less_memory(_used(each.plan))
            except NoCopyError as error:
                what = str(error).partition(". ")[0]
                return TriedChoices(ranked), f"Nothing was tried. {what}."
            except tf.errors.UnavailableError:
                # A worker is lost: others may run, but on fewer devices.
                raise
            except Exception as error:  # Other candidates may run.
                refused = refused or error
        taken = time.monotonic() - start
        setup = max(setup, taken - trials.COUNT * (seconds or 0.0))
        if seconds is not None:
            choices.add(each, seconds)
            other = choices.corrected_machine(machine)
        if other is not None:
            machine = other
            choices.estimate_anew(estimated(machine))
    if refused and not choices.any_tried:
        raise refused
    return choices, ""


def _used(plan: Plan) -> dict[str | None, int]:
    """Returns the bytes that a plan of one replica needs, by device name."""
    used: collections.Counter = collections.Counter()
    for name, size in zip(
        plan.device_names or (), plan.device_bytes, strict=True
    ):
        used[name] += size
    return used


def _with_memories(plan: Plan, devices: Sequence[Device]) -> Plan:
    """Returns a plan with the memories of these devices.

    Those by which it was chosen are smaller, if a trial ran out of memory.
    """
    by_name = {x.name: x for x in devices}
    names = plan.device_names or []
    found: list[Any] = speeds.memories(
        [
            [by_name[name] for name in row]
            for row in (names if plan.num_replicas > 1 else [names])
        ]
    )
    alike = len(set(found)) == 1
    return dataclasses.replace(plan, device_memory=found[0] if alike else found)


def _decided(
    ranked: list[Choice],
    tried: TriedChoices,
    machine: Machine,
    reasons: list[str],
) -> Plan:
    """Returns the plan of the first choice, with reasons and its rivals."""
    best = ranked[0]
    count = len(machine.devices)
    used = best.candidate.num_devices * best.candidate.num_replicas
    if 1 < used < count:
        left_out = f"{count - used} of {count} devices are left out."
        reasons = [left_out, *reasons]
    return dataclasses.replace(
        best.plan,
        measured_seconds=tried.measured(best),
        reason="\n".join(filter(None, reasons)),
        rivals=sorted(
            (
                Rival(
                    str(x.candidate),
                    tried.measured(x) or x.seconds,
                    tried.measured(x) is not None,
                )
                for x in ranked[1:]
            ),
            key=lambda x: x.seconds,
        )[:_NUM_RIVALS],
    )


def _nothing_fits(known, machine, fixed) -> str:
    """Returns the error message for when no candidate fits in memory.

    Or none exists, because of arguments that are fixed.
    """
    given = ", ".join(
        f"{k}={v!r}" for k, v in dataclasses.asdict(fixed).items() if v
    )
    if not choice.allowed(known, machine, fixed):
        return (
            f"No pipeline of {len(known.names)} layers, {known.rows} rows and "
            f"{len(machine.devices)} devices has {given}. Leave some of it out."
        )
    memories = [x.memory for x in machine.devices]
    return (
        "No pipeline fits the memory of the devices with 10 % to spare: "
        f"device_memory={memories}. Use more devices, a smaller "
        "mini-batch, or an optimizer with fewer slots; `tf_gpipe.plan` tells "
        "what a pipeline needs." + (f" Or leave out {given}." if given else "")
    )
