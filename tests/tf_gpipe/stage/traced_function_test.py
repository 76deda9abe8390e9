"""Parts of a trace compute what the whole does, and nothing twice."""

import collections

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.framework import meta_graph
from tensorflow.python.grappler import tf_optimizer

from tf_gpipe.stage.traced_function import TracedFunction


def optimized(concrete):
    """Returns the `NodeDef`s of a function and of those that it calls."""
    graph = meta_graph.create_meta_graph_def(graph=concrete.graph)
    fetches = graph.collection_def["train_op"].node_list.value
    fetches.extend(x.name for x in concrete.outputs)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    found = tf_optimizer.OptimizeGraph(config, graph)
    called = [node for x in found.library.function for node in x.node_def]
    return [*found.node, *called]


def ancestors(nodes, name):
    """Returns the names of all that an operation waits for."""
    inputs = {
        x.name: [y.lstrip("^").split(":")[0] for y in x.input] for x in nodes
    }
    found, rest = set(), [name]
    while rest:
        new = set(inputs.get(rest.pop(), ())) - found
        found |= new
        rest += new
    return found


class TracedFunctionTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.weight = tf.Variable(np.eye(3, dtype="float32") * 2)
        self.calls = collections.Counter()
        self.middle = None

    def count(self, name, x):
        def run(x):
            self.calls[name] += 1
            return x

        result = tf.numpy_function(run, [x], x.dtype, stateful=False)
        return tf.ensure_shape(result, x.shape)

    def trace(self):
        def function(x, unused):
            del unused
            weight = self.count("constant", self.weight * 0.5)
            self.middle = self.count("first", tf.matmul(x, weight))
            return self.middle, self.count("second", self.middle + weight)

        spec = tf.TensorSpec((3, 3))
        concrete = tf.function(function, autograph=False).get_concrete_function(
            spec, spec
        )
        inputs = concrete.inputs[:2]
        return TracedFunction(concrete, inputs), inputs, concrete.outputs

    def test_reads_in_the_order_of_the_trace(self):
        """The same step gives the same graph, from process to process."""
        variable = tf.Variable(1.0)

        def run():
            return tf.add_n([variable.read_value() * i for i in range(32)])

        concrete = tf.function(run, autograph=False).get_concrete_function()
        traced = TracedFunction(concrete, [])
        ((_, reads),) = traced.reads()
        places = [traced.operations.index(x.op) for x in reads]
        self.assertLen(places, 32)
        self.assertEqual(places, sorted(places))

    @parameterized.named_parameters(
        ("gelu", tf.nn.gelu),
        ("exp", lambda x: tf.exp(0.5 * x) * 0.5),
        ("erf", lambda x: 0.5 * x * (1.0 + tf.math.erf(0.5 * x))),
        ("log", lambda x: 0.5 * x * tf.math.log1p(0.5 * x)),
        ("square", lambda x: 0.5 * x * tf.square(2.0 * x)),
    )
    def test_tensors_wait_for_their_gradient(self, activation):
        """Optimised, a backward phase does not compute all at its start.

        TensorFlow's gradients read activations once the gradient is there, by
        control dependencies.
        """

        def run(x, w, gradient):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x
                for i in range(4):
                    with tf.name_scope(f"layer_{i}"):
                        y = activation(y @ w)
            return tape.gradient(y, x, gradient)

        spec = tf.TensorSpec((8, 8))
        concrete = tf.function(run, autograph=False).get_concrete_function(
            spec, spec, spec
        )
        part = TracedFunction(concrete, concrete.inputs).extract(
            concrete.inputs, concrete.outputs
        )
        nodes = optimized(
            tf.function(
                lambda *args: part(args), autograph=False
            ).get_concrete_function(spec, spec, spec)
        )
        checked = 0
        for node in nodes:
            for i in range(3):
                # Its gradient comes from the layer after it.
                layer = f"gradient_tape/layer_{i}/"
                before = f"gradient_tape/layer_{i + 1}/matmul/MatMul"
                # TensorFlow makes products with constants of other factors.
                free = node.op in ("Const", "Mul")
                if node.name.startswith(layer) and not free:
                    checked += 1
                    self.assertIn(before, ancestors(nodes, node.name), node)
        self.assertGreater(checked, 2)

    def test_parts(self):
        traced, inputs, (first, second) = self.trace()
        # The tensor itself: the function returns an identity of it.
        early = traced.makers([first])
        live = traced.live([second], early)
        self.assertEqual([x.name for x in live], [self.middle.name])
        before = traced.extract(inputs, [first, *live])
        after = traced.extract(live, [second])

        @tf.function(autograph=False)
        def run(x):
            found = before([x, x])
            return found[0], after(found[1:])[0]

        x = np.arange(9, dtype="float32").reshape(3, 3)
        results = run(tf.constant(x))
        self.assertAllClose(results[0], x)
        self.assertAllClose(results[1], x + np.eye(3))
        # Each part computes for itself what depends on weights alone.
        self.assertEqual(self.calls, {"first": 1, "second": 1, "constant": 2})
        # It reads the weight when it runs.
        self.weight.assign(self.weight * 2)
        self.assertAllClose(run(tf.constant(x))[0], 2 * x)

    def test_effects(self):
        log = []

        def function(x):
            tf.py_function(log.append, [x[0, 0]], [])
            return x + 1, x * 2

        concrete = tf.function(function, autograph=False).get_concrete_function(
            tf.TensorSpec((3, 3))
        )
        inputs = concrete.inputs[:1]
        traced = TracedFunction(concrete, inputs)
        effects = traced.effects()
        self.assertLen(effects, 1)
        without = traced.extract(inputs, [concrete.outputs[0]])
        having = traced.extract(inputs, [concrete.outputs[1]], effects)
        x = tf.ones((3, 3))
        tf.function(lambda: without([x]), autograph=False)()
        self.assertEmpty(log)
        (doubled,) = tf.function(lambda: having([x]), autograph=False)()
        self.assertAllClose(doubled, 2 * x)
        self.assertLen(log, 1)

    def test_without_operations_that_pass_on(self):
        def function(x):
            first = tf.identity_n([tf.identity(x) + 1, x * 2])
            second = tf.stop_gradient(tf.identity(first[1]))
            waits = tf.identity(first[0])
            with tf.control_dependencies([waits]):
                return second + 1, tf.identity(second)

        concrete = tf.function(function, autograph=False).get_concrete_function(
            tf.TensorSpec((3,))
        )
        (x,) = concrete.inputs
        traced = TracedFunction(concrete, [x])
        part = traced.extract([x], concrete.outputs)
        run = tf.function(lambda x: part([x]), autograph=False)
        found = run(tf.constant([1.0, 2.0, 3.0]))
        self.assertAllEqual(found[0], [3.0, 5.0, 7.0])
        self.assertAllEqual(found[1], [2.0, 4.0, 6.0])
        graph = run.get_concrete_function(tf.TensorSpec((3,))).graph
        (definition,) = [
            f
            for f in graph.as_graph_def().library.function
            if any(node.op == "Mul" for node in f.node_def)
        ]
        kinds = collections.Counter(node.op for node in definition.node_def)
        self.assertEqual(kinds["IdentityN"] + kinds["StopGradient"], 0)
        # Identities that wait, or that others wait for, are still there.
        self.assertGreaterEqual(kinds["Identity"], 2)

        (doubled,) = [op for op in traced.operations if op.type == "Mul"]
        (stopped,) = [
            op for op in traced.operations if op.type == "StopGradient"
        ]
        part = traced.extract(
            [x], [stopped.outputs[0]], after={stopped: [doubled]}
        )
        run = tf.function(lambda x: part([x]), autograph=False)
        graph = run.get_concrete_function(tf.TensorSpec((3,))).graph
        nodes = [
            node
            for f in graph.as_graph_def().library.function
            for node in f.node_def
            if node.op == "StopGradient"
        ]
        self.assertLen(nodes, 1)

    def test_functions_within(self):
        @tf.function(autograph=False)
        def power(x):
            return tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, y * x), [0, x]
            )[1]

        concrete = tf.function(
            lambda x: (power(x), x + 1), autograph=False
        ).get_concrete_function(tf.TensorSpec((), tf.float32))
        inputs = concrete.inputs[:1]
        part = TracedFunction(concrete, inputs).extract(
            inputs, [concrete.outputs[0]]
        )
        run = tf.function(lambda x: part([x]), autograph=False)
        del concrete
        self.assertAllClose(run(tf.constant(2.0)), [16.0])


if __name__ == "__main__":
    tf.test.main()
