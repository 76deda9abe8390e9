"""Devices of this host for a pipeline."""

import tensorflow as tf

from tf_gpipe.devices import placement

# TensorFlow makes them one by one.
_MOST = 1024


def ensure(num_devices: int) -> None:
    """Makes sure of enough devices, where there is no accelerator.

    The CPU is then divided into logical devices, which TensorFlow allows only
    before it has started. If it has started, enough of them must exist.

    Args:
        num_devices: Positive integer, how many devices are needed.

    Raises:
        ValueError: If there are too many, or TensorFlow has started with too
            few.
    """
    if num_devices > _MOST:
        raise ValueError(
            f"There must be at most {_MOST} devices. Received: {num_devices}"
        )
    for kind in ("GPU", "TPU"):
        if tf.config.list_physical_devices(kind):
            return
    try:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * num_devices,
        )
    except RuntimeError as error:
        num_logical = len(tf.config.list_logical_devices("CPU"))
        if num_logical < num_devices:
            raise ValueError(
                f"{num_devices} devices are needed, but TensorFlow has "
                f"started with {num_logical}."
            ) from error
    if num_devices > 1:
        print(
            f"No accelerator: {num_devices} logical CPU devices share this "
            "machine's cores, to try a pipeline out, not to gain speed."
        )


def first(num_devices: int | None) -> list[str] | None:
    """Returns the names of the first accelerators, or else CPUs.

    Args:
        num_devices: Integer; or `None`, which leaves the choice to the model.
    """
    return placement.accelerators()[:num_devices] if num_devices else None
