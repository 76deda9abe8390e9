"""Packs hold any number of tensors, at a cost proportional to it."""

import tensorflow as tf
from absl.testing import parameterized

from tf_gpipe.stage.pack import pack
from tf_gpipe.stage.pack import unpack


class PackTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(0, 1, 15, 16, 17, 256, 257, 700)
    def test_same_tensors(self, count):
        tensors = [tf.fill((1 + i % 3,), float(i)) for i in range(count)]
        packed = pack(tensors)
        self.assertLen(packed, min(count, 1))
        found = unpack(packed, tensors)
        self.assertLen(found, count)
        for a, b in zip(tensors, found, strict=True):
            self.assertAllEqual(a, b)

    def test_types_and_shapes(self):
        tensors = [
            tf.zeros((i,), tf.float64 if i % 2 else tf.int32) for i in range(40)
        ]

        @tf.function
        def through():
            found = unpack(pack(tensors), tensors)
            self.assertEqual(
                [x.shape for x in found], [x.shape for x in tensors]
            )
            return found

        self.assertEqual(
            [x.dtype for x in through()], [x.dtype for x in tensors]
        )

    def test_no_operation_takes_many(self):
        """TensorFlow's type inference is quadratic in an operation's width."""

        @tf.function
        def through(*tensors):
            return unpack(pack(tensors), tensors)

        graph = through.get_concrete_function(*[tf.zeros(())] * 500).graph
        widths = [
            len(op.inputs) + len(op.outputs)
            for op in graph.get_operations()
            if op.type.startswith("Optional")
        ]
        self.assertLess(sum(x * x for x in widths), 500 * 50)


if __name__ == "__main__":
    tf.test.main()
