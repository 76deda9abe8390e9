"""Functions of equal descriptions compute the same."""

import tensorflow as tf
from absl.testing import parameterized

from tf_gpipe.stage import same_traces


def _described(function, variables=()):
    concrete = tf.function(function, autograph=False).get_concrete_function(
        tf.TensorSpec((2, 3)), tf.TensorSpec((2, 3))
    )
    numbers = {id(v.handle): i for i, v in enumerate(variables)}
    return same_traces.described(
        concrete.graph,
        concrete.structured_outputs,
        lambda x: numbers.get(id(x), id(x)),
    )


def _repeated(factor):
    return lambda x, y: tf.while_loop(
        lambda i, _: i < 3, lambda i, x: (i + 1, factor * x), (0, x + y)
    )


def _chosen(factor):
    return lambda x, y: tf.cond(
        tf.reduce_sum(x) > 0, lambda: factor * x, lambda: y
    )


def _called(factor):
    return tf.function(lambda x, y: factor * x + y)


def _called_twice(factor):
    inner = _called(factor)
    return tf.function(lambda x, y: inner(inner(x, y), y))


def _named(factor):
    def run(x, y):
        with tf.name_scope(f"name_{factor}"):
            return x + y

    return run


def _mapped(factor):
    return lambda x, y: tf.map_fn(lambda x: factor * x, x) + y


class DescribedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        _repeated, _chosen, _called, _called_twice, _mapped
    )
    def test_functions_within(self, make):
        """Loops, branches and functions are described by their bodies."""
        one, same, other = (_described(make(x)) for x in (2.0, 2.0, 3.0))
        self.assertEqual(one[:3], same[:3])
        self.assertNotEqual(one[:3], other[:3])

    def test_first_operations(self):
        """The forward pass is described as if no gradient followed it."""
        weight = tf.Variable(2.0)
        ends = []

        def forward(x, y):
            z = tf.tanh(weight * x) + y
            ends.append(len(z.graph.get_operations()))
            return z

        def both(x, y):
            z = forward(x, y)
            return z, tf.gradients(z, x)

        def described(function, num_operations):
            concrete = tf.function(function, autograph=False)
            concrete = concrete.get_concrete_function(
                tf.TensorSpec((2, 3)), tf.TensorSpec((2, 3))
            )
            z = tf.nest.flatten(concrete.structured_outputs)[0]
            # The function returns a copy of it.
            return same_traces.described(
                concrete.graph, z.op.inputs[0], id, num_operations or ends[-1]
            )

        one = described(forward, None)
        self.assertEqual(one, described(both, None))
        self.assertNotEqual(one, described(both, 1000))

    def test_names(self):
        self.assertEqual(_described(_named(1)), _described(_named(2)))

    @parameterized.parameters(
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: (x, y), lambda x, y: (y, x)),
        (lambda x, y: (x + y, None), lambda x, y: (None, x + y)),
        (
            lambda x, y: tf.matmul(x, y, transpose_a=True),
            lambda x, y: tf.matmul(y, x, transpose_a=True),
        ),
        (lambda x, y: tf.reduce_sum(x, 0), lambda x, y: tf.reduce_sum(x, 1)),
        (lambda x, y: tf.cast(x, "int32"), lambda x, y: tf.cast(x, "int64")),
        (lambda x, y: tf.split(x, 3, 1)[0], lambda x, y: tf.split(x, 3, 1)[2]),
        (lambda x, y: x + tf.zeros(3), lambda x, y: x + tf.zeros((1, 3))),
    )
    def test_different(self, one, other):
        self.assertNotEqual(_described(one), _described(other))

    def test_devices_and_order(self):
        def run(x, y, device="CPU:0", waits=False):
            with tf.device(device):
                first = tf.exp(x)
            with tf.control_dependencies([first] if waits else []):
                return tf.exp(y) + first

        plain = _described(run)
        self.assertEqual(plain, _described(lambda x, y: run(x, y)))
        for change in ({"device": "CPU:1"}, {"waits": True}):
            other = _described(lambda x, y, c=change: run(x, y, **c))
            self.assertNotEqual(plain, other)

    def test_variables(self):
        """Each variable stands for the one at the same place."""
        a, b, c, d = (tf.Variable(tf.ones(3) * i) for i in range(4))
        one = _described(lambda x, y: x * a + y * b, [a, b])
        same = _described(lambda x, y: x * c + y * d, [c, d])
        swapped = _described(lambda x, y: x * d + y * c, [c, d])
        twice = _described(lambda x, y: x * c + y * c, [c, d])
        unknown = _described(lambda x, y: x * c + y * d, [c])
        self.assertEqual(one, same)
        for other in (swapped, twice, unknown):
            self.assertNotEqual(one, other)

    @parameterized.parameters(
        (lambda x, y: tf.nn.silu(x + y), True),
        (_repeated(2.0), False),
        (lambda x, y: tf.map_fn(tf.nn.silu, x + y), True),
        (lambda x, y: tf.nn.gelu(x + y), False),
    )
    def test_custom_gradients(self, function, expected):
        found = _described(function)
        self.assertEqual(found.has_custom_gradients, expected)
        # Without the function's name.
        self.assertEqual(found, _described(function))


if __name__ == "__main__":
    tf.test.main()
