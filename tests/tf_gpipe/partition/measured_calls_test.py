"""Measured calls of a layer run all that a training step runs."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from tests.tf_gpipe.step.executed_graph import executed_graph
from tf_gpipe.partition import balanced
from tf_gpipe.stage import model_graph

L = keras.layers


class MeasuredCallsTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        (lambda: L.Dense(3), {"MatMul": 1}, {"MatMul": 3, "BiasAddGrad": 1}),
        (
            lambda: L.Conv2D(2, 1, use_bias=False),
            {"Conv2D": 1},
            {
                "Conv2D": 1,
                "Conv2DBackpropInput": 1,
                "Conv2DBackpropFilter": 1,
            },
        ),
        (lambda: L.Activation("tanh"), {"Tanh": 1}, {"Tanh": 1, "TanhGrad": 1}),
        (lambda: L.Rescaling(3.0), {"Mul": 1}, {"Mul": 2}),
    )
    def test_operations(self, make, forward, both):
        """Also those whose results the gradients do not need.

        And those that TensorFlow would compute beforehand, if the gradients of
        the outputs were constants.
        """
        shape = (4, 5, 5, 3) if "Conv2D" in both else (4, 3)
        layer = make()
        layer.build(shape)
        (node,) = model_graph.of_layers([layer], keras.KerasTensor(shape)).nodes
        for backward, expected in ((False, forward), (True, both)):
            nodes = executed_graph(
                lambda backward=backward: balanced.seconds(
                    node, [tf.TensorSpec(shape)], backward
                )
            )
            # Kernels of oneDNN, and fused ones, have prefixes.
            found = {x: sum(n.op.endswith(x) for n in nodes) for x in expected}
            self.assertEqual(found, expected)


if __name__ == "__main__":
    tf.test.main()
