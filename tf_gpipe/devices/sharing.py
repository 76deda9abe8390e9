"""Devices for a saved model on a machine that lacks the model's own."""

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.devices import placement


def devices_here(
    name: str, devices: Sequence | None, num_devices: int, num_replicas: int
) -> list | None:
    """Returns the devices of a saved model on this machine.

    The model's own, if they all exist here. Otherwise its stages go to this
    machine's devices in order; if there are fewer, neighbouring stages share
    one. A warning says so.

    Args:
        name: Name of the model, for the warning.
        devices: The devices in the file, as `placement.assign` takes them.
        num_devices: Integer, the number of devices of a replica.
        num_replicas: Integer.

    Returns:
        The argument `devices` of `placement.assign`; `None` for the visible
        accelerators.
    """
    rows = devices if placement.is_grid(devices) else [devices or []]
    rows = [list(row) for row in rows or ()][:num_replicas]
    if not rows[0] or len(rows) < num_replicas:
        wanted = [f"device {i}" for i in range(num_devices * num_replicas)]
        here = placement.accelerators()
        if len(wanted) <= len(here):
            return None
        rows = [
            wanted[r * num_devices : (r + 1) * num_devices]
            for r in range(num_replicas)
        ]
        missing = f"{len(wanted)} devices"
    else:
        wanted = list(dict.fromkeys(x for row in rows for x in row))
        lacking = [x for x in wanted if not _is_here(x)]
        if not lacking:
            return rows if len(rows) > 1 else rows[0]
        here = _of_kind(lacking[0]) or placement.accelerators()
        missing = f"devices {lacking}"
    if len(wanted) <= len(here):
        places = dict(zip(wanted, here, strict=False))
        sharing = "Its stages are on others"
    else:
        places = {
            x: here[i * len(here) // len(wanted)] for i, x in enumerate(wanted)
        }
        sharing = "Its stages share those that there are"
    found = [[places[x] for x in row] for row in rows]
    warnings.warn(
        f"Model '{name}' was saved with {missing} that this machine does not "
        f"have. {sharing}: devices={found if len(found) > 1 else found[0]}. "
        "Its numbers are the same. For other stages and devices, make a "
        "pipeline of it: tf_gpipe.PipelinedModel.from_model(model, "
        "num_stages=..., devices=...); `model.to_keras()` is the plain model.",
        stacklevel=2,
    )
    return found if len(found) > 1 else found[0]


def _is_here(device: str) -> bool:
    try:
        placement.find(device)
    except ValueError:
        return False
    return True


def _of_kind(device: str) -> list[str]:
    """Returns the devices of this process of the same type, such as GPU."""
    kind = tf.DeviceSpec.from_string(device).device_type
    return [x.name for x in tf.config.list_logical_devices(kind)]
