"""Calls of one function, many times in a graph."""

import tensorflow as tf

from tf_gpipe.stage.function_call import FunctionCall


class FunctionCallTest(tf.test.TestCase):
    def test_device_functions_around_a_call(self):
        """They place the call, but not the function that all calls share."""
        call = FunctionCall(lambda x: tf.nn.relu(x) + 1.0)

        def same_device(operation):
            return "/device:CPU:0"

        with tf.Graph().as_default() as graph:
            with graph.device(same_device):
                outputs = call(tf.ones(3))
            (concrete,) = call._function.traced()
        self.assertIn("CPU:0", outputs.device)
        devices = {x.device for x in concrete.graph.get_operations()}
        self.assertEqual(devices, {""})


if __name__ == "__main__":
    tf.test.main()
