"""The arguments of `tune`, checked: what is fixed, and the devices."""

from collections.abc import Sequence
from typing import Any

from tf_gpipe import checks
from tf_gpipe.devices import placement
from tf_gpipe.partition import sizes
from tf_gpipe.planning import speeds
from tf_gpipe.planning.candidates import Fixed
from tf_gpipe.planning.speeds import Device
from tf_gpipe.planning.speeds import Machine
from tf_gpipe.planning.speeds import Speed
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import REMAT_MODES

_MOST_DEVICES = 1024


def fixed(num_stages, num_micro_batches, schedule, remat) -> Fixed:
    """Checks the arguments that the user has fixed."""
    numbers = {
        "num_stages": num_stages,
        "num_micro_batches": num_micro_batches,
    }
    found: dict[str, Any] = {
        name: checks.positive_integer(name, x)
        for name, x in numbers.items()
        if x is not None
    }
    checks.one_of("schedule", schedule, (*schedules.NAMES, None))
    checks.one_of("remat", remat, (*REMAT_MODES, AUTO_REMAT, None))
    return Fixed(**found, schedule=schedule, remat=remat)


def names_and_memories(
    devices: Any, device_memory: Any, remat: str | None
) -> tuple[list[str | None], list[int | None]]:
    """Returns the name of each device and its bytes; `None` where not given.

    Raises:
        ValueError: If `remat="auto"` needs others.
    """
    names = _names(devices)
    found = _each(
        "device_memory",
        device_memory,
        len(names),
        lambda x: sizes.to_bytes(x, "device_memory"),
    )
    if remat == AUTO_REMAT and (
        len(set(found)) > 1 or None in found or speeds.any_twice(names)
    ):
        raise ValueError(
            "remat='auto' needs the `device_memory` of devices that are alike "
            "and named once. Received: "
            f"device_memory={device_memory!r}, devices={devices!r}"
        )
    return names, found


def told(
    names: Sequence[str | None],
    memories: Sequence[int | None],
    device_flops: Any,
    bandwidth: Any,
    latency: Any,
) -> dict[str, Any]:
    """Returns what the user tells of the devices, as fields of `Machine`."""
    found = speeds.connection(bandwidth, latency)
    if device_flops is not None:
        speed_of = _each("device_flops", device_flops, len(names), _speed)
        found["devices"] = [
            Device(*x) for x in zip(names, memories, speed_of, strict=True)
        ]
    return found


def for_searched_order(machine: Machine, device_flops: Any) -> Machine:
    """Returns the machine for `schedule="auto"`, whose devices must be alike.

    Raises:
        ValueError: If they are not.
    """
    if device_flops is None:
        machine = machine.with_equal_speeds()
    if not machine.alike:
        seen = [(x.memory, f"{x.speed.flops:.3g}") for x in machine.devices]
        raise ValueError(
            "schedule='auto' searches an order of tasks for devices that are "
            "alike. Leave `schedule` out, to try all others; or give one "
            "`device_memory` and `device_flops` for all. Received devices with "
            f"these bytes and operations a second: {seen}"
        )
    return machine


def _names(devices: Any) -> list[str | None]:
    """Returns the full names of devices; `None`s for a number of them."""
    if devices is None:
        return list(placement.accelerators())
    if isinstance(devices, (int, float)) or checks.is_positive_integer(devices):
        count = checks.positive_integer("devices", devices)
        if count > _MOST_DEVICES:
            raise ValueError(
                f"There may be at most {_MOST_DEVICES} devices. Received: "
                f"devices={devices!r}"
            )
        return [None] * count
    listed = placement.listed(devices) or []
    if not listed or placement.is_grid(listed):
        raise ValueError(
            "`devices` must be a list of device strings, or a number of "
            "devices. How many replicas share them is chosen. Received: "
            f"devices={devices!r}"
        )
    return [placement.find(x) for x in listed]


def _each(name: str, value: Any, count: int, convert: Any) -> list:
    """Returns a list with a value a device, given one for all or a list."""
    if value is None:
        return [None] * count
    if isinstance(value, (str, int, float)) or not hasattr(value, "__len__"):
        return [convert(value)] * count
    found = checks.items(
        value, f"`{name}` must be a list. Received: {name}={value!r}"
    )
    if len(found) != count:
        raise ValueError(
            f"`{name}` must have one for each of {count} devices. Received: "
            f"{name}={value!r}"
        )
    return [convert(x) for x in found]


def _speed(value: Any) -> Speed:
    return Speed.of_flops(speeds.flops(value))
