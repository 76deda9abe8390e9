"""TPU support, as far as it can be tested without one: XLA and placement."""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tf_gpipe.devices import placement
from tf_gpipe.devices import replicas
from tf_gpipe.partition.config import PipelineConfig
from tf_gpipe.step.micro_batch import Split


def layers(rate=0.0):
    return [
        keras.Input((8,)),
        L.Dense(16, activation="relu", kernel_regularizer="l2"),
        L.BatchNormalization(),
        L.Dropout(rate, seed=1),
        L.LayerNormalization(),
        L.Dense(3),
    ]


def model(rate=0.0, **kwargs):
    keras.utils.set_random_seed(0)
    made = tf_gpipe.PipelinedSequential(
        layers(rate),
        num_stages=2,
        num_micro_batches=4,
        devices=["CPU:0", "CPU:0"],
        **kwargs,
    )
    made.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return made


class XlaTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.slow
    def test_whole_step_compiles(self):
        self.assert_whole_step_compiles("1f1b", "always")

    @parameterized.parameters(
        ("1f1b", "never"),
        ("gpipe", "except_last"),
    )
    @pytest.mark.slow
    def test_whole_step_compiles_in_all_modes(self, schedule, remat):
        self.assert_whole_step_compiles(schedule, remat)

    def assert_whole_step_compiles(self, schedule, remat):
        generator = np.random.default_rng(0)
        x = tf.constant(generator.standard_normal((16, 8), dtype="float32"))
        y = tf.constant(generator.integers(0, 3, (16,)))

        def train(jit_compile, rate):
            made = model(rate, schedule=schedule, remat=remat)

            @tf.function(jit_compile=jit_compile)
            def step(x, y):
                loss, gradients, _ = made.loss_and_gradients(x, y)
                for variable, gradient in zip(
                    made.trainable_variables, gradients, strict=True
                ):
                    variable.assign_sub(0.1 * gradient)
                return loss

            losses = [step(x, y).numpy() for _ in range(2)]
            return [losses, *(v.numpy() for v in made.variables)]

        for a, b in zip(train(False, 0.0), train(True, 0.0), strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=1e-5)
        # XLA draws other masks, but the same ones each time.
        for a, b in zip(train(True, 0.5), train(True, 0.5), strict=True):
            self.assertAllEqual(a, b)

    @pytest.mark.slow
    def test_whole_step_with_masks_compiles(self):
        x, y = tf.reshape(tf.range(20) % 4, (4, 5)), tf.ones((4, 5), tf.int32)

        def losses(jit_compile):
            keras.utils.set_random_seed(0)
            made = tf_gpipe.PipelinedSequential(
                [
                    keras.Input((5,), dtype="int32"),
                    L.Embedding(4, 4, mask_zero=True),
                    L.GRU(4, return_sequences=True),
                    L.Dense(3),
                ],
                num_stages=2,
                num_micro_batches=2,
                devices=["CPU:0", "CPU:0"],
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            made.compile("sgd", loss)
            step = tf.function(
                lambda x, y: made.loss_and_gradients(x, y)[0],
                jit_compile=jit_compile,
            )
            return step(x, y)

        self.assertAllClose(losses(True), losses(False))

    @pytest.mark.slow
    def test_number_of_a_replica_that_is_a_tensor(self):
        # All replicas on TPUs run one program.
        def outputs(number):
            made = model(rate=0.5)
            with mock.patch.object(replicas, "number", return_value=number):
                step = tf.function(
                    lambda x: made(x, training=True), jit_compile=True
                )
                rows = step(tf.ones((8, 8)))
            return rows, [v.numpy() for v in made.non_trainable_variables]

        for number in (0, 3):
            a, b = outputs(number), outputs(tf.constant(number))
            self.assertAllClose(a, b)
        self.assertNotAllClose(a[0], outputs(0)[0])

    def test_timeline_is_refused(self):
        made = model()
        made._record_times = lambda times: None
        step = tf.function(made.loss_and_gradients, jit_compile=True)
        with self.assertRaisesRegex(ValueError, "Timeline callback cannot"):
            step(tf.ones((4, 8)), tf.zeros((4,), tf.int64))


class _Strategy:
    """Stands in for a `TPUStrategy`, and records its logical devices."""

    def __init__(self, num_replicas):
        self.current = None
        self.double = mock.create_autospec(
            tf.distribute.TPUStrategy, instance=True
        )
        self.double.extended = mock.Mock(worker_devices=("",) * num_replicas)
        self.double.extended.experimental_logical_device = self._logical
        self.fed = []
        self.double.experimental_assign_to_logical_device = lambda x, core: (
            self.fed.append((x, core)) or x
        )

    @contextlib.contextmanager
    def _logical(self, index):
        previous, self.current = self.current, index
        yield
        self.current = previous


class PlacementTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.strategy = _Strategy(num_replicas=4)
        for name, value in (
            ("get_strategy", self.strategy.double),
            ("has_strategy", True),
            ("in_cross_replica_context", True),
        ):
            self.enterContext(
                mock.patch.object(tf.distribute, name, return_value=value)
            )

    def test_stages_are_logical_cores(self):
        config = PipelineConfig(3, 4, "parameters", "1f1b", "always", None)
        _, devices = config.resolve(5, self.strategy.double)
        self.assertEqual(
            devices,
            [[f"device:TPU_REPLICATED_CORE:{k}"] * 4 for k in range(3)],
        )

    def test_interleaved_stages_share_cores(self):
        config = PipelineConfig(
            4, 4, "parameters", "interleaved", "always", None
        )
        logical = [tf.config.LogicalDevice(f"TPU:{i}", "TPU") for i in range(8)]
        with mock.patch.object(
            placement, "accelerators", return_value=[x.name for x in logical]
        ):
            _, devices = config.resolve(5, self.strategy.double)
        self.assertEqual([row[0][-1] for row in devices], ["0", "1", "0", "1"])

    def test_variables_are_made_on_their_core(self):
        made_on = []

        def initializer(shape, dtype=None):
            made_on.append(self.strategy.current)
            return tf.zeros(shape, dtype)

        with keras.StatelessScope(initialize_variables=False):
            variables = [
                keras.Variable(initializer, shape=(2,)) for _ in range(3)
            ]
        for k, variable in enumerate(variables):
            placement.place(variable, [tf.compat.v1.tpu.core(k)] * 4)
        self.assertEqual(made_on, [0, 1, 2])
        self.assertIsNone(self.strategy.current)

    def test_inputs_are_fed_to_the_first_core(self):
        x = tf.ones((4, 2))
        self.assertIs(replicas.fed({"a": x})["a"], x)
        ((tensor, core),) = self.strategy.fed
        self.assertIs(tensor, x)
        self.assertEqual(core, 0)

    def test_batches_of_unknown_size(self):
        graph = tf.Graph()
        with graph.as_default():
            x = tf.compat.v1.placeholder(tf.float32, (None, 8))
            with self.assertRaisesRegex(ValueError, "drop_remainder=True"):
                Split(x, num_micro_batches=2)
            Split(x, num_micro_batches=1)

    def test_devices_are_the_strategy_s(self):
        config = PipelineConfig(
            2, 4, "parameters", "1f1b", "always", ["CPU:0", "CPU:1"]
        )
        with self.assertRaisesRegex(ValueError, "DeviceAssignment"):
            config.resolve(5, self.strategy.double)


if __name__ == "__main__":
    tf.test.main()
