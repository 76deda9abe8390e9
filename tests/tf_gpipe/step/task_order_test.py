"""Time stamps come after what they time, and after one another."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_gpipe.step.task_order import Clock


class ClockTest(tf.test.TestCase, parameterized.TestCase):
    # Without a GPU, TensorFlow puts operations of the second case on the CPU.
    @parameterized.parameters("CPU:1", "GPU:0")
    def test_order(self, device):
        @tf.function
        def run(x):
            clock = Clock()
            with tf.device(device):
                stamps = [clock.stamp([x], device)]
                for _ in range(3):
                    # Tasks wait for the stamp of the one before.
                    with tf.control_dependencies(stamps[-1:]):
                        x = tf.linalg.matmul(x, x)
                    # Stamps both a tensor and an operation that only comes
                    # after it.
                    with tf.control_dependencies([x]):
                        after = tf.no_op()
                    stamps.append(clock.stamp([x, after], device))
            return tf.stack(stamps)

        before = tf.timestamp()
        stamps = run(tf.zeros((200, 200)))
        times = [before, *stamps, tf.timestamp()]
        self.assertAllGreaterEqual(np.diff(times), 0)
        # Each stamp has a time of its own.
        self.assertLen(set(map(float, stamps)), 4)


if __name__ == "__main__":
    tf.test.main()
