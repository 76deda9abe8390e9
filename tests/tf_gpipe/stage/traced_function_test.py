"""Parts of a trace compute what the whole does, and nothing twice."""

import collections

import numpy as np
import tensorflow as tf

from tf_gpipe.stage.traced_function import TracedFunction


class TracedFunctionTest(tf.test.TestCase):
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

    def test_parts(self):
        traced, inputs, (first, second) = self.trace()
        # The tensor itself: the function returns an identity of it.
        early = traced.makers([first])
        live = traced.live([second], early)
        self.assertEqual([x.name for x in live], [self.middle.name])
        before = traced.part(inputs, [first, *live])
        after = traced.part(live, [second])

        @tf.function(autograph=False)
        def run(x):
            found = before([x, x])
            return found[0], after(found[1:])[0]

        x = np.arange(9, dtype="float32").reshape(3, 3)
        results = run(tf.constant(x))
        self.assertAllClose(results[0], x)
        self.assertAllClose(results[1], x + np.eye(3))
        # What follows from weights alone each part has for itself.
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
        without = traced.part(inputs, [concrete.outputs[0]])
        having = traced.part(inputs, [concrete.outputs[1]], effects)
        x = tf.ones((3, 3))
        tf.function(lambda: without([x]), autograph=False)()
        self.assertEmpty(log)
        (doubled,) = tf.function(lambda: having([x]), autograph=False)()
        self.assertAllClose(doubled, 2 * x)
        self.assertLen(log, 1)

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
        part = TracedFunction(concrete, inputs).part(
            inputs, [concrete.outputs[0]]
        )
        run = tf.function(lambda x: part([x]), autograph=False)
        del concrete
        self.assertAllClose(run(tf.constant(2.0)), [16.0])


if __name__ == "__main__":
    tf.test.main()
