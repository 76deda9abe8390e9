"""Splits the CPU of this machine into several logical devices."""

import tensorflow as tf

from tf_gpipe import checks

# A limit, because TensorFlow makes the devices one by one.
_MOST = 1024


def split_cpu(num_devices: int) -> list[str]:
    """Splits the CPU into logical devices, to try out a pipeline on it.

    The devices share the cores and the memory of the machine: each runs its
    stage beside the others, as accelerators would, but all are not faster than
    one. Call this function first: TensorFlow fixes its devices when the first
    tensor or model is made. If it has fixed enough of them, as in a notebook's
    cell that is run again, these are returned.

    It is short for `tf.config.set_logical_device_configuration`.

    Args:
        num_devices: Positive integer, at most 1024, how many devices there
            shall be.

    Returns:
        List of their names, for the argument `devices` of a pipeline.

    Raises:
        TypeError, ValueError: If `num_devices` is no such number.
        RuntimeError: If TensorFlow has started with fewer.

    Example:

    >>> tf_gpipe.split_cpu(2)
    ['CPU:0', 'CPU:1']
    """
    checks.positive_integer("num_devices", num_devices)
    if num_devices > _MOST:
        raise ValueError(
            f"There must be at most {_MOST} devices. Received: "
            f"num_devices={num_devices}"
        )
    cpu = tf.config.list_physical_devices("CPU")[0]
    names = [f"CPU:{i}" for i in range(num_devices)]
    # A call before TensorFlow has started may have asked for enough already.
    if len(tf.config.get_logical_device_configuration(cpu) or ()) < num_devices:
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
            )
        except RuntimeError as error:
            started = len(tf.config.list_logical_devices("CPU"))
            if started >= num_devices:
                return names
            raise RuntimeError(
                "The CPU can be split only before TensorFlow has started. It "
                f"has started with {started}, when the first tensor or model "
                f"was made. Call `tf_gpipe.split_cpu({num_devices})` right "
                "after the imports; in a notebook, restart the kernel first. "
                f"Received: num_devices={num_devices}"
            ) from error
    return names
