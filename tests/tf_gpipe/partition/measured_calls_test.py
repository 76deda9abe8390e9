"""Measured calls of a layer run all that a training step runs."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from tests.devices import KIND
from tests.tf_gpipe.step.executed_graph import executed_graph
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import measured_calls
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
        graph = model_graph.of_layers([layer], keras.KerasTensor(shape))
        specs = layer_costs.walk(graph, layer_costs.specs_of)[1]
        for backward, expected in ((False, forward), (True, both)):
            run = measured_calls.traced(graph, specs, graph.inputs, backward)
            nodes = executed_graph(run, f"{KIND}:0")
            # Kernels of oneDNN, and fused ones, have prefixes.
            found = {x: sum(n.op.endswith(x) for n in nodes) for x in expected}
            self.assertEqual(found, expected)

    def test_no_gradients_of_inputs_that_nothing_trains(self):
        """As of the model's own inputs."""
        layers = [L.Dense(4) for _ in range(3)]
        for layer in layers:
            layer.build((8, 4))
        graph = model_graph.of_layers(layers, keras.KerasTensor((8, 4)))
        specs = layer_costs.walk(graph, layer_costs.specs_of)[1]
        run = measured_calls.traced(graph, specs, ())
        weights = [v for layer in layers for v in layer.weights]
        before = [v.numpy() for v in weights]
        nodes = executed_graph(run, f"{KIND}:1")
        products = [n for n in nodes if n.op.endswith("MatMul")]
        # Three forward, three by weights, two by inputs.
        self.assertLen(products, 8)
        (device,) = {n.device for n in products}
        self.assertEndsWith(device, f"{KIND}:1")
        for v, value in zip(weights, before, strict=True):
            self.assertAllEqual(v, value)


if __name__ == "__main__":
    tf.test.main()
