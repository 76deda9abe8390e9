"""Devices of this process: GPUs, or parts of one GPU or of the CPU.

Call these functions before TensorFlow initialises its devices.
"""

import ctypes

import tensorflow as tf

from tf_gpipe.commands import devices

# Memory of a GPU that is left to its driver.
_RESERVED_MIB = 1024


def find(count):
    """Returns devices for a pipeline: GPUs, or parts of one GPU or the CPU.

    Args:
        count: Integer, number of devices.

    Returns:
        Tuple of a list of device names (the GPUs if there are enough, equal
        parts of the only GPU, or of the CPU if there is no GPU), and a string
        that describes them, and warns if they share a processor.

    Raises:
        ValueError: If there are GPUs, but too few.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if 1 < len(gpus) < count:
        raise ValueError(f"{count} GPUs are needed. There are {len(gpus)}.")
    if len(gpus) >= count:
        names = [x.name for x in tf.config.list_logical_devices("GPU")]
        return names[:count], f"{count} of {len(gpus)} GPUs"
    if gpus:
        return (
            split_gpu(gpus[0], count=count),
            f"{count} parts of one GPU: their memory is their own, the "
            "processor is not, so a speed-up says nothing",
        )
    devices.ensure(count)
    return [f"CPU:{k}" for k in range(count)], (
        f"{count} logical devices of one CPU, which share its cores: a "
        "speed-up says nothing"
    )


def split_gpu(gpu, count=None, mib=None):
    """Splits a GPU into virtual devices, and returns their names.

    Args:
        gpu: The physical device.
        count: Integer, number of virtual devices; or `None` for as many as
            there is memory for.
        mib: Integer, memory of each virtual device in MiB; or `None` for
            equal parts. With `count` it is an upper limit.
    """
    total = _memory(gpu) // 2**20 - _RESERVED_MIB
    if count:
        mib = min(mib or total, total // count)
    tf.config.set_visible_devices(gpu, "GPU")
    tf.config.set_logical_device_configuration(
        gpu,
        [tf.config.LogicalDeviceConfiguration(memory_limit=mib)]
        * (count or total // mib),
    )
    return [x.name for x in tf.config.list_logical_devices("GPU")]


def _memory(gpu):
    """Returns the bytes of memory of a physical GPU.

    The driver is asked, since TensorFlow does not tell before it starts, and
    `nvidia-smi` may number GPUs differently.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    device, total = ctypes.c_int(), ctypes.c_size_t()
    number = int(gpu.name.rpartition(":")[2])
    for function, *args in (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), number),
        (driver.cuDeviceTotalMem_v2, ctypes.byref(total), device),
    ):
        status = function(*args)
        if status:
            raise RuntimeError(
                f"The CUDA driver does not tell the memory of {gpu.name}: "
                f"error {status} of {function.__name__}"
            )
    return total.value
