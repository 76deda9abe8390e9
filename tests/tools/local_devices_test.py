"""Devices for a pipeline, where there are GPUs and where there are none.

No GPU is needed: mocks answer questions about one.
"""

import ctypes
from unittest import mock

import tensorflow as tf

from tools import local_devices


class Driver:
    """Functions of CUDA's driver on a host with GPUs of 16 and of 24 GiB."""

    def __init__(self, name):
        del name

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = 100 + number
        return 0

    def cuDeviceTotalMem_v2(self, total, device):
        total._obj.value = {100: 16, 101: 24}[device.value] * 2**30
        return 0


class LocalDevicesTest(tf.test.TestCase):
    def split(self, number=1, **kwargs):
        """Returns the memory of the parts of a GPU."""
        configure = mock.Mock()
        name = f"/physical_device:GPU:{number}"
        whole = tf.config.PhysicalDevice(name, "GPU")
        with (
            mock.patch.object(ctypes, "CDLL", Driver),
            mock.patch.multiple(
                tf.config,
                set_visible_devices=mock.Mock(),
                set_logical_device_configuration=configure,
            ),
        ):
            local_devices.split_gpu(whole, **kwargs)
        (gpu, parts), _ = configure.call_args
        self.assertEqual(gpu, whole)
        return [x.memory_limit for x in parts]

    def test_parts_of_a_size(self):
        # Three would leave nothing to the driver.
        self.assertEqual(self.split(mib=8192), [8192, 8192])

    def test_equal_parts(self):
        self.assertEqual(self.split(count=2), [11776, 11776])

    def test_another_gpu(self):
        self.assertEqual(self.split(number=0, count=2), [7680, 7680])

    def test_failure_of_the_driver(self):
        with (
            mock.patch.object(Driver, "cuDeviceGet", lambda *args: 101),
            self.assertRaisesRegex(
                RuntimeError, "memory of .*GPU:1: error 101"
            ),
        ):
            self.split(count=2)

    def test_too_few(self):
        with (
            mock.patch.object(
                tf.config, "list_physical_devices", return_value=["a", "b"]
            ),
            self.assertRaisesRegex(ValueError, "4 GPUs are needed.*are 2"),
        ):
            local_devices.find(4)

    def test_cpu(self):
        count = len(tf.config.list_logical_devices("CPU"))
        if tf.config.list_physical_devices("GPU"):
            self.skipTest("There is a GPU.")
        names, note = local_devices.find(count)
        self.assertEqual(names, [f"CPU:{k}" for k in range(count)])
        self.assertIn("a speed-up says nothing", note)


if __name__ == "__main__":
    tf.test.main()
