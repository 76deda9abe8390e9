"""`split_cpu`: the CPU as several devices, before TensorFlow has started."""

import subprocess

import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests import quick_python
from tests.conftest import NUM_DEVICES

SPLIT = """
import keras
import tensorflow as tf
import tf_gpipe

print(tf_gpipe.split_cpu(2), tf_gpipe.split_cpu(3), tf_gpipe.split_cpu(2))
print(len(tf.config.list_logical_devices("CPU")))
print(tf_gpipe.split_cpu(3))
try:
    tf_gpipe.split_cpu(4)
except RuntimeError as error:
    print(error)
"""
STARTED = """
import keras
import tf_gpipe

keras.layers.Dense(1).build((None, 1))
print(tf_gpipe.split_cpu(1))
tf_gpipe.split_cpu(2)
"""


def run(code):
    return subprocess.run(
        [*quick_python.command(), "-c", code], capture_output=True, text=True
    )


class SplitCpuTest(parameterized.TestCase, tf.test.TestCase):
    @pytest.mark.slow
    def test_in_a_fresh_process(self):
        two, three = "['CPU:0', 'CPU:1']", "['CPU:0', 'CPU:1', 'CPU:2']"
        first, count, again, error = run(SPLIT).stdout.splitlines()
        self.assertEqual(first, f"{two} {three} {two}")
        self.assertEqual(count, "3")
        self.assertEqual(again, three)
        self.assertIn("started with 3", error)
        self.assertIn("right after the imports", error)

    @pytest.mark.slow
    def test_once_tensorflow_has_started(self):
        done = run(STARTED)
        self.assertEqual(done.stdout.splitlines(), ["['CPU:0']"])
        self.assertIn("RuntimeError: The CPU can be split only", done.stderr)
        self.assertIn("started with 1", done.stderr)

    def test_where_there_are_enough(self):
        self.assertLen(tf_gpipe.split_cpu(NUM_DEVICES), NUM_DEVICES)

    @parameterized.parameters(0, -1, 1.5, True, 1025, 10**9, "2", None)
    def test_no_number_of_devices(self, num_devices):
        with self.assertRaisesRegex(
            (TypeError, ValueError), "num_devices=|Received"
        ):
            tf_gpipe.split_cpu(num_devices)


if __name__ == "__main__":
    tf.test.main()
