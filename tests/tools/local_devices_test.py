"""Devices for a pipeline, where there are GPUs and where there are none.

No GPU is needed: mocks answer questions about one.
"""

import subprocess
from unittest import mock

import tensorflow as tf

from tools import local_devices


class LocalDevicesTest(tf.test.TestCase):
    def split(self, **kwargs):
        """Returns the memory of the parts of a GPU of 24 GiB."""
        configure = mock.Mock()
        with (
            mock.patch.object(
                subprocess, "run", return_value=mock.Mock(stdout="24576\n")
            ),
            mock.patch.multiple(
                tf.config,
                set_visible_devices=mock.Mock(),
                set_logical_device_configuration=configure,
            ),
        ):
            local_devices.split_gpu("a GPU", **kwargs)
        (gpu, parts), _ = configure.call_args
        self.assertEqual(gpu, "a GPU")
        return [x.memory_limit for x in parts]

    def test_parts_of_a_size(self):
        # Three would leave nothing to the driver.
        self.assertEqual(self.split(mib=8192), [8192, 8192])

    def test_equal_parts(self):
        self.assertEqual(self.split(count=2), [11776, 11776])

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
