"""The engine runs the tasks of a device in the schedule's order."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe

NUM_MICRO_BATCHES = 4


class Logged(keras.layers.Layer):
    """Passes its inputs on, times one, and logs when it does so.

    The value of the inputs tells the micro-batch.
    """

    def __init__(self, log, stage):
        super().__init__()
        self.append = log.append
        self.stage = stage

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        @tf.custom_gradient
        def logged(x):
            return self._log("F", x, x), lambda upstream: self._log(
                "B", x, upstream
            )

        return logged(x * self.scale)

    def _log(self, kind, x, arrived):
        """Returns what has arrived, by way of the log."""

        def log(value, passed):
            self.append(f"{kind}{self.stage}.{int(value)}")
            return passed

        # Not stateful: TensorFlow would keep the order on its own.
        result = tf.numpy_function(
            log, [x[0, 0], arrived], x.dtype, stateful=False
        )
        return tf.ensure_shape(result, x.shape)


class OrderTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(
        schedule=("1f1b", "eager_1f1b", "gpipe", "interleaved", "zero_bubble"),
        devices=(["CPU:0", "CPU:1"], ["CPU:0"] * 4),
    )
    def test_order(self, schedule, devices):
        if schedule != "interleaved" and len(devices) == 2:
            devices = [*devices, "CPU:2", "CPU:3"]
        log = []
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((1,)), *(Logged(log, k) for k in range(4))],
            num_stages=4,
            num_micro_batches=NUM_MICRO_BATCHES,
            balance=[1] * 4,
            schedule=schedule,
            remat="never",
            devices=devices,
        )
        model.compile("sgd", "mse")
        x = np.arange(NUM_MICRO_BATCHES, dtype="float32")[:, None]
        step = tf.function(model.loss_and_gradients)
        step(tf.constant(x), tf.constant(x))
        log.clear()
        step(tf.constant(x), tf.constant(x))
        order = model._pipeline.schedule.order

        def passes_back(stage):
            # Nobody needs gradients by the inputs of the model: where the
            # passes are split, the first stage has those of weights alone.
            split = schedule == "zero_bubble" and stage == 0
            return "W" if split else "B"

        for device in sorted(set(devices)):
            stages = {
                stage.index
                for stage in model.stages
                if stage.device.endswith(device)
            }
            self.assertEqual(
                [
                    str(task).replace("W", "B")
                    for task in order
                    if task.stage in stages
                    and task.kind in ("F", passes_back(task.stage))
                ],
                [text for text in log if int(text[1]) in stages],
            )

    @parameterized.product(
        schedule=("1f1b", "gpipe", "zero_bubble"), remat=("always", "never")
    )
    def test_stages_do_not_wait_for_side_effects(self, schedule, remat):
        model = tf_gpipe.PipelinedSequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(3),
                # Without weights, and so without variables to read.
                keras.layers.ReLU(),
                keras.layers.Dense(3),
            ],
            balance=[1, 1, 1],
            num_micro_batches=4,
            schedule=schedule,
            remat=remat,
        )
        model.compile("sgd", "mse")
        x = tf.zeros((8, 3))
        step = tf.function(model.loss_and_gradients)
        graph = step.get_concrete_function(x, x).graph
        calls = [
            op
            for op in graph.get_operations()
            if op.type.endswith("PartitionedCall")
        ]
        self.assertGreaterEqual(len(calls), 20)
        # TensorFlow would run these one after another, on whatever device.
        chained = [
            op.name
            for op in calls
            if op.op_def.is_stateful
            and not any(x.dtype == tf.resource for x in op.inputs)
        ]
        self.assertEmpty(chained)
