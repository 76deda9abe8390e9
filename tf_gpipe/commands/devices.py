"""Devices of this host for a pipeline."""

import tensorflow as tf

from tf_gpipe.devices import placement
from tf_gpipe.devices.local import split_cpu


def ensure(num_devices: int) -> None:
    """Splits the CPU into enough logical devices, if there is no accelerator.

    TensorFlow allows that only before it has started. If it has started, enough
    of them must exist.

    Args:
        num_devices: Positive integer, the number of devices needed.

    Raises:
        ValueError: If there are too many, or TensorFlow has started with too
            few.
    """
    for kind in ("GPU", "TPU"):
        if tf.config.list_physical_devices(kind):
            return
    try:
        split_cpu(num_devices)
    except RuntimeError as error:
        started = len(tf.config.list_logical_devices("CPU"))
        raise ValueError(
            f"{num_devices} devices are needed, but TensorFlow has started "
            f"with {started}."
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
