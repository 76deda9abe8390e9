"""The devices that checks run on."""

import tensorflow as tf

from tools import local_devices
from tools.gpu.checking import Failed

# The memory of a device of the GPipe paper.
PAPER_MIB = 8192


def start(cpu, count=8, mib=PAPER_MIB):
    """Starts TensorFlow, and returns the names of devices for stages.

    Args:
        cpu: Boolean, whether to use logical devices of the CPU instead of
            parts of the first GPU.
        count: Integer, number of devices.
        mib: Integer, the memory of each part of the GPU; parts are smaller if
            it has not enough for all.
    """
    if cpu:
        names, _ = local_devices.find(count)
        # Starts TensorFlow, which fixes the number of logical devices.
        tf.config.list_logical_devices()
        return names
    return local_devices.split_gpu(first_gpu(), count=count, mib=mib)


def first_gpu():
    """Returns the first physical GPU."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise Failed("TensorFlow sees no GPU")
    return gpus[0]
