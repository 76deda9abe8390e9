"""The engine runs the tasks of a device in the schedule's order."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe.step.executed_graph import executed_graph
from tf_gpipe.schedule import schedules

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
        """Returns `arrived` unchanged, and logs a task with this kind."""

        def log(value, passed):
            self.append(f"{kind}{self.stage}.{int(value)}")
            return passed

        # Not stateful: TensorFlow would keep the order on its own.
        result = tf.numpy_function(
            log, [x[0, 0], arrived], x.dtype, stateful=False
        )
        return tf.ensure_shape(result, x.shape)


def _with_effects():
    """Layers with and without weights, all of which do more than compute."""

    @tf.custom_gradient
    def printed(x):
        def back(upstream):
            tf.print("")
            return upstream + tf.random.normal(tf.shape(upstream))

        tf.print("")
        return x + tf.random.normal(tf.shape(x)), back

    return [
        keras.layers.BatchNormalization(),
        keras.layers.Lambda(printed),
        keras.layers.Dense(3, activity_regularizer="l2"),
        keras.layers.Lambda(printed),
    ]


def _recurrent():
    return [keras.layers.LSTM(3, return_sequences=True) for _ in range(4)]


def _waits(graph):
    """Returns the tasks that each task of a step waits for in its graph.

    Returns:
        Dict of sets of other tasks, by task, all of them as text.
    """
    before, waits = {}, {}
    # Operations come in an order in which they could run, except the step's
    # results, which wait for an operation at the end.
    for op in graph.get_operations():
        found = re.match(r"([FRBW]\d+\.\d+)(_\d+)?/", op.name)
        own = {found[1]} if found else set()
        inputs = [*(x.op for x in op.inputs), *op.control_inputs]
        before[op] = own.union(*(before.get(x, ()) for x in inputs))
        for task in own:
            waits.setdefault(task, set()).update(before[op] - own)
    return waits


class OrderTest(parameterized.TestCase, tf.test.TestCase):
    @pairwise.each(
        schedule=(
            *("1f1b", "eager_1f1b", "gpipe", "interleaved", "zero_bubble"),
            *("interleaved_zero_bubble", "zb_v", "v_half", "v_min"),
            "eager_zero_bubble",
        ),
        devices=(["CPU:0", "CPU:1"], ["CPU:0"] * 4),
    )
    @pytest.mark.slow_after(1)
    def test_order(self, schedule, devices):
        if schedule in schedules.TWO_STAGES_A_DEVICE:
            devices = devices[:2]
        elif (
            schedule not in schedules.ANY_STAGES_A_DEVICE and len(devices) == 2
        ):
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

        for device in sorted(set(devices)):
            stages = {
                stage.index
                for stage in model.stages
                if stage.device.endswith(device)
            }
            self.assertEqual(
                # Nothing is left for the first stage's W tasks: nobody waits
                # for gradients by the inputs of the model.
                [
                    str(task)
                    for task in order
                    if task.stage in stages and task.kind in "FB"
                ],
                [text for text in log if int(text[1]) in stages],
            )

    @pairwise.product(
        num_stages=(1, 3),
        schedule=("1f1b", "gpipe", "zero_bubble"),
        rows=(1, 3),
        num_micro_batches=(1, 3),
        eager=(False, True),
    )
    @pytest.mark.slow_after(2)
    def test_last_stage_recomputes_no_single_micro_batch(
        self, num_stages, schedule, rows, num_micro_batches, eager
    ):
        log = []
        layers = [Logged(log, k) for k in range(num_stages)]
        # The backward pass needs what this layer makes of logged outputs.
        layers = [x for each in layers for x in (each, keras.layers.Dense(1))]
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((1,)), *layers],
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            balance=[2] * num_stages,
            schedule=schedule,
            devices=["CPU:0"] * num_stages,
        )
        plain = model.to_keras()
        x = tf.ones((rows, 1))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(x) - 2.0) ** 2)
        expected = tape.gradient(loss, model.trainable_weights)
        model.compile("sgd", "mse", run_eagerly=eager)
        step = model.loss_and_gradients
        if not eager:
            step = tf.function(step)
        step(x, 2.0 * x)
        log.clear()
        _, gradients, _ = step(x, 2.0 * x)
        self.assertAllClose(gradients, expected)
        parts = min(rows, num_micro_batches)
        counts = [
            len([x for x in log if x.startswith(f"F{k}")])
            for k in range(num_stages)
        ]
        last = 2 * parts if schedule == "gpipe" and parts > 1 else parts
        self.assertEqual(counts, [*[2 * parts] * (num_stages - 1), last])

    @parameterized.parameters("1f1b", "zero_bubble")
    def test_all_stages_recompute_for_a_tape(self, schedule):
        """It asks for gradients when all forward passes are done."""
        log = []
        layers = [
            x for k in range(2) for x in (Logged(log, k), keras.layers.Dense(1))
        ]
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((1,)), *layers],
            num_stages=2,
            num_micro_batches=3,
            balance=[2, 2],
            schedule=schedule,
            devices=["CPU:0"] * 2,
        )

        @tf.function
        def gradients(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(loss, model.trainable_weights)

        x = tf.constant([[1.0], [2.0], [3.0]])
        gradients(x)
        log.clear()
        gradients(x)
        for k in range(2):
            self.assertLen([x for x in log if x.startswith(f"F{k}")], 6)

    @pairwise.each(
        layers=(_with_effects, _recurrent),
        schedule=(
            *("1f1b", "eager_1f1b", "gpipe", "zero_bubble"),
            "eager_zero_bubble",
        ),
        remat=("always", "except_last", "never"),
    )
    @pytest.mark.slow_after(1)
    def test_tasks_wait_for_nothing_else(self, layers, schedule, remat):
        def loss(y_true, y_pred):
            tf.print("")
            tf.debugging.assert_all_finite(y_pred, "")
            return keras.losses.mean_squared_error(y_true, y_pred)

        model = tf_gpipe.PipelinedSequential(
            [keras.Input((3, 3)), *layers()],
            balance=[1] * 4,
            num_micro_batches=8,
            schedule=schedule,
            remat=remat,
        )
        model.compile("adam", loss, metrics=["mae"])
        x = tf.zeros((8, 3, 3))
        step = tf.function(lambda x: model.train_step((x, x)))
        graph = step.get_concrete_function(x).graph
        order = model._pipeline.schedule
        needed, previous = {}, {}
        for task in order.steps(remat):
            before = [*order.needs(task), *previous.get(task.stage, [])]
            previous[task.stage] = [task]
            needed[str(task)] = {str(x) for x in before}.union(
                *(needed[str(x)] for x in before)
            )
        self.assertEqual(needed, _waits(graph))


class InputsTest(parameterized.TestCase, tf.test.TestCase):
    def model(self, **kwargs):
        """Returns a model each of whose stages takes its inputs."""
        inputs = x = keras.Input((6,), name="given")
        for _ in range(3):
            x = keras.layers.Add()([keras.layers.Dense(6)(x), inputs])
        model = tf_gpipe.PipelinedModel(
            inputs,
            x,
            num_micro_batches=NUM_MICRO_BATCHES,
            balance=[2, 2, 2],
            **kwargs,
        )
        model.compile("sgd", "mse")
        return model

    @pairwise.product(
        rows=(8, 6, 2, None),
        schedule=("gpipe", "1f1b", "zero_bubble"),
        name=("fit", "predict"),
    )
    def test_a_stage_is_sent_micro_batches(self, rows, schedule, name):
        """None is sent a whole mini-batch, which it would have to keep."""
        model = self.model(schedule=schedule)
        x = np.ones((rows or 8, 6), "float32")
        data = (x, x, x[:, 0]) if name == "fit" else (x,)
        dataset = tf.data.Dataset.from_tensors(data)
        if rows is None:
            dataset = dataset.unbatch().batch(8)
        step = getattr(model, name)
        nodes = executed_graph(lambda: step(dataset, verbose=0))
        received = {node.name for node in nodes if node.op == "_Recv"}
        cut = [
            node
            for node in nodes
            if node.op == "StridedSlice"
            and node.attr["T"].type == tf.float32.as_datatype_enum
        ]
        sent = {node.input[0] for node in nodes if node.op == "_Send"}
        # A mini-batch of two rows has two micro-batches.
        several = min(len(x), NUM_MICRO_BATCHES)
        self.assertGreaterEqual(len(sent & {x.name for x in cut}), several)
        self.assertEmpty(received & {x.input[0] for x in cut})
