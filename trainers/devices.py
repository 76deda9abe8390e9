"""The devices of this machine, as many as a pipeline has stages."""

import tensorflow as tf

from trainers.command_line import UserError


def ensure(num_devices):
    """Makes sure of enough devices, where there is no accelerator.

    The CPU is then divided into logical devices, which TensorFlow allows only
    before it has started. If it has started, enough of them must exist.

    Args:
        num_devices: Positive integer, how many devices are needed.

    Raises:
        UserError: If TensorFlow has started with too few devices.
    """
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
            raise UserError(
                f"{num_devices} stages need {num_devices} devices, but "
                f"TensorFlow has started with {num_logical}."
            ) from error
    if num_devices > 1:
        print(
            f"No accelerator: {num_devices} logical CPU devices share this "
            "machine's cores, to try a pipeline out, not to gain speed."
        )
