import threading

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tf_gpipe.stage import matrix_gradient


def _gradients(x, matrix, **kwargs):
    """Returns the gradients of a sum of products, by both factors."""
    with tf.GradientTape() as tape:
        tape.watch([x, matrix])
        product = tf.linalg.matmul(x, matrix, **kwargs)
        loss = tf.reduce_sum(tf.abs(product * product))
    return tape.gradient(loss, [x, matrix])


def _types(*arguments, **kwargs):
    """Returns the types of operations of `_gradients`, as a list."""
    concrete = tf.function(
        lambda *xs: matrix_gradient.compute(lambda: _gradients(*xs, **kwargs)),
        autograph=False,
    ).get_concrete_function(*arguments)
    return [x.type for x in concrete.graph.get_operations()]


def _random(*shape, dtype="float32"):
    values = np.random.default_rng(0).standard_normal((2, *shape))
    if dtype.startswith("complex"):
        return tf.constant(values[0] + 1j * values[1], dtype)
    return tf.constant(values[0], dtype)


_SPEC = tf.TensorSpec((None, None, 4))


class MatrixGradientTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("plain", (3, 5, 4), (4, 6), {}),
        ("transposed", (3, 5, 4), (6, 4), {"transpose_b": True}),
        ("adjoint", (3, 5, 4), (6, 4), {"adjoint_b": True}),
        ("four_axes", (2, 3, 5, 4), (4, 6), {}),
        ("x_transposed", (3, 4, 5), (4, 6), {"transpose_a": True}),
        ("matrix_of_each_row", (3, 5, 4), (3, 4, 6), {}),
        ("matrices_of_one_row", (3, 5, 4), (1, 4, 6), {}),
        ("rows_of_the_second", (5, 4), (3, 4, 6), {}),
        ("no_rows", (0, 5, 4), (4, 6), {}),
        ("no_width", (3, 5, 0), (0, 6), {}),
    )
    def test_equals_tensorflow(self, x, matrix, kwargs):
        for dtype in ("float32", "float64", "complex64"):
            given = _random(*x, dtype=dtype), _random(*matrix, dtype=dtype)
            for function in (_gradients, tf.function(_gradients)):
                wanted = function(*given, **kwargs)
                found = matrix_gradient.compute(
                    lambda function=function, given=given: function(
                        *given, **kwargs
                    )
                )
                for a, b in zip(wanted, found, strict=True):
                    self.assertEqual(a.shape, b.shape)
                    self.assertAllClose(a, b, rtol=1e-5, atol=1e-5)

    def test_one_product(self):
        """No matrix for each row is made and summed."""
        matrix = tf.TensorSpec((4, 6))
        found = _types(_SPEC, matrix)
        # The one of the forward pass.
        self.assertEqual(found.count("BatchMatMulV2"), 1)
        self.assertEqual(found.count("MatMul"), 2)
        found = _types(_SPEC, tf.TensorSpec((6, 4)), transpose_b=True)
        self.assertEqual(found.count("BatchMatMulV2"), 1)

    def test_unknown_width(self):
        given = _random(3, 5, 4), _random(4, 6)
        function = tf.function(
            lambda *xs: matrix_gradient.compute(lambda: _gradients(*xs)),
            input_signature=[
                tf.TensorSpec((None, None, None)),
                tf.TensorSpec((None, None)),
            ],
        )
        for a, b in zip(function(*given), _gradients(*given), strict=True):
            self.assertAllClose(a, b)

    def test_second_derivatives(self):
        given = _random(3, 5, 4), _random(4, 6)

        def second():
            with tf.GradientTape() as tape:
                tape.watch(given)
                by_x, by_matrix = _gradients(*given)
                total = tf.reduce_sum(by_x**2) + tf.reduce_sum(by_matrix**2)
            return tape.gradient(total, given)

        found = matrix_gradient.compute(second)
        for a, b in zip(found, second(), strict=True):
            self.assertAllClose(a, b, rtol=1e-4)

    def test_tensorflows_gradient_elsewhere(self):
        """Afterwards, after an error, and in other threads."""
        spec = _SPEC, tf.TensorSpec((4, 6))

        def types():
            concrete = tf.function(_gradients).get_concrete_function(*spec)
            return [x.type for x in concrete.graph.get_operations()]

        def others():
            found = []
            thread = threading.Thread(target=lambda: found.extend(types()))
            thread.start()
            thread.join()
            return found

        wanted = types()
        self.assertEqual(wanted.count("BatchMatMulV2"), 3)
        self.assertEqual(matrix_gradient.compute(others), wanted)
        with self.assertRaises(ZeroDivisionError):
            matrix_gradient.compute(lambda: 1 / 0)
        self.assertEqual(types(), wanted)

    def test_stages_use_it(self):
        layers = [keras.Input((5, 4))]
        layers += [keras.layers.EinsumDense("abc,cd->abd", (None, 4))] * 2
        model = tf_gpipe.PipelinedSequential(
            layers, num_stages=2, devices=["CPU:0"] * 2
        )
        model.compile("sgd", "mse")
        model.build()
        x = _random(8, 5, 4)
        step = tf.function(lambda: model.train_step((x, x)), autograph=False)
        definition = step.get_concrete_function().graph.as_graph_def()
        nodes = [x for f in definition.library.function for x in f.node_def]
        found = [x for x in nodes if x.op == "BatchMatMulV2"]
        self.assertNotEmpty(found)
        self.assertNotIn(True, [x.attr["adj_x"].b for x in found])


if __name__ == "__main__":
    tf.test.main()
