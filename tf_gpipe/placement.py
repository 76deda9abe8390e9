"""Which device each stage is on, and the variables on their devices."""

from collections.abc import Sequence

import keras
import tensorflow as tf


def accelerators() -> list[str]:
    """Returns the names of the visible accelerators, or else of the CPUs."""
    for kind in ("GPU", "TPU", "CPU"):
        devices = tf.config.list_logical_devices(kind)
        if devices:
            return [device.name for device in devices]
    return []


def assign(devices: Sequence[str] | None, num_stages: int) -> list[str]:
    """Returns one existing device for each stage.

    Args:
        devices: List of at least `num_stages` TensorFlow device strings, one a
            stage, where a device may be named more than once; or `None` for
            the visible accelerators in order (the CPUs where there are none).
        num_stages: Integer K.

    Returns:
        List of K full device names.

    Raises:
        ValueError: If there are too few devices or one does not exist.
    """
    if devices is None:
        names = accelerators()
        if len(names) < num_stages:
            raise ValueError(
                f"{num_stages} stages need {num_stages} devices. Visible: "
                f"{len(names)} ({', '.join(names)}). Use fewer stages; or let "
                f"stages share a device, with devices=['{names[0]}'] * "
                f"{num_stages}; or split a device into logical ones before "
                "TensorFlow starts, with "
                "tf.config.set_logical_device_configuration."
            )
        return names[:num_stages]
    if len(devices) < num_stages:
        raise ValueError(
            f"`devices` must name a device for each of the {num_stages} "
            f"stages. Received {len(devices)}: devices={list(devices)}"
        )
    return [find(device) for device in devices[:num_stages]]


def find(device: str) -> str:
    """Returns the full name of a device.

    Args:
        device: TensorFlow device string, such as `"GPU:0"` or
            `"/job:worker/task:1/device:CPU:0"`.

    Returns:
        String, the name as `tf.config.list_logical_devices` gives it.

    Raises:
        ValueError: If no such device is visible.
    """
    existing = [x.name for x in tf.config.list_logical_devices()]
    try:
        text = device if device.startswith("/") else f"/device:{device}"
        wanted = _spec(text)
    except (AttributeError, ValueError):
        wanted = None
    for name in existing:
        if wanted is not None and wanted.device_type is not None:
            # What the string leaves open is that of the first match.
            if _compatible(wanted, _LOCAL.make_merged_spec(_spec(name))):
                return name
    raise ValueError(
        f"Unknown device {device!r}. Visible devices: {', '.join(existing)}."
    )


def is_local(device: str) -> bool:
    """Returns whether a device belongs to this process."""
    return _compatible(_spec(device), _LOCAL)


def place(variable: keras.Variable, device: str) -> None:
    """Gives a variable its place on a device, with the value that it has.

    A variable that has no value yet is initialised there, so that a model too
    large for one device is never on one.

    Args:
        variable: A `keras.Variable`.
        device: String, full device name.
    """
    with tf.init_scope(), tf.device(device):
        if variable._value is None:
            variable._deferred_initialize()
        elif not _compatible(
            _spec(variable._value.device),
            _LOCAL.make_merged_spec(_spec(device)),
        ):
            old = variable._value
            variable._value = tf.Variable(
                old,
                trainable=old.trainable,
                name=variable.name,
                dtype=old.dtype,
                aggregation=old.aggregation,
                synchronization=old.synchronization,
            )


# What TensorFlow leaves out of the names of this process's devices.
_LOCAL = tf.DeviceSpec(job="localhost", replica=0, task=0)


def _spec(name: str) -> tf.DeviceSpec:
    return tf.DeviceSpec.from_string(name)


def _compatible(a: tf.DeviceSpec, b: tf.DeviceSpec) -> bool:
    """Returns whether two names differ only in what one leaves open."""
    fields = ("job", "replica", "task", "device_type", "device_index")
    return all(
        getattr(a, field) == getattr(b, field)
        for field in fields
        if None not in (getattr(a, field), getattr(b, field))
    )
