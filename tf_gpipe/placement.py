"""Which device each stage is on, and the variables on their devices."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_gpipe import replicas


def accelerators() -> list[str]:
    """Returns the names of the visible accelerators, or else of the CPUs."""
    for kind in ("GPU", "TPU", "CPU"):
        devices = tf.config.list_logical_devices(kind)
        if devices:
            return [device.name for device in devices]
    return []


def assign(
    devices: Sequence | None, num_devices: int, num_replicas: int = 1
) -> list[list[str]]:
    """Returns existing devices, a row for each replica.

    Args:
        devices: List of at least `num_devices` TensorFlow device strings,
            where a device may be named more than once; a list of such a list
            for each replica; or `None` for the visible accelerators (the CPUs
            where there are none), row by row.
        num_devices: Integer, devices of a row.
        num_replicas: Integer, rows.

    Returns:
        List of `num_replicas` lists of `num_devices` full device names.

    Raises:
        ValueError: If there are too few devices or one does not exist.
    """
    if devices is None:
        names = accelerators()
        if len(names) < num_replicas * num_devices:
            raise ValueError(_too_few(names, num_devices, num_replicas))
        return [
            names[r * num_devices : (r + 1) * num_devices]
            for r in range(num_replicas)
        ]
    rows = devices if is_grid(devices) else [devices]
    if len(rows) != num_replicas:
        raise ValueError(
            "`devices` must have a list of device strings for each of the "
            f"{num_replicas} replicas of the strategy, such as "
            f"{[['GPU:0', 'GPU:1'], ['GPU:2', 'GPU:3']]}. Received: "
            f"devices={devices}"
        )
    for row in rows:
        if len(row) < num_devices:
            raise ValueError(
                f"`devices` must name a device for each of the {num_devices} "
                f"stages. Received {len(row)}: devices={list(row)}"
            )
    return [[find(device) for device in row[:num_devices]] for row in rows]


def is_grid(devices: Sequence | None) -> bool:
    """Returns whether devices are given as a row for each replica."""
    return bool(devices) and not any(isinstance(x, str) for x in devices or ())


def _too_few(names: list[str], num_devices: int, num_replicas: int) -> str:
    visible = f"Visible: {len(names)} ({', '.join(names)})."
    if num_replicas == 1:
        return (
            f"{num_devices} stages need {num_devices} devices. {visible} Use "
            "fewer stages; or let stages share a device, with "
            f"devices=['{names[0]}'] * {num_devices}; or split a device into "
            "logical ones before TensorFlow starts, with "
            "tf.config.set_logical_device_configuration."
        )
    found = iter(names)
    grid = [
        [next(found, "missing") for _ in range(num_devices)]
        for _ in range(num_replicas)
    ]
    text = "\n".join(
        f"    replica {r}: {', '.join(row)}" for r, row in enumerate(grid)
    )
    return (
        f"{num_replicas} replicas of {num_devices} stages need "
        f"{num_replicas * num_devices} devices. {visible}\n{text}\nUse fewer "
        "stages, or a strategy with fewer replicas (one for each row, such as "
        f"tf.distribute.MirroredStrategy(['{names[0]}']))."
    )


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


def place(
    variable: keras.Variable, devices: Sequence[str], trainable: bool = False
) -> None:
    """Gives a variable its place, with the value that it has.

    A variable that has no value yet is initialised there, so that a model too
    large for one device is never on one.

    Args:
        variable: A `keras.Variable`.
        devices: List of full device names, one a replica.
        trainable: Boolean, whether gradient tapes watch a variable that has no
            value yet. Also those that are frozen: they may not always be.
    """
    with tf.init_scope(), replicas.variables_on(devices):
        if variable._value is None:
            before = variable.trainable
            variable.trainable = before or trainable
            variable._deferred_initialize()
            variable.trainable = before
        elif not all(
            _compatible(_spec(is_on), _LOCAL.make_merged_spec(_spec(wanted)))
            for is_on, wanted in zip(
                replicas.devices_of(variable.value), devices, strict=True
            )
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
