"""Optimizer updates and metrics run on the device of their tensors."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.tf_gpipe.step.executed_graph import executed_graph

LAYERS = keras.layers
OPTIMIZERS = keras.optimizers
WIDTH = 8


def adamw():
    return OPTIMIZERS.AdamW(
        weight_decay=0.1,
        global_clipnorm=1.0,
        use_ema=True,
        ema_overwrite_frequency=2,
    )


def several():
    return OPTIMIZERS.MultiOptimizer(OPTIMIZERS.OptimizerMap(OPTIMIZERS.Adam()))


def make_model(optimizer, num_layers=2, num_micro_batches=2):
    middle = [LAYERS.BatchNormalization(), LAYERS.Dropout(0.5)]
    model = tf_gpipe.PipelinedSequential(
        [
            keras.Input((WIDTH,)),
            *(LAYERS.Dense(WIDTH) for _ in range(num_layers // 2)),
            *middle,
            *(LAYERS.Dense(WIDTH) for _ in range(num_layers // 2)),
        ],
        num_stages=2,
        num_micro_batches=num_micro_batches,
        devices=["CPU:1", "CPU:2"],
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def graphs_of(function):
    """Yields a function's graph, and the graphs of its branches."""
    graphs = [function.graph]
    for graph in graphs:
        yield graph
        for op in graph.get_operations():
            if op.type in ("If", "StatelessIf"):
                graphs += [
                    graph._get_function(op.get_attr(branch).name).graph
                    for branch in ("then_branch", "else_branch")
                ]


def home(x):
    """Returns the device of a matrix; an empty string for other tensors."""
    if x.shape.rank != 2:
        return ""
    if not x.device and x.op.type == "ReadVariableOp":
        variable = x.op.inputs[0]
        for outer, inner in x.graph.captures:
            if inner is variable:
                return outer.device
    return x.device


def messages(model, x):
    """Returns the names of a step's sends from device to device."""
    step = executed_graph(model.train_on_batch, x, x)
    return [node.name for node in step if node.op in ("_Send", "_HostSend")]


def moved(function):
    """Returns the operations that take a matrix from another device.

    Without calls of the pipeline's tasks, which do so on purpose.
    """
    found = []
    for graph in graphs_of(function):
        for op in graph.get_operations():
            homes = {
                tf.DeviceSpec.from_string(device).device_index
                for device in map(home, op.inputs)
                if device
            }
            here = tf.DeviceSpec.from_string(op.device).device_index
            if homes - {here} and op.type not in (
                "If",
                "StatelessIf",
                "PartitionedCall",
                "StatefulPartitionedCall",
            ):
                found.append(op.name)
    return found


class Noisy(OPTIMIZERS.SGD):
    """Adds noise to gradients, by seeds of its own or else Keras's."""

    def __init__(self, seeds=None):
        super().__init__(0.1)
        self.seeds = seeds

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(gradient.shape, seed=self.seeds)
        super().update_step(gradient + noise, variable, learning_rate)


class Assigning(OPTIMIZERS.SGD):
    """Assigns to a slot in two ways, and within a branch."""

    def build(self, variables):
        super().build(variables)
        self.slots = self.add_optimizer_variables(variables, "slot")

    def update_step(self, gradient, variable, learning_rate):
        slot = self.slots[self._get_variable_index(variable)]
        slot.assign(gradient)
        self.assign_add(slot, gradient)
        keras.ops.cond(
            self.iterations > 0,
            lambda: slot.assign(slot + 1.0),
            lambda: slot.assign(slot * 2.0),
        )
        super().update_step(slot + 0.0, variable, learning_rate)


class UsersOptimizerTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        (lambda: Assigning(0.1),),
        (lambda: Noisy(keras.random.SeedGenerator(3)),),
        (lambda: Noisy(),),
        (
            lambda: OPTIMIZERS.LossScaleOptimizer(
                Noisy(keras.random.SeedGenerator(3)), 4.0
            ),
        ),
    )
    def test_numbers_are_those_of_plain_keras(self, optimizer):
        x = tf.ones((4, 4))
        trained = []
        for make in (
            keras.Sequential,
            functools.partial(tf_gpipe.PipelinedSequential, num_stages=2),
        ):
            model = make([keras.Input((4,)), LAYERS.Dense(4), LAYERS.Dense(4)])
            model.set_weights([np.zeros(w.shape) for w in model.weights])
            keras.utils.set_random_seed(2)
            model.compile(optimizer(), "mse")
            model.optimizer.build(model.trainable_variables)
            for _ in range(3):
                model.train_on_batch(x, x)
            trained.append(model.get_weights())
        for plain, pipelined in zip(*trained, strict=True):
            self.assertAllClose(plain, pipelined)


class ColocationTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        adamw,
        several,
        lambda: OPTIMIZERS.Adafactor(),
        lambda: OPTIMIZERS.LossScaleOptimizer(
            OPTIMIZERS.Adam(gradient_accumulation_steps=2, clipnorm=1.0)
        ),
    )
    def test_nothing_large_moves(self, optimizer):
        model = make_model(optimizer())
        model.make_train_function()
        x = tf.zeros((4, WIDTH))
        step = tf.function(model.train_step, autograph=False)
        self.assertEmpty(moved(step.get_concrete_function((x, x))))

    @parameterized.parameters(
        lambda: OPTIMIZERS.SGD(0.1),
        lambda: OPTIMIZERS.AdamW(weight_decay=0.1, use_ema=True),
        lambda: OPTIMIZERS.Adafactor(),
    )
    @pytest.mark.slow
    def test_messages(self, optimizer):
        x = tf.ones((8, WIDTH))
        sent = {
            (num_layers, m): len(
                messages(make_model(optimizer(), num_layers, m), x)
            )
            for num_layers, m in ((2, 2), (2, 4), (6, 2))
        }
        # Inputs, an activation, a gradient and labels for each micro-batch.
        self.assertEqual(sent[2, 4], sent[2, 2] + 4 * 2, sent)
        # However many weights there are to update.
        self.assertEqual(sent[6, 2], sent[2, 2], sent)

    @pytest.mark.slow
    def test_evaluation(self):
        model = make_model("sgd")
        x = tf.zeros((4, WIDTH))
        step = tf.function(model.test_step, autograph=False)
        self.assertEmpty(moved(step.get_concrete_function((x, x))))

    def test_optimizer_that_a_function_chooses(self):
        adam = OPTIMIZERS.Adam()
        model = make_model(OPTIMIZERS.MultiOptimizer(lambda variable: adam))
        model.make_train_function()
        self.assertTrue(adam.apply.colocates)

    def test_optimizer_serves_a_plain_model_as_well(self):
        optimizer = OPTIMIZERS.SGD(0.5)
        x = tf.ones((4, WIDTH))
        make_model(optimizer).fit(x, x, verbose=0)
        optimizer = type(optimizer).from_config(optimizer.get_config())
        plain = keras.Sequential([keras.Input((WIDTH,)), LAYERS.Dense(WIDTH)])
        plain.compile(optimizer, "mse")
        before = plain.layers[0].kernel.numpy()
        plain.fit(x, x, verbose=0)
        self.assertNotAllClose(plain.layers[0].kernel, before)

    def test_eager(self):
        model = make_model("adam")
        model.run_eagerly = True
        x = tf.ones((4, WIDTH))
        first = model.train_on_batch(x, x)
        self.assertLess(model.train_on_batch(x, x)[0], first[0])


if __name__ == "__main__":
    tf.test.main()
